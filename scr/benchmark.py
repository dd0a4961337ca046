"""Time the network in every backend against the others, then report: the main study.

    python scr/benchmark.py                          # torch, mlx, mlx-fused; batches 1 to 512
    python scr/benchmark.py --quick                  # in half a minute, for a look: under the tag quick
    python scr/benchmark.py --backends all --tag m1  # a reference run under output/m1 and conclusions/m1

Writes output/per_trial.npz (raw trials, first and atomically), then output/plots and
conclusions/benchmark_result.md, and prints a table of P50, P95 and speedups. With --tag TAG it writes
under output/TAG and conclusions/TAG and leaves the other runs alone; --quick means --tag quick unless another
is given. The default run takes about 6 minutes on 2 CPU cores, where MLX needs 4 to 8 s per forward at batch
512, and about 4 on a GPU.
Ctrl-C keeps what was measured in output/per_trial.partial.npz. Exit status: 0; 1 if a backend gave a wrong
result or failed, or none could run; 2 for bad input; 130 after Ctrl-C.
"""

import itertools
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

import mnist_data
from harness import ablation, backends, ceilings, costs, layers, machine, shapes
from harness.cli import QUICK_TAG, Fault, check_tag, parse_settings, run_command
from harness.measure import (
    Candidate,
    Case,
    Interrupted,
    MeasureSettings,
    keep_partial,
    plain_settings,
    print_problems,
    run_study,
)
from harness.paths import CHECKPOINT, CONCLUSIONS, DATA, OUTPUT, shown
from harness.precompile import precompile
from harness.record import Record, save


@dataclass(frozen=True)
class Settings(MeasureSettings):
    """What to time and where to write it."""

    backends: tuple[str, ...] = field(
        default=backends.DEFAULT,
        metadata={"help": f"any of {', '.join(backends.BACKENDS)}, or all"},
    )
    batch_sizes: tuple[int, ...] = field(default=(1, 16, 64, 128, 256, 512), metadata={"help": "images"})
    dtype: tuple[str, ...] = field(
        default=("float32",),
        metadata={
            "help": "storage types; the first is the main one",
            "choices": ("float32", "float16", "bfloat16"),
        },
    )
    device: str = field(
        default="auto",
        metadata={"help": "PyTorch's device (MLX takes its own)", "choices": ("auto", "cpu", "mps", "cuda")},
    )
    target: str | None = field(
        default=None,
        metadata={
            "help": "where our kernels run (default: MLX's device)",
            "choices": ("metal", "cuda", "host"),
        },
    )
    compile_mode: str = field(
        default="default",
        metadata={"help": "of torch.compile: default, reduce-overhead, max-autotune, …"},
    )
    tf32: bool = field(
        default=False,
        metadata={"help": "also time with TF32, the frameworks' default on NVIDIA, as a second case"},
    )
    direct: bool = field(
        default=False,
        metadata={"help": "also time MLX's best rungs without its CUDA graphs (NVIDIA), as further cases"},
    )
    again: bool = field(
        default=False,
        metadata={"help": "time every backend twice, the second time as NAME-again: are differences found?"},
    )
    energy: float = field(
        default=1.0, metadata={"help": "seconds per cell to count joules on NVIDIA GPUs; 0: do not"}
    )
    shapes: tuple[str, ...] = field(
        default=(),
        metadata={"help": "also time one layer at other people's shapes", "choices": shapes.SETS},
    )
    layers: bool = field(
        default=True,
        metadata={"help": "also time the layers by kind and the fused kernel's parts, at one batch size"},
    )
    tuned: bool = field(default=True, metadata={"help": "use what scr/tune.py found for this machine"})
    precompile: bool = field(
        default=False,
        metadata={"help": "compile on all cores beforehand what is kept on disk (not Metal)"},
    )
    checkpoint: Path = field(default=CHECKPOINT, metadata={"help": "trained weights"})
    data_dir: Path = field(default=DATA, metadata={"help": "MNIST files, for the inputs"})
    tag: str | None = field(
        default=None, metadata={"help": "write a reference run to output/TAG and conclusions/TAG"}
    )
    quick: bool = field(default=False, metadata={"help": "small batches and few trials: half a minute"})


