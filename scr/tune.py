"""Search this machine for faster tilings of the block and network kernels; later runs use what it finds.

    python scr/tune.py            # 15 minutes on 2 CPU cores, less on an H200; Ctrl-C and run again to go on
    python scr/tune.py --quick    # batches 1 and 128 only

The candidates for a tiling are compiled first, on all cores (16 at most), where that leaves something on
disk: on the CPU, and on NVIDIA. Each is checked against the reference before it is timed, and replaces the
default only where the interval of its speedup says so. Prints one line per tiling searched, and where the
result is stored: output/tuned/DEVICE.json. Tilings found with other kernel texts than today's are not used.
"""

from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx

import kernels
import mlx_model
from harness import tuning
from harness.cli import Fault, parse_settings, run_command
from harness.paths import CHECKPOINT, DATA, shown
from mnist_data import normalise, test_digits


@dataclass(frozen=True)
class Settings:
    """The options of the command, with their defaults."""

    levels: tuple[str, ...] = field(
        default=mlx_model.LAUNCH_LEVELS,
        metadata={"help": "fusion levels to search", "choices": mlx_model.LAUNCH_LEVELS},
    )
    batch_sizes: tuple[int, ...] = field(default=(1, 16, 128, 512), metadata={"help": "one search for each"})
    rounds: int = field(default=12, metadata={"help": "interleaved rounds of the finalists"})
    quick: bool = field(default=False, metadata={"help": "batches 1 and 128, six rounds"})
    resume: bool = field(default=True, metadata={"help": "keep what an earlier search has finished"})
    target: str | None = field(
        default=None,
        metadata={"help": "metal, cuda or host (default: MLX's device)", "choices": kernels.TARGETS},
    )
    checkpoint: Path = field(default=CHECKPOINT, metadata={"help": "weights to run with"})
    data_dir: Path = field(default=DATA, metadata={"help": "holds MNIST/raw"})


QUICK = {"batch_sizes": (1, 128), "rounds": 6}


def main() -> None:
    """Search, printing each result as it comes."""
    settings = parse_settings(Settings, __doc__, quick=QUICK)
    target = settings.target or kernels.default_target()
    reason = kernels.unavailable(target)
    if reason:
        raise Fault(f"the {target} target cannot be tuned: {reason}")
    pixels = test_digits(settings.data_dir)[0][: max(settings.batch_sizes)]
    images = normalise(pixels).transpose(0, 2, 3, 1)  # (N, 1, 28, 28) -> (N, 28, 28, 1)
    for level in settings.levels:
        model = mlx_model.get_model(level, settings.checkpoint, mx.float32, target)
        steps = tuning.search(model, settings.batch_sizes, settings.rounds, settings.resume, images)
        with closing(steps):  # also after Ctrl-C: what compiles then is let finish
            for step in steps:
                print(sentence(step), flush=True)
    print(f"stored in {shown(tuning.path(target))}")


def sentence(step: tuning.Step) -> str:
    """One line on what a search found."""
    what = f"{step.level:8} batch {step.batch:4}" + ("" if step.block is None else f"  block {step.block}")
    tried = f"{step.tried} tried" + (f", {step.wrong} wrong" if step.wrong else "")
    if step.ratio is None:
        return f"{what}: the default is the fastest ({tried})"
    bounds = f"{step.ratio:.3f}×, {step.low:.3f} to {step.high:.3f}" if step.low else f"{step.ratio:.3f}×"
    kept = f"kept {step.tiling}" if step.tiling else f"the default stays, {step.verdict}"
    return f"{what}: best candidate {bounds} ({tried}): {kept}"


if __name__ == "__main__":
    run_command(main)
