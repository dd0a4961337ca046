"""Search this machine for tilings that beat the defaults, and keep what it found for later runs.

A candidate replaces one tiling of a whole forward, so it is timed where it will be used: chained with the
other launches, through MLX. The clock is the GPU's own where it can be traced (NVIDIA), since launching and
waiting would hide most differences, else the wall's. First all candidates of a step are compiled, in
parallel, in processes of their own (harness/ahead.py). Then every candidate gets a few bursts; then the best
few and the default compete in interleaved rounds, and the winner is kept only if `statistics.speedup` calls
it faster than the default. Blocks are searched one after the other, each with the earlier ones' winners in
place. Results are stored per device in `output/tuned/NAME.json` after every step, so that an interrupted
search goes on where it stopped.
"""

import json
import re
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tqdm import tqdm

import kernels
import mlx_model
from harness import gpu_trace, machine, statistics
from harness.ahead import Ahead, AnyTiling
from harness.cli import Fault
from harness.paths import OUTPUT, write_atomic
from harness.present import present
from harness.tolerances import compare
from kernels import tilings

FOLDER = OUTPUT / "tuned"
FINALISTS = 3
BURST_S = 0.02  # of one candidate, without a pause
TRACED = 5  # calls in a burst by the GPU's trace
SCREENING_ROUNDS = 3
FIELDS = {"Tiling": tilings.Tiling, "NetworkTiling": tilings.NetworkTiling}

Burst = Callable[[Callable[[], mx.array]], float]  # a forward -> milliseconds per call
Setting = tuple[AnyTiling | None, ...]  # what replaces a level's defaults


@dataclass
class Step:
    """One search: which tiling of which level at which batch, and what came of it."""

    level: str
    batch: int
    block: int | None  # None: the network's only tiling
    tiling: dict[str, Any] | None = None  # None: the default stays
    kind: str | None = None
    tried: int = 0
    wrong: int = 0  # candidates that did not compute the reference, or did not run
    ratio: float | None = None  # default's time ÷ the finalist's
    low: float | None = None
    high: float | None = None
    verdict: str = ""

    @property
    def key(self) -> tuple[str, int, int | None]:
        """What the step searches."""
        return self.level, self.batch, self.block

    def found(self) -> AnyTiling | None:
        """The tiling that replaces the default, if any."""
        return FIELDS[self.kind](**self.tiling) if self.tiling and self.kind else None


@dataclass
class Results:
    """All steps of one device. `hashes`: of the kernel texts they were found with."""

    device: str
    hashes: dict[str, str]
    versions: dict[str, str]
    steps: list[Step] = field(default_factory=list)

    def covers(self, level: str) -> bool:
        """Whether anything of `level` was searched."""
        return any(step.level == level for step in self.steps)

    def tunings(self) -> kernels.Tunings:
        """What the model takes."""
        found: dict[tuple[str, int], dict[int, Any]] = {}
        for step in self.steps:
            found.setdefault((step.level, step.batch), {})[step.block or 0] = step.found()
        slots = {"block": len(mlx_model.SHAPE.blocks), "network": 1}
        return kernels.Tunings(
            {key: tuple(by.get(i) for i in range(slots[key[0]])) for key, by in found.items()}
        )


def device_name(target: str) -> str:
    """The name of what `target` runs on: the chip, or the NVIDIA GPU."""
    facts = machine.describe([])
    gpu = (facts["gpu"] or {}).get("name") if target == "cuda" else None
    return gpu or facts["chip"]


def path(target: str) -> Path:
    """Where the tilings of this machine's `target` are stored."""
    slug = re.sub(r"[^a-z0-9]+", "-", f"{device_name(target)} {target}".lower()).strip("-")
    return FOLDER / f"{slug}.json"


def load(target: str) -> Results | None:
    """What an earlier search found for this machine and these kernel texts, or None."""
    try:
        data = json.loads(path(target).read_text())
        results = Results(**data | {"steps": [Step(**step) for step in data["steps"]]})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return results if results.hashes == machine.kernel_hashes() else None


def search(
    model: mlx_model.DepthwiseMNIST, batches: tuple[int, ...], rounds: int, resume: bool, images: np.ndarray
) -> Generator[Step, None, None]:
    """Search every tiling of `model`'s level for each batch size; yields and stores each finished step.

    images (N, 28, 28, 1) float32; a batch is the first N, repeated as needed. The processes that compile live
    until the generator ends or is closed.
    """
    target = present(model._launches).target
    with Ahead(target) as ahead:
        yield from _search(model, batches, rounds, resume, images, ahead, _clock(target))


def _search(
    model: mlx_model.DepthwiseMNIST,
    batches: tuple[int, ...],
    rounds: int,
    resume: bool,
    images: np.ndarray,
    ahead: Ahead,
    burst: Burst,
) -> Iterator[Step]:
    """`search` with the processes that compile and the clock given."""
    launches = present(model._launches)
    target = launches.target
    results = (load(target) if resume else None) or Results(
        device_name(target), machine.kernel_hashes(), machine.describe([])["versions"]
    )
    done = {step.key: step for step in results.steps}
    slots: list[int | None] = list(range(len(mlx_model.SHAPE.blocks))) if model.level == "block" else [None]
    for batch in batches:
        if model.level == "network" and launches.spreads(batch, model.dtype):
            continue  # runs network_spread.metal, which has no candidates
        x = mx.array(np.resize(images, (batch, *images.shape[1:]))).astype(model.dtype)
        with mx.stream(mx.cpu):  # where no setting makes float32 products less exact
            reference = kernels.network_reference(
                x[:8].astype(mx.float32), launches.weights, mlx_model.SHAPE, target=target
            )
        setting: Setting = (None,) * len(slots)
        for slot in slots:
            step = done.get((model.level, batch, slot))
            if step is None:
                step = Step(model.level, batch, slot)
                _search_one(step, setting, launches, x, np.array(reference), rounds, ahead, burst)
                results.steps.append(step)
                write_atomic(path(target), json.dumps(asdict(results), indent=1) + "\n")
            yield step
            setting = _with(setting, slot, step.found())


