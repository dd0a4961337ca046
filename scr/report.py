"""Rebuild plots and conclusions from a stored run, or compare stored runs. Needs neither PyTorch nor MLX.

    python scr/report.py                        # output/per_trial.npz -> output/plots, conclusions/
    python scr/report.py --tag m1               # output/m1/per_trial.npz -> output/m1/plots, conclusions/m1
    python scr/report.py --tag all              # the default run's report and every reference run's
    python scr/report.py --compare A.npz B.npz  # ratio, interval and verdict per cell, on screen
    python scr/report.py --compare A.npz B.npz --fail-on-regression 5

A report takes about 20 seconds and ends by naming the files written. Exit status: 0; 1 if
--fail-on-regression is given and a cell of the first file is missing in a later one or slower there by more
than that many percent, its whole 95 % interval included; 2 for a file that is missing, damaged, partial or
foreign.
"""

from dataclasses import dataclass, field
from pathlib import Path

from harness.cli import QUICK_TAG, Fault, parse_settings, run_command
from harness.compare import comparison_text, load_complete
from harness.paths import CONCLUSIONS, OUTPUT, shown, write_atomic
from harness.record import load


@dataclass(frozen=True)
class Settings:
    """What to report on."""

    tag: str | None = field(
        default=None, metadata={"help": "the run TAG; all: every stored run but that of --quick"}
    )
    compare: tuple[Path, ...] = field(
        default=(), metadata={"help": "stored runs (.npz), the first of which the others are held against"}
    )
    fail_on_regression: float | None = field(
        default=None,
        metadata={"help": "with --compare: exit with 1 if a cell is missing or slower by more percent"},
    )
    to: Path | None = field(default=None, metadata={"help": "with --compare: also write it to this file"})


def main() -> int:
    """Report or compare. Returns the exit status."""
    settings = parse_settings(Settings, __doc__)
    if settings.compare:
        return compare(settings)
    if settings.fail_on_regression is not None or settings.to is not None:
        raise Fault("--fail-on-regression and --to need --compare with two or more files.")
    from harness.report import build  # matplotlib is slow to import, and a comparison draws nothing

    for output, conclusions in folders(settings.tag):
        record = load(output / "per_trial.npz")
        markdown = conclusions / "benchmark_result.md"
        build(record, output / "plots", markdown)
        print(f"wrote {shown(markdown)} and {shown(output / 'plots')}")
    return 0


def folders(tag: str | None) -> list[tuple[Path, Path]]:
    """(output, conclusions) folders of the runs that `tag` names."""
    if tag is None:
        return [(OUTPUT, CONCLUSIONS)]
    if tag != "all":
        return [(OUTPUT / tag, CONCLUSIONS / tag)]
    tagged = (path for path in OUTPUT.glob("*/per_trial.npz") if path.parent.name != QUICK_TAG)
    paths = [OUTPUT / "per_trial.npz", *sorted(tagged)]
    # The other studies' runs lie in folders of the same form and have reports of their own.
    found = [
        path.parent.relative_to(OUTPUT)
        for path in paths
        if path.is_file() and (load(path).rows["study"] == "mnist").any()
    ]
    if not found:
        raise Fault(f"{shown(OUTPUT)} holds no benchmark run; `python scr/benchmark.py` makes one.")
    return [(OUTPUT / name, CONCLUSIONS / name) for name in found]


def compare(settings: Settings) -> int:
    """Print the comparison, and write it where asked."""
    if len(settings.compare) < 2:
        raise Fault("--compare needs two or more files.")
    if settings.fail_on_regression is not None and settings.fail_on_regression < 0:
        raise Fault("--fail-on-regression takes a percentage of zero or more.")
    records = [load_complete(path) for path in settings.compare]
    text, regressed = comparison_text(list(settings.compare), records, settings.fail_on_regression)
    print(text, end="")
    if settings.to is not None:
        write_atomic(settings.to, text)
        print(f"wrote {shown(settings.to)}")
    return int(regressed)


if __name__ == "__main__":
    run_command(main)