SHAPES_BATCHES = (1, 16)  # other shapes are timed at those of these batch sizes that are asked for
LAYERS_BATCH = 64  # layers are timed at the batch size nearest to it
QUICK = {
    "batch_sizes": (1, 16),
    "trials": 20,
    "warmup": 3,
    "budget": 1.0,
    "rounds": 5,
    "layers": False,
    "tag": QUICK_TAG,
}


def main() -> int:
    """Measure, save, report. Returns the exit status."""
    settings = resolve(parse_settings(Settings, __doc__, quick=QUICK))
    output, conclusions = OUTPUT, CONCLUSIONS
    if settings.tag:
        output, conclusions = OUTPUT / settings.tag, CONCLUSIONS / settings.tag
    path = output / "per_trial.npz"
    print("settings:", ", ".join(f"{name} {value}" for name, value in plain_settings(settings).items()))
    try:
        record = measure(settings)
    except Interrupted as stop:
        add_costs(stop.record)
        return keep_partial(stop, path)
    if not (record.rows["kind"] == "latency").any():
        print_problems(record)
        print("Nothing could be measured; no file was written.")
        return 1
    save(record, path)
    print(f"wrote {shown(path)}: {len(record.rows)} trials in {record.environment['seconds']:.0f} s")
    report(record, output / "plots", conclusions / "benchmark_result.md")
    return print_problems(record)


def resolve(settings: Settings) -> Settings:
    """Settings with `all` spelled out and checked. Raises Fault for what cannot be run."""
    if "all" in settings.backends:
        settings = replace(settings, backends=tuple(backends.BACKENDS))
    for name in settings.backends:
        backends.check_name(name)
    settings = replace(
        settings,
        backends=tuple(dict.fromkeys(settings.backends)),
        batch_sizes=tuple(dict.fromkeys(settings.batch_sizes)),
        dtype=tuple(dict.fromkeys(settings.dtype)),
    )
    if min(settings.batch_sizes) < 1 or settings.trials < 1 or settings.budget <= 0 or settings.rounds < 1:
        raise Fault("batch sizes, trials, rounds and budget must be positive.")
    if min(settings.pause, settings.threads, settings.energy, settings.limit) < 0:
        raise Fault("pause, threads, energy and limit must not be negative.")
    if settings.direct and not set(backends.DIRECT_RUNGS) & set(settings.backends):
        raise Fault(f"--direct times {', '.join(backends.DIRECT_RUNGS)}; name one of them in --backends.")
    check_tag(settings.tag)
    if not settings.checkpoint.is_file():
        raise Fault(f"{shown(settings.checkpoint)} does not exist; `python scr/train_mnist.py` makes it.")
    return replace(settings, threads=settings.threads or machine.default_threads())