def _with(setting: Setting, slot: int | None, tiling: AnyTiling | None) -> Setting:
    """`setting` with `tiling` in `slot`."""
    return tuple(tiling if i == (slot or 0) else other for i, other in enumerate(setting))


def _candidates(step: Step, target: str) -> list[AnyTiling]:
    """What `step` tries; the default comes first."""
    shapes = mlx_model.SHAPE.blocks
    if step.block is None:
        return [*tilings.network_candidates(shapes, step.batch, target)]
    last = step.block == len(shapes) - 1
    return [*tilings.block_candidates(shapes[step.block], step.batch, target, last)]


def _search_one(
    step: Step,
    setting: Setting,
    launches: Any,
    x: mx.array,
    reference: np.ndarray,
    rounds: int,
    ahead: Ahead,
    burst: Burst,
) -> None:
    """Fill in `step`. Raises Fault where the default itself is wrong or does not run.

    reference: of the first images. For the others, whose reference would take a CPU too long, the first
    result that is right on these stands in.
    """
    candidates = _candidates(step, launches.target)
    dtype = str(x.dtype).removeprefix("mlx.core.")
    what = f"{step.level}{'' if step.block is None else f' {step.block}'} at {step.batch}"
    jobs = ahead.jobs(candidates, step.block, dtype)
    for _ in tqdm(ahead.run(jobs), f"{what}: compiling", len(jobs), disable=None, leave=False):
        pass
    forwards: dict[Any, Callable[[], mx.array]] = {}
    screened: dict[Any, float] = {}
    expected = reference
    for tiling in tqdm(candidates, f"{what}: timing", disable=None, leave=False):
        run = _forward(launches, _with(setting, step.block, tiling), x)
        result = _result(run)
        if result is None or not compare(result[: len(expected)], expected, dtype)["passed"]:
            step.wrong += 1
            continue
        expected = np.concatenate([expected, result[len(expected) :]])
        forwards[tiling] = run
        screened[tiling] = min(burst(run) for _ in range(SCREENING_ROUNDS))
    step.tried = len(candidates)
    default = candidates[0]
    if default not in forwards:
        raise Fault(
            f"the default tiling of level {step.level} at batch {step.batch} does not run or is wrong; "
            f"`make check-{launches.target}` tells more."
        )
    finalists = sorted(screened, key=screened.__getitem__)[:FINALISTS]
    trials: dict[Any, list[tuple[int, float]]] = {tiling: [] for tiling in {default, *finalists}}
    random = np.random.default_rng(step.batch)
    for number in range(rounds):
        order = list(trials)
        random.shuffle(order)
        for tiling in order:
            trials[tiling].append((number, burst(forwards[tiling])))
    samples = {
        tiling: statistics.Sample("latency", np.array([n for n, _ in rows]), np.array([ms for _, ms in rows]))
        for tiling, rows in trials.items()
    }
    best = min(samples, key=lambda tiling: samples[tiling].p50)
    if best == default:
        step.verdict = "default"
        return
    gain = statistics.speedup(samples[best], samples[default])
    step.ratio, step.low, step.high, step.verdict = gain.ratio, gain.low, gain.high, gain.verdict
    if gain.verdict == "faster":
        step.tiling, step.kind = asdict(best), type(best).__name__


def _forward(launches: Any, setting: Setting, x: mx.array) -> Callable[[], mx.array]:
    """One forward of x, evaluated, with `setting`'s tilings."""
    tunings = kernels.Tunings({(launches.level, x.shape[0]): setting})
    network = mlx_model.FusedNetwork(launches.level, launches.weights, launches.target, tunings)

    def run() -> mx.array:
        y = network(x)
        mx.eval(y)
        return y

    return run


def _result(run: Callable[[], mx.array]) -> np.ndarray | None:
    """What `run` computes, in float32; None where the device does not take its kernels."""
    try:
        return np.array(run().astype(mx.float32))
    except (RuntimeError, ValueError):
        return None


def _clock(target: str) -> Burst:
    """How to time a forward on `target`."""
    trace = gpu_trace.open_trace() if target == "cuda" else None
    if not isinstance(trace, gpu_trace.Trace):
        return _burst

    def traced(run: Callable[[], mx.array]) -> float:
        """Milliseconds in which the GPU was busy, per call; gaps between launches are not in it."""
        run()
        return gpu_trace.busy_ms(trace.record(lambda: [run() for _ in range(TRACED)])) / TRACED

    return traced


def _burst(run: Callable[[], mx.array]) -> float:
    """Milliseconds per call over one burst by the wall clock (the median of its calls)."""
    run()
    times: list[float] = []
    start = time.perf_counter()
    while not times or time.perf_counter() - start < BURST_S:
        before = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - before))
    return float(np.median(times))
