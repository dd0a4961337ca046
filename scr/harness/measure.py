"""Measure cases against each other so that their ratios hold on a second run. Knows no framework.

How a study uses it:

    from harness.measure import Candidate, Case, Interrupted, MeasureSettings, run_study

    case = Case(
        study="mlp_fusion", name="geglu 768×3072", dtype="float32", batch_sizes=(128, 8192),
        inputs=make_rows,                       # batch size -> what Backend.prepare takes; called here
        candidates=(
            Candidate("torch", worker="torch", factory="mlp_backends:eager", arguments={"width": 768}),
            Candidate("mlx", worker="mlx", module="mlx.core", factory="mlp_backends:mlx"),
        ),
        reference=Candidate("reference", worker="reference", module="torch",
                            factory="mlp_backends:eager64", arguments={"width": 768}),
    )
    record = run_study([case], settings)        # Ctrl-C raises Interrupted, which carries the partial record

A factory ("module:function", importable from scr/) runs inside the worker and returns a `worker.Backend`, or
raises Fault with the reason why it cannot. `settings` is a MeasureSettings; a command's own settings class
inherits from it, so that every command has the same options with the same defaults.

How it measures. Every framework lives in a process of its own, and one works at a time. Each cell (case,
backend, batch size) is warmed up and its output checked against the reference; its first output and its last
must agree, else the backend is dropped from the case with the numbers of its error. Time goes by rounds: a
round gives, for one case and batch size, one short burst to every backend, in random order; the rounds of all
cases and batch sizes are spread over the whole run, so that heat and background load meet all of them alike.
Slow backends take part in fewer rounds, in nested subsets, so that any two share as many rounds as possible.
With a limit on the run's time, whole rounds are left out once the rest would no longer fit; every cell keeps
its first LEAST_ROUNDS of the nested subsets, which lie evenly over the run.
"""

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from harness import statistics, tolerances
from harness.cli import Fault
from harness.paths import shown
from harness.present import present
from harness.record import GPU_TRACE, Record, rows_from, save, without_false_device_times
from harness.worker import RAMP_S, Worker, WorkerCrash, WorkerError

LEAST_ROUNDS = 4  # of a backend that is too slow for its budget or a limit: below, no interval says anything

# Seconds that each kind may take per cell, as a share of the budget; at most so many trials per round.
SHARES = {"latency": 1.0, "throughput": 0.25, "python": 0.1, "device": 0.25}
PER_ROUND = {"throughput": 1, "python": 5, "device": 1}
IN_FLIGHT = 8
TRACE_ROUNDS = 6  # in each of which every cell on an NVIDIA GPU is traced, in random order
TRACED_FORWARDS = 3  # per cell and round
RETRACES = 8  # processes in place of a worker whose tracing failed
TRACE_FAULTS = 2  # of a backend there, after which its other batches are left alone
# Why a cell lacks a kind of trial, where nothing failed:
NOT_YET_TRACED = "the run ended before the GPU was traced"
NO_CLOCK = "this platform has no device clock"
TOO_SLOW = "too slow for the budget"

# Expected seconds beyond the forwards themselves.
BURST_S = 0.04  # of a burst: the way there and back, the input, garbage, settling; until it is measured
ENERGY_S = 0.3  # of counting a cell's joules: two changes of a counter that moves every 0.1 s
TRACE_S = 0.02  # of tracing a cell beyond what a burst costs: the trace is turned on and off
START_S = 1.5  # of a worker's first count of joules, with the idle power, and of its first trace


@dataclass(frozen=True)
class MeasureSettings:
    """How to measure; the defaults are those of every command."""

    trials: int = field(default=200, metadata={"help": "timed forwards per cell"})
    warmup: int = field(default=30, metadata={"help": "warm-up forwards per cell, more until it is steady"})
    budget: float = field(default=7.0, metadata={"help": "seconds per cell; slow cells get fewer trials"})
    rounds: int = field(default=20, metadata={"help": "rounds per batch size, over which trials are spread"})
    pause: float = field(default=0.0, metadata={"help": "seconds to wait before each burst, to cool down"})
    limit: float = field(
        default=0.0,
        metadata={"help": "seconds the whole run may take; rounds are left out to keep it (0: no limit)"},
    )
    seed: int = field(default=42, metadata={"help": "of the order of measurement"})
    energy: float = field(default=0.0, metadata={"help": "seconds per cell to count joules on NVIDIA GPUs"})
    threads: int = field(default=0, metadata={"help": "CPU threads of every framework; 0 = one per core"})


@dataclass(frozen=True)
class Candidate:
    """A backend of a case, described so that a worker process can build it."""

    name: str  # as reported
    worker: str  # candidates with the same worker share a process
    factory: str  # "module:function", returns a worker.Backend
    arguments: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the factory, picklable
    module: str = ""  # the framework to import; `worker` where empty
    environment: dict[str, str] = field(default_factory=dict)  # variables of its worker

    @property
    def framework(self) -> str:
        """The module whose import is the framework's cold start."""
        return self.module or self.worker


