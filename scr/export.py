"""Export a checkpoint for loading without PyTorch: safetensors in MLX's layout, with metadata.

    python scr/export.py                             # output/best_model.pth -> output/best_model.safetensors
    python scr/export.py --checkpoint other.pth --output other.safetensors

The file is read back and compared before it replaces an older one. Then import, loading and first forward are
timed in new processes, from either file (about 30 s on 2 CPU cores; `--cold-starts 0` leaves that out); the
times go to output/export.json and, by `python scr/train_mnist.py --redraw`, into conclusions/training.md.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

import mlx_model
import training_report
from harness.cli import Fault, parse_settings, run_command
from harness.paths import CHECKPOINT, replace_atomic, shown


@dataclass(frozen=True)
class Settings:
    """The options of the command, with their defaults."""

    checkpoint: Path = field(default=CHECKPOINT, metadata={"help": "PyTorch checkpoint to export"})
    output: Path | None = field(
        default=None, metadata={"help": "file to write (default: the checkpoint's name with .safetensors)"}
    )
    cold_starts: int = field(default=5, metadata={"help": "processes to time per format"})


def main() -> None:
    """Export, then time cold starts."""
    settings = parse_settings(Settings, __doc__)
    source = settings.checkpoint
    target = settings.output or source.with_suffix(".safetensors")
    metadata = export(source, target)
    print(f"wrote {shown(target)}: {json.dumps(metadata, ensure_ascii=False)}")
    if settings.cold_starts > 0:
        times = {path.suffix[1:]: cold_starts(path, settings.cold_starts) for path in (source, target)}
        path = target.with_name("export.json")
        device = "CPU" if mx.default_device() == mx.cpu else "GPU"
        training_report.write_json(path, {"mlx": version("mlx"), "device": device, "cold_start_ms": times})
        print(f"wrote {shown(path)}")


def export(source: Path, target: Path) -> dict[str, str]:
    """Write the weights of checkpoint `source` to `target`; returns the metadata. Raises Fault."""
    if mlx_model.is_exported(source):
        raise Fault(
            f"{shown(source)} is exported already; converting it again would permute its layout twice."
        )
    from torch_model import read_checkpoint

    arrays = mlx_model.ported(read_checkpoint(source))
    metadata = describe(source)
    write(target, arrays, metadata)
    return metadata


def describe(source: Path) -> dict[str, str]:
    """Metadata of an export of `source`: data and accuracy come from the JSON that names its hash."""
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    account = training_report.read_json(source.with_suffix(".json")) or {}
    if account.get("checkpoint_sha256") != digest:
        account = {}  # of another checkpoint
    accuracy = account.get("test_accuracy")
    return {
        "format_version": mlx_model.EXPORT_VERSION,
        "layout": mlx_model.EXPORT_LAYOUT,
        "network": "DepthwiseMNIST",
        "source": shown(source),
        "source_sha256": digest,
        "data_source": account.get("data_source", "unknown"),
        "test_accuracy": "unknown" if accuracy is None else f"{accuracy:.4f}",
    }


def write(target: Path, arrays: Mapping[str, mx.array], metadata: dict[str, str]) -> None:
    """Write arrays and metadata; what is read back must equal them before `target` is replaced."""
    if target.suffix != ".safetensors":
        raise Fault(f"{shown(target)} must be named .safetensors; choose another --output.")
    arrays = {name: mx.contiguous(array) for name, array in arrays.items()}
    with replace_atomic(target) as temporary:
        mx.save_safetensors(str(temporary), arrays, metadata)
        stored, stored_metadata = mlx_model.read_exported(temporary)
        differing = [
            name
            for name in {*arrays, *stored}
            if name not in arrays
            or name not in stored
            or not mx.array_equal(arrays[name], stored[name]).item()
        ]
        differing += [f"metadata {key}" for key in metadata if stored_metadata.get(key) != metadata[key]]
        if differing:
            what = ", ".join(sorted(differing))
            raise Fault(f"{shown(target)} read back differently ({what}); the older file was kept.")


_COLD_START = """
import time
start = time.perf_counter()
import sys
sys.path.insert(0, sys.argv[1])
import mlx.core as mx
import mlx_model
imported = time.perf_counter()
model = mlx_model.get_model(level="folded", checkpoint=sys.argv[2])
loaded = time.perf_counter()
mx.eval(model(mx.zeros((1, 28, 28, 1))))
done = time.perf_counter()
print(1e3 * (imported - start), 1e3 * (loaded - imported), 1e3 * (done - loaded), "torch" in sys.modules)
"""


def cold_starts(checkpoint: Path, count: int) -> list[dict[str, float | bool]]:
    """Milliseconds of import, load and first forward of `checkpoint`, in `count` new processes."""
    found = []
    for _ in range(count):
        process = subprocess.run(
            [sys.executable, "-c", _COLD_START, str(Path(__file__).parent), str(checkpoint)],
            capture_output=True,
            text=True,
            check=False,
        )
        if process.returncode != 0:
            last = process.stderr.strip().splitlines()[-1:]
            raise Fault(f"a new process could not load {shown(checkpoint)}: {''.join(last)}")
        imported, loaded, first, torch = process.stdout.split()
        found.append(
            {
                "import": float(imported),
                "load": float(loaded),
                "first_forward": float(first),
                "imports_torch": torch == "True",
            }
        )
    return found


if __name__ == "__main__":
    run_command(main)
