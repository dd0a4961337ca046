"""The fusion ladder: what each rung saves over the one it is built on, and which rung wins at which batch."""

from dataclasses import dataclass
from itertools import pairwise

from harness.analysis import RETURNS_EARLY, Group
from harness.present import present
from harness.statistics import Comparison

# rung -> the rungs it is built on, the nearest first; a rung that was not measured is skipped over.
BUILT_ON = {
    "mlx": (),
    "mlx-compile": ("mlx",),
    "mlx-folded": ("mlx-compile", "mlx"),
    "mlx-fused": ("mlx",),
    "mlx-fused-compile": ("mlx-folded", "mlx-compile", "mlx-fused", "mlx"),
    "mlx-block": ("mlx-fused-compile", "mlx-folded", "mlx-compile", "mlx-fused", "mlx"),
    "mlx-network": ("mlx-block", "mlx-fused-compile", "mlx-folded", "mlx-compile", "mlx-fused", "mlx"),
}

CHANGES = {
    "mlx-compile": "element-wise operations merged by mx.compile",
    "mlx-folded": "BatchNorm folded into the weights",
    "mlx-fused": "the article's kernel: depthwise, BatchNorm and ReLU in one launch",
    "mlx-fused-compile": "the same kernel in the folded, compiled network",
    "mlx-block": "a launch per block, the stem recomputed",
    "mlx-network": "the whole network in one launch",
}


@dataclass(frozen=True)
class Step:
    """A rung over the rung it is built on, at one batch size. Times in ms; P50 of each."""

    rung: str
    base: str
    batch_size: int
    before_ms: float
    after_ms: float
    comparison: Comparison
    model: dict[str, float | None]  # ms saved by "launches", "bytes", "arithmetic", "Python", "rest"

    @property
    def saved_ms(self) -> float:
        """What the step saves; negative where it costs."""
        return self.before_ms - self.after_ms

    @property
    def saved_interval_ms(self) -> tuple[float, float] | None:
        """The interval of the ratio, applied to the time before the step."""
        low, high = self.comparison.low, self.comparison.high
        if low is None or high is None:
            return None
        return self.before_ms * (1 - 1 / low), self.before_ms * (1 - 1 / high)

    @property
    def after_interval_ms(self) -> tuple[float, float] | None:
        """The interval of the time after the step, given the time before it."""
        saved = self.saved_interval_ms
        return None if saved is None else (self.before_ms - saved[1], self.before_ms - saved[0])

    @property
    def pays(self) -> str:
        """What the step's verdict means: saves, costs, changes nothing, undecided."""
        words = {"faster": "saves", "slower": "costs", "equivalent": "changes nothing"}
        return words.get(self.comparison.verdict, "undecided")


def rungs(group: Group) -> list[str]:
    """The measured rungs, in the order of the ladder."""
    return [name for name in BUILT_ON if name in group.backends]


def steps(group: Group, batch_size: int) -> list[Step]:
    """The steps of the ladder at a batch size, in order."""
    found = []
    for rung in rungs(group):
        base = next((b for b in BUILT_ON[rung] if group.p50(b, batch_size) is not None), None)
        comparison = group.speedup(rung, base, batch_size)
        if base is None or comparison is None:
            continue
        before, after = (present(group.p50(name, batch_size)) for name in (base, rung))
        model = split(group, rung, base, batch_size)
        found.append(Step(rung, base, batch_size, before, after, comparison, model))
    return found


def split(group: Group, rung: str, base: str, batch_size: int) -> dict[str, float | None]:
    """A step's saving in ms by cause. Launches, bytes and arithmetic are what the cost model says they differ
    by; Python is measured (time until the call returns, where that is before the result is there); the rest
    is what is left, mostly kernels that run nearer to or farther from the limits.
    """
    old, new = group.cost(base, batch_size), group.cost(rung, batch_size)
    parts: dict[str, float | None] = {}
    for part, key in (("launches", "launch_ms"), ("bytes", "bytes_ms"), ("arithmetic", "arithmetic_ms")):
        known = old.get(key) is not None and new.get(key) is not None
        parts[part] = old[key] - new[key] if known else None
    before, after = (_python_ms(group, name, batch_size) for name in (base, rung))
    parts["Python"] = None if before is None or after is None else before - after
    saved = present(group.p50(base, batch_size)) - present(group.p50(rung, batch_size))
    parts["rest"] = saved - sum(value for value in parts.values() if value is not None)
    return parts


def _python_ms(group: Group, backend: str, batch_size: int) -> float | None:
    """Python's own time; None where the call returns only with the result, so that it cannot be told."""
    python, median = group.p50(backend, batch_size, "python"), group.p50(backend, batch_size)
    return None if python is None or median is None or python > RETURNS_EARLY * median else python


def winners(group: Group, among: list[str]) -> list[tuple[int, str, str | None, Comparison | None]]:
    """Per batch size: (batch, fastest, second, how much faster the fastest is than the second)."""
    found = []
    for batch_size in group.batch_sizes:
        order = group.ranking(batch_size, among)
        if not order:
            continue
        best, second = order[0], order[1] if len(order) > 1 else None
        found.append((batch_size, best, second, group.speedup(best, second, batch_size)))
    return found


def crossovers(group: Group, first: str, second: str) -> list[tuple[int, int, str]]:
    """Where the faster of two changes: (last batch before, first batch after, who wins after).

    Only decided verdicts count; batches between that are undecided or equivalent widen the bracket.
    """
    decided = []
    for batch_size in group.batch_sizes:
        comparison = group.speedup(first, second, batch_size)
        if comparison is not None and comparison.verdict in ("faster", "slower"):
            decided.append((batch_size, first if comparison.verdict == "faster" else second))
    return [
        (before, after, winner) for (before, loser), (after, winner) in pairwise(decided) if loser != winner
    ]