@dataclass(frozen=True)
class Case:
    """What is timed: the same work, on the same inputs, by several candidates."""

    study: str
    name: str
    batch_sizes: tuple[int, ...]
    inputs: Callable[[int], Any]  # batch size -> a picklable batch, for Backend.prepare
    candidates: tuple[Candidate, ...]
    reference: Candidate | None  # the float64 answer; None: results are not checked (say why in the study)
    dtype: str = "float32"  # of storage, as reported
    tolerance: str = ""  # the row of tolerances.TOLERANCES; `dtype` where empty
    budget_share: float = 1.0  # of the budget per cell, for cases that matter less
    energy: bool = True  # count joules, where the settings ask for it
    rounds_times: int = 1  # the settings' rounds, each as much shorter: for small differences
    shares_rounds: str = ""  # cases of a study with the same word share their rounds: their ratios are paired


@dataclass(frozen=True)
class Probe:
    """A function to call in a worker before anything is timed, such as a ceiling; returns a list of dicts."""

    worker: str
    function: str
    arguments: dict[str, Any] = field(default_factory=dict)
    module: str = ""

    @property
    def framework(self) -> str:
        """As Candidate.framework."""
        return self.module or self.worker


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a run; `record` holds what was measured, with environment["complete"] false."""

    def __init__(self, record: Record) -> None:
        super().__init__("interrupted")
        self.record = record


@dataclass(frozen=True)
class Plan:
    """In how many rounds a cell takes part, and what one of its bursts times."""

    rounds: int
    counts: dict[str, int]
    rounds_of: dict[str, int]  # per kind; at most `rounds`
    in_flight: int
    costs: dict[str, float]  # expected seconds per trial, per kind
    left_out: dict[str, str]  # kinds not measured, with the reason

    @property
    def forward_s(self) -> float:
        """Expected seconds of one forward."""
        return self.costs["latency"]

    @property
    def wake_s(self) -> float:
        """Expected seconds of the forwards at the start of a burst that are not counted."""
        return self.forward_s * max(1, math.ceil(RAMP_S / self.forward_s))

    def burst_s(self, counts: dict[str, int]) -> float:
        """Expected seconds of the forwards of a burst that times `counts`."""
        return self.wake_s + sum(self.costs[kind] * count for kind, count in counts.items())


def plan_cell(
    settings: MeasureSettings, median_ms: float, return_ms: float, has_device_clock: bool = False
) -> Plan:
    """Plan a cell from its warm-up: within the budget, but a trial in LEAST_ROUNDS rounds at least.

    Of the forwards that are not counted the budget holds one per round; what more a short forward needs to
    wake the machine, RAMP_S at most, comes on top.
    """
    forward = max(median_ms / 1e3, 1e-7)
    budget = settings.budget
    most = max(1, min(settings.rounds, settings.trials))
    # A round costs its trials and a forward that is not counted.
    rounds = int(np.clip(budget / (2 * forward), min(LEAST_ROUNDS, most), most))
    wanted = -(-settings.trials // rounds)
    affordable = int((budget / rounds - forward) / forward)
    counts, rounds_of = {"latency": max(1, min(wanted, affordable))}, {"latency": rounds}
    in_flight = int(np.clip(SHARES["throughput"] * budget / (LEAST_ROUNDS * forward), 2, IN_FLIGHT))
    costs = {
        "latency": forward,
        "throughput": in_flight * forward,
        # An output that is only described is thrown away unevaluated; any other is waited for.
        "python": forward if return_ms > 0.5 * median_ms else return_ms / 1e3,
        "device": 3 * IN_FLIGHT * forward,
    }
    left_out = {} if has_device_clock else {"device": NO_CLOCK}
    for kind, most_per_round in PER_ROUND.items():
        if kind in left_out:
            continue
        cost = costs[kind]
        affordable = int(SHARES[kind] * budget / cost) if cost else settings.trials
        if affordable < min(LEAST_ROUNDS, most):
            left_out[kind] = TOO_SLOW
            continue
        rounds_of[kind] = min(rounds, affordable)
        counts[kind] = max(1, min(most_per_round, affordable // rounds))
    return Plan(rounds, counts, rounds_of, in_flight, costs, left_out)


def spread(count: int) -> list[int]:
    """0 … count - 1, so ordered that every prefix is spread evenly over the range (bit reversal)."""
    bits = max(1, (count - 1).bit_length())
    return sorted(range(count), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))


@dataclass
class Cell:
    """One (case, candidate, batch size) while it is being measured."""

    case: Case
    candidate: Candidate
    batch_size: int
    target: str = ""
    state: str = ""  # set when it is known to be unavailable or dropped; else at the end
    reason: str = ""
    traced: bool = False  # its device times come from the GPU's trace
    plan: Plan | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def key(self) -> str:
        """The backend's name in its worker."""
        return f"{self.case.study}/{self.case.name}/{self.candidate.name}/{self.case.dtype}"

    @property
    def batch_key(self) -> str:
        """The name of its input in the worker, and of its reference."""
        return f"{self.case.study}/{self.case.name}/{self.case.dtype}/{self.batch_size}"

    @property
    def round_key(self) -> str:
        """The cells that share their rounds."""
        together = self.case.shares_rounds or self.case.name
        return f"{self.case.study}/{together}/{self.case.dtype}/{self.batch_size}"

    @property
    def label(self) -> dict[str, Any]:
        """What identifies the cell in a record."""
        return {
            "study": self.case.study,
            "case": self.case.name,
            "backend": self.candidate.name,
            "target": self.target,
            "batch_size": self.batch_size,
            "dtype": self.case.dtype,
        }

    def add(
        self, kind: str, start_s: float, latency_ms: float, sequence: int, round_: int = 0, trial: int = -1
    ) -> None:
        """Append a row; the trial number counts up within the kind unless it is given."""
        if trial < 0:
            trial = sum(row["kind"] == kind for row in self.rows)
        self.rows.append(
            self.label
            | {"kind": kind, "round": round_, "trial": trial, "sequence": sequence}
            | {"start_s": start_s, "latency_ms": latency_ms}
        )

    def summary(self) -> dict[str, Any]:
        """The cell as stored: its label, state and whatever is known about it."""
        rows = [row for row in self.rows if row["kind"] == "latency"]
        state, percent = self.state, None
        if not state:
            trend = statistics.drift(
                *(np.array([row[name] for row in rows]) for name in ("round", "start_s", "latency_ms"))
            )
            percent = trend.percent
            state = "few" if len(rows) < statistics.P95_FROM else "drifting" if trend.flagged else "steady"
        return (
            self.label
            | {"state": state, "reason": self.reason, "trials": len(rows), "drift_percent": percent}
            | {"rounds": len({row["round"] for row in rows})}
            | {"left_out": self.plan.left_out if self.plan else {}}
            | ({"shares_rounds": self.case.shares_rounds} if self.case.shares_rounds else {})
            | self.facts
        )