def measure(settings: Settings) -> Record:
    """Run the study. MLX gets the weights in a file of its own, to load them without PyTorch."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        weights = backends.port_weights(settings.checkpoint, Path(folder) / "weights.safetensors")
        environment = machine.describe(threads=settings.threads)
        probes = ceilings.probes(settings.backends, settings.device, settings.threads, settings.direct)
        found, source = cases(settings, weights)
        if settings.precompile:
            environment["precompiled"] = precompile(found, settings.threads)
        record = run_study(found, settings, environment | {"inputs": source}, probes, begin=begin)
    add_costs(record)
    return record


def cases(settings: Settings, weights: Path) -> tuple[list[Case], str]:
    """What is timed, on real test digits (batch B is the first B of them), and the digits' source."""
    images, _, source = mnist_data.test_digits(settings.data_dir)
    images = mnist_data.normalise(images)

    def first(batch_size: int) -> np.ndarray:
        """The first `batch_size` images (N, 1, 28, 28), from the start again where there are too few."""
        return np.resize(images, (batch_size, *images.shape[1:]))

    options = backends.Options(
        checkpoint=settings.checkpoint,
        mlx_checkpoint=weights,
        dtype=settings.dtype[0],
        device=settings.device,
        target=settings.target,
        threads=settings.threads,
        compile_mode=settings.compile_mode,
        tuned=settings.tuned,
    )
    network = Case(
        study="mnist",
        name="network",
        batch_sizes=settings.batch_sizes,
        inputs=first,
        dtype=settings.dtype[0],
        candidates=candidates(settings, options),
        reference=backends.reference(settings.checkpoint),
    )
    found = [network]
    for dtype in settings.dtype[1:]:
        stored = candidates(settings, replace(options, dtype=dtype))
        found.append(replace(network, dtype=dtype, candidates=stored))
    if settings.tf32:
        peers = candidates(settings, replace(options, dtype="float32", tf32=True))
        case = replace(network, name="network, TF32", dtype="float32", tolerance="tf32", candidates=peers)
        found.append(replace(case, energy=False))
    if settings.direct:
        found += direct_cases(settings, network, options)
    beside: list[Case] = []  # whose energy nobody asks for
    sizes = tuple(size for size in settings.batch_sizes if size in SHAPES_BATCHES) or (1,)
    for name in settings.shapes:
        beside += shapes.cases(name, settings.backends, options, sizes)
    if settings.layers and settings.dtype[0] == "float32":
        size = min(settings.batch_sizes, key=lambda size: max(size / LAYERS_BATCH, LAYERS_BATCH / size))
        beside += layers.cases(settings.backends, options, first, (size,))
        beside += ablation.cases(settings.backends, options, (size,))
    return [*found, *(replace(case, energy=False) for case in beside)], source


def direct_cases(settings: Settings, network: Case, options: backends.Options) -> list[Case]:
    """MLX's best rungs, launched without CUDA graphs, and waited for asleep or awake; in its rounds."""
    names = [name for name in backends.DIRECT_RUNGS if name in settings.backends]
    found = []
    for dtype, (name, awake) in itertools.product(settings.dtype, backends.DIRECT_CASES.items()):
        how = replace(options, dtype=dtype, direct=True, awake=awake)
        rungs = tuple(backends.candidate(rung, how) for rung in names)
        case = replace(network, name=name, dtype=dtype, candidates=rungs)
        found.append(replace(case, energy=False, shares_rounds=network.name))
    return found if names else []


def candidates(settings: Settings, options: backends.Options) -> tuple[Candidate, ...]:
    """The backends as the harness takes them; our kernels multiply without TF32 and have no case with it."""
    names = [name for name in settings.backends if not options.tf32 or backends.may_use_tf32(name)]
    found = [backends.candidate(name, options) for name in names]
    if settings.again:
        found += [replace(one, name=f"{one.name}-again") for one in found]
    return tuple(found)


def add_costs(record: Record) -> None:
    """Put beside every cell what it must cost on this machine by the cost model."""
    limits = record.environment["ceilings"]
    for cell in record.cells:
        if cell["target"] and cell["study"] == "mnist":
            cell["cost"] = costs.predict(
                costs.rung_of(cell),
                cell["target"],
                cell["batch_size"],
                cell["dtype"],
                limits,
                "mlx-direct" if cell["case"] in backends.DIRECT_CASES else None,
            )


def report(record: Record, plots: Path, markdown: Path) -> None:
    """Write plots and report, and print the results in short."""
    from harness.report import build, screen_table  # imports matplotlib, slowly: not before the measurement

    build(record, plots, markdown)
    print(f"\n{screen_table(record)}\n")
    print(f"wrote {shown(markdown)} and {shown(plots)}")


if __name__ == "__main__":
    run_command(main)
