"""The digits: where they are taken from, and one sentence for each kind of wrong file."""

import gzip
import hashlib
import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

import mnist_data
import mnist_files
from harness.cli import Fault

TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = mnist_files.NAMES


@pytest.fixture
def raw(tmp_path):
    return mnist_files.write_mnist(tmp_path)


def replace_bytes(change):
    def apply(path):
        path.write_bytes(change(path.read_bytes()))

    return apply


def as_broken_gzip(data):
    packed = bytearray(gzip.compress(data))
    packed[len(packed) // 2] ^= 0xFF
    return bytes(packed)


WRONG = {  # case: (file, change of it, words of the sentence)
    "truncated images": (TRAIN_IMAGES, replace_bytes(lambda b: b[:-1]), "is truncated"),
    "truncated labels": (TEST_LABELS, replace_bytes(lambda b: b[:-1]), "is truncated"),
    "truncated header": (TRAIN_IMAGES, replace_bytes(lambda b: b[:10]), "truncated in its header"),
    "too long": (TEST_IMAGES, replace_bytes(lambda b: b + b"\0"), "is too long"),
    "html": (TRAIN_IMAGES, replace_bytes(lambda b: b"<!DOCTYPE html><html>404</html>"), "web page"),
    "html in gzip": (
        TRAIN_IMAGES,
        replace_bytes(lambda b: gzip.compress(b"\n<html>404</html>")),
        "web page",
    ),
    "labels as images": (
        TRAIN_IMAGES,
        replace_bytes(lambda b: mnist_files.idx_bytes(np.zeros(60, np.uint8))),
        "0x00000803",
    ),
    "wrong magic": (TEST_LABELS, replace_bytes(lambda b: b"\0\0\x09\x01" + b[4:]), "0x00000801"),
    "wrong size of images": (
        TRAIN_IMAGES,
        replace_bytes(lambda b: mnist_files.idx_bytes(np.zeros((60, 32, 32), np.uint8))),
        "32×32",
    ),
    "no images": (
        TRAIN_IMAGES,
        replace_bytes(lambda b: mnist_files.idx_bytes(np.zeros((0, 28, 28), np.uint8))),
        "holds no images",
    ),
    "fewer labels": (
        TRAIN_LABELS,
        replace_bytes(lambda b: mnist_files.idx_bytes(np.zeros(59, np.uint8))),
        "has 60 images but",
    ),
    "empty": (TEST_IMAGES, replace_bytes(lambda b: b""), "is empty"),
    "label 10": (TRAIN_LABELS, replace_bytes(lambda b: b[:-1] + b"\x0a"), "the label 10 at position 59"),
    "corrupt gzip": (TRAIN_IMAGES, replace_bytes(as_broken_gzip), "corrupt gzip"),
    "cut gzip": (TRAIN_IMAGES, replace_bytes(lambda b: gzip.compress(b)[:-20]), "corrupt gzip"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_files_are_refused_in_one_sentence(raw, tmp_path, case):
    name, change, words = WRONG[case]
    change(raw / name)
    before = {path: path.read_bytes() for path in raw.iterdir()}
    with pytest.raises(Fault) as fault:
        mnist_data.load_digits(tmp_path)
    message = str(fault.value)
    assert name in message and words in message and "\n" not in message
    assert "delete" in message or "replace" in message, "no remedy"
    assert {path: path.read_bytes() for path in raw.iterdir()} == before, "something was left behind"


def test_missing_files_are_named(raw, tmp_path):
    (raw / TRAIN_LABELS).unlink()
    with pytest.raises(Fault, match=f"lacks {TRAIN_LABELS}; add"):
        mnist_data.load_digits(tmp_path)


def test_unreadable_directory(raw, tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    if os.geteuid() == 0:  # to whom no folder is closed
        monkeypatch.setattr(mnist_data.os, "scandir", refuse)
    else:
        raw.chmod(0)
    try:
        with pytest.raises(Fault, match=r"raw cannot be read \(Permission denied\); mend it"):
            mnist_data.load_digits(tmp_path)
    finally:
        monkeypatch.undo()
        raw.chmod(0o755)


def test_a_file_in_place_of_the_directory(tmp_path):
    (tmp_path / "MNIST").write_text("not a folder")
    with pytest.raises(Fault, match="cannot be read"):
        mnist_data.load_digits(tmp_path)


def test_plain_and_gzip_give_the_same_digits(raw, tmp_path):
    plain = mnist_data.load_digits(tmp_path)
    for path in list(raw.iterdir()):
        (raw / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    packed = mnist_data.load_digits(tmp_path)
    images, labels = mnist_files.blobs(60, 1)
    assert np.array_equal(plain.train_images, images) and np.array_equal(packed.train_images, images)
    assert np.array_equal(packed.train_labels, labels)
    assert len(packed.test_images) == len(packed.test_labels) == 20
    assert packed.provenance == plain.provenance and not packed.is_subset


def test_provenance_names_originals_and_others(raw, tmp_path, monkeypatch):
    digest = hashlib.md5((raw / TEST_LABELS).read_bytes()).hexdigest()
    files = dict(mnist_data.FILES)
    files[TEST_LABELS] = (files[TEST_LABELS][0], digest)
    monkeypatch.setattr(mnist_data, "FILES", files)
    provenance = mnist_data.load_digits(tmp_path).provenance
    assert provenance[TEST_LABELS] == "the original file, byte for byte"
    assert provenance[TRAIN_IMAGES].startswith("not the original file")


def test_packaged_digits_stand_in_and_say_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mnist_data, "download_files", lambda data_dir: "no network.")
    digits = mnist_data.load_digits(tmp_path)
    assert digits.is_subset and "PACKAGED SUBSET" in digits.source
    assert "no network" in capsys.readouterr().err
    assert digits.train_images.shape == (4000, 28, 28) and digits.test_images.shape == (1000, 28, 28)
    assert np.bincount(np.concatenate([digits.train_labels, digits.test_labels])).tolist() == [500] * 10
    assert len(set(digits.test_labels[:20].tolist())) > 5, "the first digits must not all be of one class"
    images, labels, source = mnist_data.test_digits(tmp_path)
    assert np.array_equal(images, digits.test_images) and np.array_equal(labels, digits.test_labels)
    assert source == digits.source


def test_normalise_is_the_published_formula():
    images = np.array([0, 33, 255], np.uint8).reshape(3, 1, 1) * np.ones((1, 28, 28), np.uint8)
    result = mnist_data.normalise(images)
    assert result.shape == (3, 1, 28, 28) and result.dtype == np.float32
    wanted = [(value / 255 - 0.1307) / 0.3081 for value in (0, 33, 255)]
    assert np.allclose(result[:, 0, 5, 5], wanted, atol=1e-6)


def test_validation_split_is_fixed():
    training, validation = mnist_data.validation_split(60_000)
    assert len(validation) == 5000 and not set(training) & set(validation)
    assert len(training) + len(validation) == 60_000
    # Were the split to change, stored accuracies could no longer be compared.
    assert hashlib.md5(validation.astype("<i8").tobytes()).hexdigest() == "ac4444526b6756f01352c6e75c173b5a"


def listen_and_say_nothing():
    """A server that accepts connections and never answers; returns it and its address."""
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    return server, f"http://127.0.0.1:{server.getsockname()[1]}/"


def test_stalled_download_is_given_up(tmp_path):
    server, address = listen_and_say_nothing()
    with server:
        problem = mnist_data.download_files(tmp_path / "data", [address], stall_s=1.0)
        server.settimeout(1)
        server.accept()[0].close()  # fails if nobody asked
    assert problem == "nothing arrived for 1 s, so it was given up."
    assert list((tmp_path / "data").iterdir()) == [], "half a download was left behind"


class _Page(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>sign in to the network</html>")

    def log_message(self, *arguments):
        pass


def test_download_of_a_web_page_is_refused(tmp_path):
    with HTTPServer(("127.0.0.1", 0), _Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        problem = mnist_data.download_files(tmp_path / "data", [f"http://127.0.0.1:{server.server_port}/"])
        server.shutdown()
    assert problem.startswith("torchvision failed") and "\n" not in problem
    assert list((tmp_path / "data").iterdir()) == []


STUB = """
import pathlib, shutil, sys
raw = pathlib.Path(sys.argv[1], "MNIST", "raw")
raw.mkdir(parents=True)
for path in pathlib.Path(sys.argv[2]).iterdir():
    shutil.copy(path, raw)
"""


def test_finished_download_moves_into_place_only_when_it_is_right(tmp_path, monkeypatch):
    monkeypatch.setattr(mnist_data, "_DOWNLOAD_PROGRAM", STUB)
    fetched = mnist_files.write_mnist(tmp_path / "fetched")
    assert mnist_data.download_files(tmp_path / "good", [str(fetched)]) is None
    assert len(mnist_data.load_digits(tmp_path / "good").train_images) == 60
    assert [path.name for path in (tmp_path / "good").iterdir()] == ["MNIST"]
    (fetched / TRAIN_IMAGES).write_bytes((fetched / TRAIN_IMAGES).read_bytes()[:-5])
    problem = mnist_data.download_files(tmp_path / "bad", [str(fetched)])
    assert "is truncated" in problem
    assert list((tmp_path / "bad").iterdir()) == []


def test_download_into_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "data").write_text("a file")
    assert "cannot be written" in mnist_data.download_files(tmp_path / "data")