@dataclass(frozen=True)
class Burst:
    """One cell's part in a round."""

    cell: Cell
    round: int
    counts: dict[str, int]  # trials per kind
    needed: bool  # its round is one of those that no limit leaves out
    last: bool  # of the cell

    @property
    def seconds(self) -> float:
        """Expected for its forwards."""
        return present(self.cell.plan).burst_s(self.counts)


class Study:
    """A run in progress. `run_study` is the way to use it."""

    def __init__(
        self,
        cases: Sequence[Case],
        settings: MeasureSettings,
        make_worker: Callable[[str], Any],
        clock: Callable[[], float],
        begin: float | None = None,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.origin = clock()
        self.deadline = (self.origin if begin is None else begin) + (settings.limit or math.inf)
        self.rounds = self.rounds_left_out = 0
        self.bursts, self.beyond_s = 1, BURST_S  # what bursts cost beyond their forwards, in sum
        self.make_worker = make_worker
        self.random = random.Random(settings.seed)
        self.workers: dict[str, Any] = {}
        self.lost: dict[str, str] = {}  # worker -> why it cannot be asked any more
        self.worker_facts: dict[str, dict[str, Any]] = {}
        self.replaced: dict[str, str] = {}  # worker -> why its tracing failed
        self.tracers: dict[str, tuple[Any, set[str]]] = {}  # those in their place, and what they hold
        self.retraces: dict[str, int] = {}  # how many there were
        self.traced_by: dict[str, set[int]] = {}  # worker -> the cells that its present process has traced
        self.traced_anew: set[int] = set()  # cells
        self.trace_faults: dict[str, int] = {}  # backend -> how often its trace failed in new processes
        self.references: dict[str, np.ndarray] = {}
        self.sent: set[tuple[str, str]] = set()  # (worker, batch) that the worker holds
        self.checks: list[dict[str, Any]] = []
        self.ceilings: list[dict[str, Any]] = []
        self.sequence = 0
        self.cases = cases
        self.cells = [
            Cell(case, candidate, batch_size)
            for case in cases
            for batch_size in sorted(case.batch_sizes)
            for candidate in case.candidates
        ]

    def worker(self, of: "Candidate | Probe") -> Any:
        """The worker of `of`, started and with its framework imported. Raises Fault where that cannot be."""
        name = of.worker
        if name in self.lost:
            raise Fault(self.lost[name])
        if name not in self.workers:
            self.workers[name] = self.make_worker(name)
            try:
                seconds = self.workers[name].ask("import_module", module=of.framework)
            except (Fault, WorkerError, WorkerCrash) as error:
                self.lose(name, str(error))
                raise Fault(str(error)) from error
            self.worker_facts[name] = {"import_s": seconds}
        return self.workers[name]

    def lose(self, name: str, reason: str) -> None:
        """Stop using a worker."""
        self.lost[name] = reason
        self.workers.pop(name).close()

    def run_probes(self, probes: Sequence[Probe]) -> None:
        """Measure the machine's limits; one that cannot be measured is stored with its reason."""
        bar = progress("ceilings", len(probes))
        for probe in probes:
            try:
                worker = self.worker(probe)
                self.ceilings += worker.ask("call", function=probe.function, arguments=probe.arguments)
            except (Fault, WorkerError, WorkerCrash) as error:
                failure = {"name": probe.function, "framework": probe.worker, "reason": str(error)}
                self.ceilings.append(failure)
                if isinstance(error, WorkerCrash):  # the backends get a new process
                    self.workers.pop(probe.worker).close()
            bar.update()
        bar.close()

    def find_references(self) -> None:
        """Compute what every case's outputs must be, then end the reference's process."""
        cells = {c.batch_key: (c, c.case.reference) for c in self.cells if c.case.reference}
        bar = progress("reference", len(cells))
        for key, (cell, reference) in cells.items():
            worker = self.worker(reference)
            name = f"{cell.case.study}/{cell.case.name}/reference"
            worker.ask("open", key=name, factory=reference.factory, arguments=reference.arguments)
            worker.ask("batch", key=key, batch=cell.case.inputs(cell.batch_size))
            self.references[key] = worker.ask("result", key=name, batch=key)
            bar.update()
        bar.close()
        used = {candidate.worker for case in self.cases for candidate in case.candidates}
        for name in {reference.worker for _, reference in cells.values()} - used:
            self.workers.pop(name).close()

    def guarded(self, cell: Cell, action: Callable[[Any], None]) -> None:
        """Let `action` ask the cell's worker; a failure there costs what it must and no more."""
        try:
            action(self.worker(cell.candidate))
        except Fault as fault:
            self.mark(cell, "dropped" if cell.plan else "unavailable", str(fault))
        except WorkerError as error:
            self.mark(cell, "dropped", str(error))
        except WorkerCrash as crash:
            self.lose(cell.candidate.worker, str(crash))
            for other in self.cells:
                if other.candidate.worker == cell.candidate.worker and not other.state:
                    self.mark(other, "dropped", str(crash))

    def mark(self, cell: Cell, state: str, reason: str) -> None:
        """Take a cell out of the run; numbers that could not be checked to the end are not kept."""
        cell.state, cell.reason, cell.rows = state, reason, []

    def check(self, cell: Cell, output: np.ndarray, when: str) -> None:
        """Compare an output with the reference; a mismatch drops the backend from the case."""
        reference = self.references.get(cell.batch_key)
        if reference is None:
            return
        outcome = tolerances.compare(output, reference, cell.case.tolerance or cell.case.dtype)
        self.checks.append(cell.label | {"when": when} | outcome)
        if outcome["passed"]:
            return
        for other in self.cells:
            if other.key == cell.key and not other.state:
                self.mark(other, "dropped", f"wrong result at batch {cell.batch_size}: {outcome['problem']}")

    def warm_all(self) -> None:
        """Build every backend and warm up every cell, small batches first, the order of backends random."""
        groups: dict[tuple[str, str, int], list[Cell]] = {}
        for cell in self.cells:
            groups.setdefault((cell.case.study, cell.case.name, cell.batch_size), []).append(cell)
        opened: dict[str, dict[str, Any]] = {}
        bar = progress("warm-up", len(self.cells))
        for group in groups.values():
            self.random.shuffle(group)
            for cell in group:
                if not cell.state:
                    self.guarded(cell, partial(self.warm, cell=cell, opened=opened))
                bar.update()
        bar.close()

    def warm(self, worker: Any, cell: Cell, opened: dict[str, dict[str, Any]]) -> None:
        """Build the backend at its first cell, warm the cell up, check it and plan its bursts."""
        first = cell.key not in opened
        if first:
            try:
                opened[cell.key] = worker.ask(
                    "open", key=cell.key, factory=cell.candidate.factory, arguments=cell.candidate.arguments
                )
            except Fault as fault:
                for other in self.cells:
                    if other.key == cell.key:
                        self.mark(other, "unavailable", str(fault))
                return
        built = opened[cell.key]
        cell.target = built["target"]
        settings = replace(
            self.settings,
            budget=self.settings.budget * cell.case.budget_share,
            rounds=self.settings.rounds * cell.case.rounds_times,
        )
        if (cell.candidate.worker, cell.batch_key) not in self.sent:
            worker.ask("batch", key=cell.batch_key, batch=cell.case.inputs(cell.batch_size))
            self.sent.add((cell.candidate.worker, cell.batch_key))
        start = self.clock() - self.origin
        warm = worker.ask(
            "warm",
            key=cell.key,
            batch=cell.batch_key,
            at_least=self.settings.warmup,
            seconds=settings.budget / 3,
        )
        cold = [warm["first_ms"], warm["second_ms"]]
        if first:
            cold.insert(0, 1e3 * self.worker_facts[cell.candidate.worker]["import_s"])
            cell.facts["build_s"] = built["build_s"]
        for trial, milliseconds in enumerate(cold, start=0 if first else 1):
            cell.add("cold", start, milliseconds, self.next(), trial=trial)
        cell.facts |= built["facts"] | warm["facts"]
        cell.facts |= {name: warm[name] for name in ("warmup_trials", "warmup_steady", "peak_memory_mb")}
        cell.plan = plan_cell(settings, warm["median_ms"], warm["return_ms"], warm["has_device_clock"])
        cell.traced = warm["traced"]
        if cell.traced:
            cell.plan.left_out["device"] = NOT_YET_TRACED
        self.check(cell, warm["output"], "warm-up")

    def next(self) -> int:
        """The next number in the global order of measurement."""
        self.sequence += 1
        return self.sequence - 1

    def schedule(self) -> list[list[Burst]]:
        """All rounds in the order of the run, each with its bursts in theirs."""
        groups: dict[str, list[tuple[Cell, Plan]]] = {}
        for cell in self.cells:
            if not cell.state:
                groups.setdefault(cell.round_key, []).append((cell, present(cell.plan)))
        rounds = []
        for cells in groups.values():
            count = max(plan.rounds for _, plan in cells)
            for rank, number in enumerate(spread(count)):
                taking_part = [(cell, plan) for cell, plan in cells if rank < plan.rounds]
                self.random.shuffle(taking_part)
                rounds.append(((number + self.random.random()) / count, number, rank, taking_part))
        rounds.sort(key=lambda entry: entry[0])
        last = {id(cell): index for index, (*_, cells) in enumerate(rounds) for cell, _ in cells}
        return [
            [
                Burst(
                    cell,
                    number,
                    {kind: count for kind, count in plan.counts.items() if rank < plan.rounds_of[kind]},
                    needed=rank < LEAST_ROUNDS,
                    last=last[id(cell)] == index,
                )
                for cell, plan in cells
            ]
            for index, (_, number, rank, cells) in enumerate(rounds)
        ]

    def time_all(self) -> None:
        """Run the schedule. The burst with a cell's last trial also brings the output to be checked.

        From the first round on that no longer fits into the limit, only needed rounds are run: then all cells
        have been in the same part of the schedule, and in LEAST_ROUNDS rounds or all they were planned for.
        """
        rounds = self.schedule()
        self.rounds = len(rounds)
        unchecked = []

        def weight(bursts: Iterable[Burst]) -> float:
            return sum(burst.seconds + BURST_S + self.settings.pause for burst in bursts)

        bar = progress("timing", sum(map(weight, rounds)))
        for index, bursts in enumerate(rounds):
            may_miss = not bursts[0].needed and any(not burst.cell.state for burst in bursts)
            if may_miss and (self.rounds_left_out or not self.fits(rounds[index:])):
                self.rounds_left_out += 1
                unchecked += [burst.cell for burst in bursts if burst.last]
                bar.total = present(bar.total) - weight(bursts)
                continue
            for burst in bursts:
                bar.set_postfix_str(f"{burst.cell.candidate.name} {burst.cell.batch_size}", refresh=False)
                if not burst.cell.state:
                    if self.settings.pause:
                        time.sleep(self.settings.pause)
                    self.guarded(burst.cell, partial(self.time, burst=burst))
                bar.update(weight([burst]))
        bar.close()
        for cell in unchecked:
            if not cell.state:
                self.guarded(cell, partial(self.check_last, cell=cell))

    def fits(self, ahead: Sequence[list[Burst]]) -> bool:
        """Whether the limit has room for the next of the rounds ahead, and then for all that must be done."""
        if self.deadline == math.inf:
            return True
        needed = [burst for bursts in ahead[1:] for burst in bursts if burst.needed]
        return self.clock() + self.expected([*ahead[0], *needed]) + self.afterwards() <= self.deadline

    def request_s(self) -> float:
        """Seconds that a burst takes beyond its forwards, by those that were run."""
        return max(0.0, self.beyond_s / self.bursts)

    def expected(self, bursts: Iterable[Burst]) -> float:
        """Seconds that bursts will take, with what comes beside their forwards."""
        extra = self.request_s() + self.settings.pause
        return sum(burst.seconds + extra for burst in bursts if not burst.cell.state)

    def afterwards(self) -> float:
        """Seconds that the last checks, the energy and the trace will take, rather too many than too few."""
        request = self.request_s()
        plans = [present(cell.plan) for cell in self.cells if not cell.state]
        checks = sum(request + plan.forward_s for plan in plans if plan.rounds > LEAST_ROUNDS)
        counted, traced = self.counted(), self.traced()
        starts = len({cell.candidate.worker for cell in counted}) + len({c.candidate.worker for c in traced})
        energy = sum(
            request + self.settings.energy + ENERGY_S + 2 * plan.in_flight * plan.forward_s
            for plan in (present(cell.plan) for cell in counted)
        )
        trace = sum(
            request + TRACE_S + plan.wake_s + TRACED_FORWARDS * plan.forward_s
            for plan in (present(cell.plan) for cell in traced)
        )
        return checks + energy + self.trace_rounds() * trace + START_S * starts

    def time(self, worker: Any, burst: Burst) -> None:
        """Run one burst and keep its rows, no more than the wanted trials."""
        cell, number, last = burst.cell, burst.round, burst.last
        done = sum(row["kind"] == "latency" for row in cell.rows)
        counts = burst.counts | {"latency": min(burst.counts["latency"], max(1, self.settings.trials - done))}
        start = self.clock()
        found = worker.ask(
            "burst",
            key=cell.key,
            batch=cell.batch_key,
            counts=counts,
            in_flight=present(cell.plan).in_flight,
            origin=self.origin,
            check=last,
        )
        self.bursts += 1
        self.beyond_s += self.clock() - start - present(cell.plan).burst_s(counts)
        for kind, start_s, milliseconds in found["trials"]:
            cell.add(kind, start_s, milliseconds, self.next(), number)
        if last:
            self.check(cell, found["output"], "last trial")

    def check_last(self, worker: Any, cell: Cell) -> None:
        """The check of a cell whose last burst was left out, on one more forward."""
        self.check(cell, worker.ask("result", key=cell.key, batch=cell.batch_key), "last trial")

    def counted(self) -> list[Cell]:
        """The cells whose joules are counted."""
        cells = self.cells if self.settings.energy else []
        return [c for c in cells if c.target == "cuda" and not c.state and c.case.energy]

    def count_energy(self) -> None:
        """Count the joules per image of every cell on an NVIDIA GPU, after everything is timed."""
        cells = self.counted()
        bar = progress("energy", len(cells))
        for cell in cells:
            if not cell.state:
                self.guarded(cell, partial(self.energy, cell=cell))
            bar.update()
        bar.close()

    def energy(self, worker: Any, cell: Cell) -> None:
        """Add a cell's joules per image, above idle, and the idle power; nothing without a counter."""
        seconds, in_flight = self.settings.energy, present(cell.plan).in_flight
        found = worker.ask("energy", key=cell.key, batch=cell.batch_key, seconds=seconds, in_flight=in_flight)
        if found is not None:
            joules, idle = found
            cell.facts |= {"joules_per_image": joules / cell.batch_size, "idle_watts": idle}

    def traced(self) -> list[Cell]:
        """The cells whose device times come from the GPU's trace."""
        return [c for c in self.cells if c.traced and not c.state]

    def trace_rounds(self) -> int:
        """In how many rounds they are traced."""
        return min(self.settings.rounds, TRACE_ROUNDS)

    def trace_all(self) -> None:
        """Trace forwards of every cell that is to be traced.

        After everything else: a process that has traced may launch more slowly from then on. A fault of the
        GPU there spoils all that its process does later: the cells of that worker are then traced anew, in
        new processes. A cell whose trace fails keeps what was timed, and what was traced before.
        """
        cells = self.traced()
        self.trace_rounds_of(cells)
        for name in self.replaced:
            self.retire(name)
        again = [cell for cell in cells if cell.candidate.worker in self.replaced and not cell.state]
        for cell in again:
            cell.traced = True
        self.trace_rounds_of(again, last=True)

    def trace_rounds_of(self, cells: list[Cell], last: bool = False) -> None:
        """Trace cells in rounds; unless it is the last try, a failure ends it for all cells of its worker."""
        bar = progress("trace", self.trace_rounds() * len(cells))
        for number in range(self.trace_rounds()):
            self.random.shuffle(cells)
            for cell in cells:
                if cell.traced and not cell.state and (last or cell.candidate.worker not in self.replaced):
                    self.trace(cell, number, last)
                bar.update()
        bar.close()

    def trace(self, cell: Cell, number: int, last: bool) -> None:
        """Trace a few forwards of one cell; in each process its first output is checked."""
        name = cell.candidate.worker
        try:
            worker = self.tracer(cell, last)
            first = id(cell) not in self.traced_by[name]
            found = worker.ask(
                "trace",
                key=cell.key,
                batch=cell.batch_key,
                count=TRACED_FORWARDS,
                origin=self.origin,
                check=first,
            )
        except Fault as fault:
            self.end_trace(cell, str(fault))
            return
        except (WorkerError, WorkerCrash) as error:
            self.trace_failed(cell, error, last)
            return
        self.traced_by[name].add(id(cell))
        if first:
            self.check(cell, found["output"], "traced")
            if cell.state:
                return
        if last and id(cell) not in self.traced_anew:  # what two processes traced is not mixed
            self.traced_anew.add(id(cell))
            cell.rows = [row for row in cell.rows if row["kind"] != "device"]
        present(cell.plan).left_out.pop("device", None)
        for start_s, milliseconds in found["trials"]:
            cell.add("device", start_s, milliseconds, self.next(), number)
        cell.facts["device_clock"] = GPU_TRACE
        cell.facts["kernels_traced"] = found["kernels"]

    def trace_failed(self, cell: Cell, error: Exception, last: bool) -> None:
        """The process that traced `cell` is of no more use, and perhaps the cell cannot be traced."""
        name = cell.candidate.worker
        self.end_trace(cell, str(error))
        if not last:
            self.replaced[name] = str(error)
            return
        if name in self.tracers:
            self.tracers.pop(name)[0].close()
        self.trace_faults[cell.key] = self.trace_faults.get(cell.key, 0) + 1
        if self.trace_faults[cell.key] == TRACE_FAULTS:
            for other in self.cells:
                if other.key == cell.key and id(other) not in self.traced_anew:
                    self.end_trace(other, str(error))

    def end_trace(self, cell: Cell, reason: str) -> None:
        """Trace a cell no more; `reason` is why it has no device times, if it has none."""
        cell.traced = False
        if cell.plan and not any(row["kind"] == "device" for row in cell.rows):
            cell.plan.left_out["device"] = reason

    def retire(self, name: str) -> None:
        """End a worker whose tracing failed, so that its memory is free for the one in its place."""
        if name not in self.workers:
            return
        try:
            self.worker_facts[name] |= self.workers[name].ask("status")
        except (WorkerError, WorkerCrash) as error:
            self.worker_facts[name]["reason"] = str(error)
        self.workers.pop(name).close()

    def tracer(self, cell: Cell, last: bool) -> Any:
        """The process that traces a cell, with all it needs: its worker, or at last a new one in its place.

        Raises Fault where no new one may be started: after RETRACES, or when the limit's time is over.
        """
        name, made = cell.candidate.worker, cell.candidate
        if not last:
            self.traced_by.setdefault(name, set())
            return self.worker(made)
        if name not in self.tracers:
            begun = self.retraces.get(name, 0)
            if begun == RETRACES or self.clock() > self.deadline:
                why = (
                    "there was no time to trace anew"
                    if begun < RETRACES
                    else f"{begun} more processes failed"
                )
                raise Fault(f"{self.replaced[name]}; {why}")
            self.retraces[name] = begun + 1
            self.traced_by[name] = set()
            self.tracers[name] = self.make_worker(name), set()
            self.tracers[name][0].ask("import_module", module=made.framework)
            self.tracers[name][0].ask("trace_from_now")  # before the first CUDA graph
        worker, holds = self.tracers[name]
        if cell.key not in holds:
            worker.ask("open", key=cell.key, factory=made.factory, arguments=made.arguments)
        if cell.batch_key not in holds:
            worker.ask("batch", key=cell.batch_key, batch=cell.case.inputs(cell.batch_size))
        holds |= {cell.key, cell.batch_key}
        return worker

    def record(self, environment: dict[str, Any], complete: bool) -> Record:
        """What was measured so far."""
        for name, worker in self.workers.items():
            if not worker.waiting:
                try:
                    self.worker_facts[name] |= worker.ask("status")
                except WorkerCrash as crash:
                    self.worker_facts[name]["reason"] = str(crash)
        for name, reason in self.lost.items():
            self.worker_facts.setdefault(name, {})["reason"] = reason
        for name, reason in self.replaced.items():
            self.worker_facts[name] |= {"trace_failed": reason, "retraces": self.retraces.get(name, 0)}
        limit = {
            "rounds": self.rounds,
            "rounds_left_out": self.rounds_left_out,
            "late_s": max(0.0, self.clock() - self.deadline),
        }
        rows = sorted((row for cell in self.cells for row in cell.rows), key=lambda row: row["sequence"])
        record = Record(
            rows=rows_from(rows),
            environment=environment
            | {"complete": complete, "workers": self.worker_facts, "ceilings": self.ceilings}
            | {"seconds": self.clock() - self.origin}
            | ({"limit": limit} if self.settings.limit else {}),
            settings=plain_settings(self.settings),
            checks=self.checks,
            cells=[cell.summary() for cell in self.cells],
        )
        return without_false_device_times(record)


def run_study(
    cases: Sequence[Case],
    settings: MeasureSettings,
    environment: dict[str, Any] | None = None,
    probes: Sequence[Probe] = (),
    make_worker: Callable[[str], Any] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    begin: float | None = None,
) -> Record:
    """Measure `cases` and return the record; nothing is written.

    `environment` is what is known about the machine (`machine.describe()`); "ceilings" (what the probes
    gave), "workers", "seconds" and "complete" are added to it. `make_worker(name)` replaces the processes,
    for tests and for studies that time in their own process. A cell that could not be measured is in the
    record's cells with its state, "unavailable" (it cannot run here) or "dropped" (it failed or was wrong),
    and the reason. `begin` is when the settings' limit began to count, by `clock`; None: now. With a limit,
    "limit" in the environment counts the rounds and those left out, and says by how many seconds the run was
    late all the same: LEAST_ROUNDS of every cell, the last checks, the energy and the trace are always done.
    Raises Interrupted on Ctrl-C, and Fault when the reference cannot be computed.
    """
    threads = thread_variables(settings.threads)
    variables = {c.worker: c.environment for case in cases for c in case.candidates}
    make_worker = make_worker or (lambda name: Worker(name, threads | variables.get(name, {})))
    study = Study(cases, settings, make_worker, clock, begin)
    try:
        try:
            study.run_probes(probes)
            study.find_references()
            study.warm_all()
            study.time_all()
            study.count_energy()
            study.trace_all()
        except KeyboardInterrupt as stop:
            raise Interrupted(study.record(environment or {}, complete=False)) from stop
        except (WorkerCrash, WorkerError) as error:  # only the reference's worker lets these through
            raise Fault(f"the float64 reference could not be computed: {error}.") from error
        return study.record(environment or {}, complete=True)
    finally:
        for worker in (*study.workers.values(), *(worker for worker, _ in study.tracers.values())):
            worker.close()


def keep_partial(stop: Interrupted, path: Path) -> int:
    """Store what was measured before Ctrl-C beside `path`, which stays; returns the exit status."""
    partial = path.with_suffix(".partial.npz")
    save(stop.record, partial)
    print(f"interrupted: {len(stop.record.rows)} trials are in {shown(partial)}")
    return 130


def print_problems(record: Record) -> int:
    """Say what could not run, was dropped or left out; the exit status: 1 if a backend was dropped."""
    for sentence in unavailable(record) + failed(record) + limited(record):
        print(sentence)
    return 1 if failed(record) else 0


def failed(record: Record) -> list[str]:
    """One sentence per backend that gave wrong results or failed; a command that has any exits non-zero."""
    return _sentences(record, "dropped", "was dropped")


def unavailable(record: Record) -> list[str]:
    """One sentence per backend that cannot run on this machine."""
    return _sentences(record, "unavailable", "is unavailable")


def limited(record: Record) -> list[str]:
    """Sentences on what the time limit left out and by how much it was exceeded; none where all fitted."""
    facts, limit = record.environment.get("limit"), record.settings.get("limit")
    found = []
    if facts and facts["rounds_left_out"]:
        found.append(
            f"The time limit of {limit:g} s left out {facts['rounds_left_out']} of {facts['rounds']} rounds."
        )
    if facts and facts["late_s"] >= 0.5:
        found.append(
            f"The run took {facts['late_s']:.0f} s longer than its limit of {limit:g} s: "
            f"{LEAST_ROUNDS} rounds of every cell and what comes after the timing are never left out."
        )
    return found


def _sentences(record: Record, state: str, what: str) -> list[str]:
    """One sentence per backend and case with a cell in `state`, with the first reason."""
    reasons: dict[tuple[str, str], str] = {}
    for cell in record.cells:
        if cell["state"] == state:
            reasons.setdefault((cell["case"], cell["backend"]), cell["reason"])
    return [f"{backend} ({case}) {what}: {reason}" for (case, backend), reason in reasons.items()]


def thread_variables(threads: int) -> dict[str, str]:
    """Environment variables that give every framework's pools `threads` threads (0: leave the defaults).

    Pools may spin between the calls of a burst, as they do for their users; KMP_BLOCKTIME ends Intel's and
    LLVM's OpenMP spinning after 5 ms instead of 200, so that a worker is asleep soon after its burst. GNU's
    stops by itself within a millisecond or so. `worker.settle` waits for it and counts who did not.
    """
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    pools = dict.fromkeys((*names, "HOST_THREADS"), str(threads)) if threads else {}
    return pools | {"KMP_BLOCKTIME": "5"}


def progress(what: str, total: float) -> tqdm:
    """A progress bar with the time left; silent when stderr is not a terminal."""
    form = "{desc:10} {percentage:3.0f}% |{bar:30}| {elapsed} spent, {remaining} left {postfix}"
    return tqdm(desc=what, total=total, disable=None, bar_format=form, leave=False)


def plain_settings(settings: Any) -> dict[str, Any]:
    """A settings dataclass as it is printed and stored: tuples as lists, paths as `shown` prints them."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return [plain(item) for item in value]
        return shown(value) if isinstance(value, Path) else value

    return {name: plain(value) for name, value in asdict(settings).items()}
