"""Checkpoints of every origin: each loads right or fails with one sentence that names the entry."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

import mnist_files
import torch_model
from harness.cli import Fault
from harness.paths import ROOT, replace_atomic, write_atomic

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def state():
    return {name: value.clone() for name, value in mnist_files.random_model().state_dict().items()}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.pth"


def assert_loads(path, state):
    found = torch_model.read_checkpoint(path)
    wanted = {name: value for name, value in state.items() if "num_batches" not in name}
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == torch.float32 and found[name].device.type == "cpu"
        assert torch.equal(found[name], value), name


def assert_refused(path, *words):
    with pytest.raises(Fault) as fault:
        torch_model.read_checkpoint(path)
    message = str(fault.value)
    assert "model.pth" in message and "\n" not in message
    for word in words:
        assert word in message, message


def test_saved_checkpoint_loads_into_a_model_in_eval_mode(state, path):
    torch_model.save_checkpoint(state, path)
    assert_loads(path, state)
    model = torch_model.load_model(path)
    assert not model.training
    images = torch.randn(2, 1, 28, 28)
    with torch.no_grad():
        assert torch.equal(model(images), mnist_files.random_model()(images))


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "module.module."]
)
def test_prefixes_of_wrappers_are_stripped(state, path, prefix):
    torch.save({prefix + name: value for name, value in state.items()}, path)
    assert_loads(path, state)


def test_prefixes_are_stripped_at_the_start_of_keys_only(path):
    torch.save({"head.module.weight": torch.ones(2), "module.tail._orig_mod.bias": torch.ones(2)}, path)
    assert set(torch_model.read_state(path)) == {"head.module.weight", "tail._orig_mod.bias"}


def test_one_entry_with_and_without_prefix_is_refused(state, path):
    torch.save({**state, "module.fc.bias": state["fc.bias"]}, path)
    assert_refused(path, "fc.bias twice")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"model": state},
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"model": {"state_dict": state}},
        lambda state: {"model": {f"module.{name}": value for name, value in state.items()}},
    ],
)
def test_wrappers_are_opened(state, path, wrap):
    torch.save(wrap(state), path)
    assert_loads(path, state)


def test_optimizer_state_beside_the_model_is_ignored(state, path):
    model = mnist_files.random_model()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.zeros(1, 1, 28, 28)).sum().backward()
    optimizer.step()
    torch.save({"model": state, "optimizer": optimizer.state_dict(), "epoch": 7, "loss": 0.1}, path)
    assert_loads(path, state)


@pytest.mark.parametrize("device", ["cuda:0", "mps"])
def test_tensors_saved_on_another_device_load_on_the_cpu(state, path, device, monkeypatch):
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: device)
    torch.save(state, path)
    monkeypatch.undo()
    assert device.encode() in path.read_bytes(), "the file does not name the device"
    assert_loads(path, state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types_become_float32(state, path, dtype):
    converted = {n: v.to(dtype) if v.is_floating_point() else v for n, v in state.items()}
    torch.save(converted, path)
    assert_loads(path, {name: value.float() for name, value in converted.items()})


def test_views_are_made_independent(state, path):
    together = torch.zeros(2, 10)
    torch.save({**state, "fc.bias": together[0]}, path)
    assert torch_model.read_checkpoint(path)["fc.bias"].untyped_storage().nbytes() == 40


def test_missing_renamed_and_wrongly_shaped_keys_are_all_listed(state, path):
    changed = dict(state)
    del changed["conv1.0.weight"]
    changed["stages.1.depthwise.weight"] = changed.pop("stages.1.dw.weight")
    changed["fc.weight"] = torch.zeros(192, 10)
    torch.save(changed, path)
    assert_refused(
        path,
        "missing: conv1.0.weight, stages.1.dw.weight",
        "unexpected: stages.1.depthwise.weight",
        "fc.weight is (192, 10) instead of (10, 192)",
    )


class Harmful:
    """Unpickling it runs a command."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("inside", [lambda x, s: x, lambda x, s: {"model": s, "extra": x}])
def test_pickled_objects_are_refused_and_never_executed(state, path, tmp_path, inside):
    torch.save(inside(Harmful(tmp_path / "ran"), state), path)
    assert_refused(path, "pickled", "system", "never executed")
    assert not (tmp_path / "ran").exists()


def test_a_pickled_model_is_refused(path):
    torch.save(mnist_files.random_model(), path)
    assert_refused(path, "pickled torch_model.DepthwiseMNIST", "save only the state_dict")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"<html>404</html>", "damaged"),
        (bytes(range(256)) * 9, "damaged"),
    ],
)
def test_foreign_files_are_refused(path, content, words):
    path.write_bytes(content)
    assert_refused(path, words)


def test_truncated_and_missing_files_are_refused(state, path, tmp_path):
    assert_refused(path, "does not exist")
    torch_model.save_checkpoint(state, path)
    whole = path.read_bytes()
    for size in (100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert_refused(path, "damaged")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fc.bias": torch.full((10,), float("nan"))}, "fc.bias holds a value that is not finite"),
        ({"conv1.1.running_var": torch.full((48,), -1.0)}, "conv1.1.running_var holds a negative variance"),
        ({"fc.bias": torch.zeros(10, dtype=torch.int64)}, "fc.bias is torch.int64"),
        ({"note": "hello"}, "'note' is a str"),
    ],
)
def test_entries_that_are_no_weights_are_named(state, path, change, words):
    torch.save({**state, **change}, path)
    assert_refused(path, words)


@pytest.mark.parametrize(
    ("content", "words"),
    [({}, "it is empty"), ([1, 2], "holds a list"), ({"optimizer": {}}, "'optimizer' is a dict")],
)
def test_files_without_weights_are_refused(path, content, words):
    torch.save(content, path)
    assert_refused(path, words)


def test_failed_save_keeps_the_old_file_and_leaves_nothing(path):
    write_atomic(path, b"old")
    with pytest.raises(ZeroDivisionError), replace_atomic(path) as temporary:
        temporary.write_bytes(b"half")
        _ = 1 / 0
    assert path.read_bytes() == b"old"
    assert [file.name for file in path.parent.iterdir()] == [path.name]


WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
from harness.paths import write_atomic
for number in range(1_000_000):
    write_atomic(sys.argv[2], bytes([number % 256]) * 400_000)
"""


def test_a_kill_at_any_moment_leaves_the_old_file_or_the_new_one(path):
    moments = random.Random(5)
    seen = set()
    for _ in range(15):
        path.write_bytes(b"\xff" * 400_000)
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(ROOT / "scr"), str(path)])
        try:
            start = time.monotonic()
            while path.read_bytes()[:1] == b"\xff" and time.monotonic() - start < 20:
                time.sleep(0.002)
            time.sleep(moments.uniform(0, 0.03))
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        content = path.read_bytes()
        assert len(content) == 400_000 and len(set(content)) == 1, "a mixture or a part of two files"
        seen.add(content[0])
    assert len(seen) > 1, "every kill came at the same file; the test shows nothing"
