"""Time latency against batch and hold it against a simple model: study 3, what a batch costs.

    python scr/batching.py                        # the best device here; 200 s on 2 CPU cores
    python scr/batching.py --quick                # small sizes, for a look: under the tag quick
    python scr/batching.py --device cuda --tag h200
    python scr/batching.py --rebuild              # plots and report again, from the stored record

Writes output/batching/per_trial.npz (raw trials, first and atomically), output/batching/*.png and
conclusions/batching.md; with --tag TAG under output/TAG/ and conclusions/TAG/, and --quick means --tag quick
unless another is given. Our MNIST network is taken from the benchmark's own record of the same tag,
output/per_trial.npz, also by --rebuild when it came later. Ctrl-C keeps what was measured in
per_trial.partial.npz. Exit status: 0; 1 if a case gave a wrong result or failed; 2 for bad input; 130 after
Ctrl-C.
"""

from pathlib import Path

from batch.study import FAMILIES, Settings, add_network, measure
from harness.cli import QUICK_TAG, Fault, check_tag, parse_settings, run_command
from harness.measure import Interrupted, keep_partial, print_problems
from harness.paths import CONCLUSIONS, OUTPUT, shown
from harness.record import Record, load, save

QUICK = {"trials": 20, "warmup": 2, "budget": 0.05, "rounds": 4, "tag": QUICK_TAG}


def main() -> int:
    """Measure, save, report. Returns the exit status."""
    settings = parse_settings(Settings, __doc__, quick=QUICK)
    check(settings)
    output, conclusions = OUTPUT, CONCLUSIONS
    if settings.tag:
        output, conclusions = OUTPUT / settings.tag, CONCLUSIONS / settings.tag
    path = output / "batching" / "per_trial.npz"
    markdown = conclusions / "batching.md"
    print(settings)
    if settings.rebuild:
        record = load(path)
        if add_network(record, output / "per_trial.npz"):
            save(record, path)
        report(record, path.parent, markdown)
        return 0
    try:
        record = measure(settings, output / "per_trial.npz")
    except Interrupted as stop:
        return keep_partial(stop, path)
    save(record, path)
    print(f"wrote {shown(path)}: {len(record.rows)} trials in {record.environment['seconds']:.0f} s")
    report(record, path.parent, markdown)
    return print_problems(record)


def check(settings: Settings) -> None:
    """Raise Fault for what cannot be run."""
    if settings.trials < 1 or settings.budget <= 0 or settings.rounds < 1:
        raise Fault("trials, rounds and budget must be positive.")
    if settings.limit < 0:
        raise Fault("the limit must not be negative.")
    for family in settings.families:
        if family not in FAMILIES:
            raise Fault(f"unknown family {family!r}; known are {', '.join(FAMILIES)}.")
    check_tag(settings.tag)


def report(record: Record, plots: Path, markdown: Path) -> None:
    """Write plots and report."""
    from batch.report import build  # matplotlib is slow to import: not before the measurement

    for written in build(record, plots, markdown):
        print(f"wrote {shown(written)}")


if __name__ == "__main__":
    run_command(main)
