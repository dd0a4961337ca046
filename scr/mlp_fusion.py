"""Profile MLPs from nn.Linear to a fused GeGLU, and say what fusion changes: the second study.

    python scr/mlp_fusion.py                # this machine's GPU, or its CPU
    python scr/mlp_fusion.py --quick        # tiny sizes, about a minute, for a look: under the tag quick
    python scr/mlp_fusion.py --tag h200     # a reference run under output/h200 and conclusions/h200
    python scr/mlp_fusion.py --rebuild      # rebuild the report from the stored record and traces

Writes output/mlp_fusion/ (per_trial.npz, traces, plots) and conclusions/mlp_fusion.md; with --tag TAG under
output/TAG/ and conclusions/TAG/, and --quick means --tag quick unless another is given. The default run takes
about 5 minutes on 2 CPU cores (--seconds sets it) and 80 s on an H200. Optional: triton comes with PyTorch
on Linux, and `pip install liger-kernel` adds Liger's kernel.
Ctrl-C while timing keeps what was measured in output/mlp_fusion/per_trial.partial.npz. Exit status: 0; 1 if a
way of running a case gave a wrong result; 2 for bad input; 130 after Ctrl-C.
"""

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from harness import machine
from harness.cli import QUICK_TAG, Fault, check_tag, parse_settings, run_command
from harness.measure import Interrupted, keep_partial, print_problems
from harness.paths import CONCLUSIONS, OUTPUT, shown
from harness.record import Record, load, save
from mlp.settings import Settings

QUICK = {"tag": QUICK_TAG}  # the sizes are those of the study's own QUICK


def main() -> int:
    """Run the study or only its report. Returns the exit status."""
    settings = resolve(parse_settings(Settings, __doc__, quick=QUICK))
    output = OUTPUT / (settings.tag or "") / "mlp_fusion"
    markdown = CONCLUSIONS / (settings.tag or "") / "mlp_fusion.md"
    if settings.rebuild:
        record = load(output / "per_trial.npz")
    else:
        print(settings)
        try:
            record = measure(settings, output)
        except Interrupted as stop:
            return keep_partial(stop, output / "per_trial.npz")
    from mlp.report import build  # matplotlib is slow to import: not before the measurement

    build(record, output, markdown)
    print(f"wrote {shown(markdown)} and {shown(output)}")
    return print_problems(record)


def resolve(settings: Settings) -> Settings:
    """Check the settings and fill in the threads. Raises Fault for what cannot be run."""
    if not set(settings.experiments) <= set(range(1, 8)):
        raise Fault("experiments are numbered 1 to 7.")
    if min(settings.trials, settings.rounds, settings.budget, settings.seconds) <= 0:
        raise Fault("trials, rounds, budget and seconds must be positive.")
    if settings.limit < 0:
        raise Fault("the limit must not be negative.")
    check_tag(settings.tag)
    return replace(settings, threads=settings.threads or machine.default_threads())


def measure(settings: Settings, output: Path) -> Record:
    """Run the study and store its record and traces; the old ones stay until the new ones are complete."""
    with tempfile.TemporaryDirectory() as folder:
        # A cache of its own, so that compiling is cold. Inductor reads the variable when it is imported.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder) / "inductor")
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # hides the profiler's own messages
        from mlp import study

        traces = Path(folder) / "traces"
        record = study.run(settings, traces)
        save(record, output / "per_trial.npz")
        shutil.rmtree(output / "traces", ignore_errors=True)
        shutil.copytree(traces, output / "traces")
    print(f"wrote {shown(output / 'per_trial.npz')}: {len(record.rows)} trials")
    return record


if __name__ == "__main__":
    run_command(main)
