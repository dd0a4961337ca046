"""Where things lie in the repository, and how a file is replaced without ever being half-written."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "output"
CONCLUSIONS = ROOT / "conclusions"
DATA = ROOT / "data"
CHECKPOINT = OUTPUT / "best_model.pth"


@contextmanager
def replace_atomic(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it over `path` if the block succeeds, else remove it.

    The temporary file keeps the suffix of `path`, since writers such as NumPy's append a missing one.
    It is flushed to disk before the rename, so a kill at any moment leaves the old file or the new one.
    Folders are made as needed.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path | str, data: bytes | str) -> None:
    """Replace the contents of `path` by `data` (text as UTF-8), atomically."""
    with replace_atomic(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


def _umask() -> int:
    """The process's file mode mask; it can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def shown(path: Path | str) -> str:
    """`path` as printed and stored: relative to the repository where it lies inside, else its last name."""
    path = Path(path).resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
