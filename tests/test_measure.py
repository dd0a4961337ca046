"""The measurement logic, with backends and a clock that are fakes, and the real worker processes."""

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fake_backends import CLOCK, FakeBackend, LocalWorker, candidate, case, inputs
from harness import measure as measure_module
from harness import record as records
from harness import worker as worker_module
from harness.cli import Fault
from harness.gpu_trace import Activity
from harness.measure import (
    LEAST_ROUNDS,
    Interrupted,
    MeasureSettings,
    Probe,
    Study,
    failed,
    limited,
    plan_cell,
    run_study,
    spread,
    thread_variables,
    unavailable,
)
from harness.record import FALSE_CLOCK, without_false_device_times
from harness.worker import Session, Worker, WorkerCrash, WorkerError, time_burst, warm_up
from synthetic_record import make_gpu_record

SETTINGS = MeasureSettings(trials=40, warmup=4, budget=5.0, rounds=10)


def run(*cases, settings=SETTINGS, **arguments):
    return run_study(cases, settings, make_worker=LocalWorker, clock=CLOCK, **arguments)


def cells(record, **labels):
    return [cell for cell in record.cells if all(cell[key] == value for key, value in labels.items())]


# Planning


def test_a_fast_cell_gets_all_trials_spread_over_all_rounds():
    plan = plan_cell(MeasureSettings(), median_ms=2.0, return_ms=2.0)
    assert plan.rounds == 20 and plan.counts["latency"] * plan.rounds == 200
    assert plan.counts["throughput"] == 1 and plan.rounds_of["throughput"] > LEAST_ROUNDS


def test_a_slow_cell_gets_one_trial_in_each_of_the_least_rounds():
    plan = plan_cell(MeasureSettings(), median_ms=8000.0, return_ms=1.0)
    assert (plan.rounds, plan.counts["latency"]) == (LEAST_ROUNDS, 1)
    assert plan.left_out["throughput"] == "too slow for the budget"
    assert plan.counts["python"] >= 1, "describing a graph is cheap however slow its evaluation is"


@pytest.mark.parametrize("median_ms", [0.01, 1.0, 13.0, 70.0, 240.0, 500.0, 860.0])
def test_a_cell_stays_near_its_budget(median_ms):
    plan = plan_cell(MeasureSettings(), median_ms, return_ms=median_ms)
    latency_s = plan.rounds * (1 + plan.counts["latency"]) * median_ms / 1e3
    assert latency_s <= 1.01 * 7.0
    assert (
        sum(plan.costs[kind] * plan.counts[kind] * plan.rounds_of[kind] for kind in plan.counts) <= 1.7 * 7.0
    )
    assert plan.counts["latency"] * plan.rounds >= min(200, 0.4 * 7.0 / (median_ms / 1e3))


def test_a_burst_is_expected_to_take_its_trials_and_the_forwards_before_them():
    plan = plan_cell(MeasureSettings(), median_ms=2.0, return_ms=0.5)
    assert plan.wake_s == pytest.approx(0.006), "three forwards, the third past 5 ms"
    assert plan.burst_s({"latency": 10}) == pytest.approx(0.026)
    assert plan.burst_s({"latency": 10, "throughput": 1, "python": 2}) == pytest.approx(0.026 + 0.016 + 0.001)
    assert plan_cell(MeasureSettings(), median_ms=300.0, return_ms=0.5).wake_s == pytest.approx(0.3)


def test_every_prefix_of_the_spread_is_even():
    order = spread(20)
    assert sorted(order) == list(range(20))
    for length in (2, 3, 4, 5, 8, 10):
        chosen = sorted(order[:length])
        gaps = np.diff([*chosen, chosen[0] + 20])
        assert gaps.max() <= 2 * 20 / length + 1, (length, chosen)


def test_one_round_is_no_special_case():
    assert spread(1) == [0] and sorted(spread(3)) == [0, 1, 2]


# Order


def study_of(seed, *candidates, batch_sizes=(1, 4), **changes):
    settings = replace(SETTINGS, seed=seed, **changes)
    study = Study([case(*candidates, batch_sizes=batch_sizes)], settings, LocalWorker, CLOCK)
    study.find_references()
    study.warm_all()
    return study


def bursts_of(study):
    return [burst for bursts in study.schedule() for burst in bursts]


def test_every_round_times_every_backend_once_in_random_order():
    rounds = {}
    for burst in bursts_of(study_of(1, candidate("a"), candidate("b"), candidate("c"))):
        rounds.setdefault((burst.cell.batch_size, burst.round), []).append(burst.cell.candidate.name)
    assert len(rounds) == 2 * 10
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds.values())
    assert len({tuple(names) for names in rounds.values()}) >= 4
    assert len({names[0] for names in rounds.values()}) == 3


def test_rounds_of_all_batch_sizes_are_spread_over_the_run():
    sizes = [burst.cell.batch_size for burst in bursts_of(study_of(1, candidate("a"), candidate("b")))]
    half = len(sizes) // 2
    for size in (1, 4):
        assert 0.35 * half <= sizes[:half].count(size) <= 0.65 * half
    changes = sum(a != b for a, b in itertools.pairwise(sizes))
    assert changes >= 9, "batch sizes must alternate, not follow each other"


def test_a_round_is_not_interrupted_by_another():
    bursts = bursts_of(study_of(1, candidate("a"), candidate("b")))
    keys = [(burst.cell.batch_size, burst.round) for burst in bursts]
    assert all(keys[i] == keys[i + 1] for i in range(0, len(keys), 2))


def test_cases_may_share_their_rounds():
    fields = {"shares_rounds": "parts", "rounds_times": 2}
    parts = [case(candidate("a"), name=name, **fields) for name in ("one", "two")]
    record = run(*parts, case(candidate("a"), name="three"))
    rows = record.rows[record.rows.kind == "latency"]
    bursts = rows.drop_duplicates(["case", "batch_size", "round"]).sort_values("sequence", ignore_index=True)
    both = bursts[bursts.case != "three"].groupby(["batch_size", "round"])
    assert both.ngroups == 2 * 20 and all(sorted(one.case) == ["one", "two"] for _, one in both)
    assert all(one.index[1] == one.index[0] + 1 for _, one in both), "something came between"
    assert {tuple(one.case) for _, one in both} == {("one", "two"), ("two", "one")}
    assert {cell["case"] for cell in record.cells if cell.get("shares_rounds")} == {"one", "two"}
    assert {(cell["case"], cell["rounds"], cell["trials"]) for cell in record.cells} == {
        ("one", 20, 40),
        ("two", 20, 40),
        ("three", 10, 40),
    }


def test_the_seed_decides_the_order():
    def order(seed):
        return [(b.cell.candidate.name, b.cell.batch_size, b.round) for b in bursts_of(study_of(seed, *pair))]

    pair = (candidate("a"), candidate("b"))
    assert order(5) == order(5) != order(6)


@pytest.mark.parametrize("limit", [0.0, 1.0, 1e9])
def test_a_limit_changes_nothing_in_the_order(limit):
    backends = (candidate("a"), candidate("b"), candidate("slow", seconds=0.9))
    study = study_of(7, *backends, rounds=5, limit=limit)
    order = " ".join(
        f"{burst.cell.candidate.name}{burst.cell.batch_size}.{burst.round}{'!' * burst.last}"
        for burst in bursts_of(study)
    )
    assert order == (
        "b1.0 slow1.0 a1.0 b4.0 a4.0 slow4.0 slow1.1 b1.1 a1.1 b4.1 slow4.1 a4.1 a1.2 slow1.2 b1.2 "
        "b4.2 slow4.2 a4.2 b4.3 a4.3 b1.3 a1.3 b1.4! slow1.4! a1.4! slow4.4! a4.4! b4.4!"
    )


def test_a_slow_backend_shares_its_rounds_with_a_slower_one():
    study = study_of(
        1,
        candidate("fast"),
        candidate("slow", seconds=0.7),
        candidate("slower", seconds=0.8),
        batch_sizes=(1,),
    )
    taken = {}
    for burst in bursts_of(study):
        taken.setdefault(burst.cell.candidate.name, set()).add(burst.round)
    assert len(taken["fast"]) == 10 and LEAST_ROUNDS <= len(taken["slow"]) < 10
    assert taken["slower"] <= taken["slow"] <= taken["fast"]


def test_the_run_follows_the_schedule():
    FakeBackend.log.clear()
    record = run(case(candidate("a"), candidate("b")))
    latency = record.rows[record.rows.kind == "latency"]
    bursts = latency.drop_duplicates(["backend", "batch_size", "round"]).sort_values("sequence")
    warmups, done = 4 + 2, FakeBackend.log[-len(bursts) :]  # two cells of two backends, two references
    assert len(FakeBackend.log) == len(bursts) + warmups
    assert done == list(zip(bursts.backend, bursts.batch_size, strict=True))
    assert record.rows.sequence.is_monotonic_increasing and record.rows.sequence.is_unique


# Clocks


def burst_of(counts, **arguments):
    backend = FakeBackend("a", **arguments)
    backend.prepare(inputs(1))
    trials, output = time_burst(backend, counts, 8, CLOCK, CLOCK.now, check=True)
    return {kind: [ms for k, _, ms in trials if k == kind] for kind in {k for k, *_ in trials}}, output


def test_the_first_call_of_a_burst_is_not_counted():
    found, _ = burst_of({"latency": 3}, seconds=0.002, first=50.0)
    assert found["latency"] == pytest.approx([2.0] * 3)


@pytest.mark.parametrize(("seconds", "uncounted"), [(0.0004, 13), (0.002, 3), (0.008, 1)])
def test_a_burst_wakes_the_machine_before_it_counts(seconds, uncounted):
    backend = FakeBackend("a", seconds=seconds)
    backend.prepare(inputs(1))
    trials, _ = time_burst(backend, {"latency": 2}, 8, CLOCK, 0.0)
    assert backend.calls == uncounted + 2 and len(trials) == 2
    assert plan_cell(SETTINGS, 1e3 * seconds, 1.0).wake_s == pytest.approx(uncounted * seconds)


def test_kinds_are_what_they_say():
    counts = {"latency": 2, "throughput": 1, "python": 2}
    found, output = burst_of(counts, seconds=0.001, wait=0.004)
    assert found["latency"] == pytest.approx([5.0, 5.0])  # call and wait
    assert found["python"] == pytest.approx([1.0, 1.0])  # the call alone
    assert found["throughput"] == pytest.approx([5.0])  # per forward, the waits of all eight at the end
    assert output.shape == (1, 3)


def test_throughput_hides_what_overlaps():
    class Overlapping(FakeBackend):
        def synchronize(self):
            CLOCK.now += self.wait if self.pending else 0.0
            self.pending = 0

    backend = Overlapping("a", seconds=0.001, wait=0.008)
    backend.prepare(inputs(1))
    trials, _ = time_burst(backend, {"latency": 1, "throughput": 1}, 8, CLOCK, 0.0)
    assert {kind: pytest.approx(ms) for kind, _, ms in trials} == {"latency": 9.0, "throughput": 2.0}


def test_warm_up_goes_on_until_the_median_is_steady():
    class Warming(FakeBackend):
        def run(self):
            super().run()
            CLOCK.now += 0.01 / self.calls**2 if self.calls < 60 else 0.0

    steady = FakeBackend("a")
    steady.prepare(inputs(1))
    assert warm_up(steady, 30, 100.0, CLOCK)["warmup_trials"] == 30
    warming = Warming("a")
    warming.prepare(inputs(1))
    facts = warm_up(warming, 20, 100.0, CLOCK)
    assert 20 < facts["warmup_trials"] < 80 and facts["warmup_steady"]
    assert facts["first_ms"] == pytest.approx(11.0) and facts["second_ms"] == pytest.approx(3.5)


def test_warm_up_is_capped_by_number_and_by_time():
    class Restless(FakeBackend):
        def run(self):
            super().run()
            CLOCK.now += 0.001 * self.calls

    restless = Restless("a")
    restless.prepare(inputs(1))
    facts = warm_up(restless, 10, 1e9, CLOCK)
    assert facts["warmup_trials"] == 40 and not facts["warmup_steady"]
    slow = FakeBackend("a", seconds=8.0)
    slow.prepare(inputs(1))
    facts = warm_up(slow, 30, 2.5, CLOCK)
    assert facts["warmup_trials"] == 2


def test_a_first_call_that_compiles_is_not_taken_for_the_speed():
    compiling = FakeBackend("a", seconds=0.001, first=30_000.0)
    compiling.prepare(inputs(1))
    facts = warm_up(compiling, 30, 2.0, CLOCK)
    assert facts["first_ms"] == pytest.approx(30_000) and facts["median_ms"] == pytest.approx(1.0)
    assert facts["warmup_trials"] == 30


# Runs


def test_a_run_holds_what_was_asked_for():
    record = run(case(candidate("a"), candidate("b", seconds=0.002)))
    assert record.environment["complete"] and not failed(record) and not unavailable(record)
    rows = record.rows[(record.rows.backend == "b") & (record.rows.batch_size == 4)]
    assert (rows.kind == "latency").sum() == 40
    assert rows[rows.kind == "latency"].latency_ms.to_numpy() == pytest.approx(8.0)
    assert list(rows[rows.kind == "latency"].trial) == list(range(40))
    assert list(rows[rows.kind == "cold"].trial) == [1, 2]  # its import is in its first cell
    first = record.rows[(record.rows.backend == "b") & (record.rows.batch_size == 1)]
    assert list(first[first.kind == "cold"].trial) == [0, 1, 2]
    (cell,) = cells(record, backend="b", batch_size=4)
    assert (cell["state"], cell["trials"], cell["rounds"]) == ("steady", 40, 10)
    assert cell["launches_counted"] == 7 and cell["warmup_trials"] == 4
    assert {check["when"] for check in record.checks} == {"warm-up", "last trial"}
    assert len(record.checks) == 2 * 4 and all(check["passed"] for check in record.checks)


def test_a_record_of_a_run_can_be_stored(tmp_path):
    record = run(case(candidate("a"), candidate("gpu", factory="fake_backends:refuse")))
    records.save(record, tmp_path / "per_trial.npz")
    again = records.load(tmp_path / "per_trial.npz")
    assert again.cells == record.cells and len(again.rows) == len(record.rows)


# A limit on the time


def limited_run(share, *candidates, settings=SETTINGS, **fields):
    """(record under a limit of `share` of what the run takes without one, that limit)."""
    cases = case(*candidates, **fields)
    whole = run(cases, settings=settings)
    assert whole.environment["complete"] and "limit" not in whole.environment and not limited(whole)
    limit = share * whole.environment["seconds"]
    return run(cases, settings=replace(settings, limit=limit)), limit


TRIO = (candidate("a", seconds=0.03), candidate("b", seconds=0.05), candidate("slow", seconds=0.1))


def rounds_of(record):
    """The rounds of every cell."""
    rows = record.rows[record.rows.kind == "latency"]
    return {key: set(cell["round"]) for key, cell in rows.groupby(["backend", "batch_size"])}


@pytest.mark.parametrize("share", [0.7, 0.8, 0.95])
def test_a_limit_is_kept_within_a_round(share):
    record, limit = limited_run(share, *TRIO)
    a_round = 4 * (0.03 + 0.05 + 0.1) * 5  # of all backends at batch 4: at most five forwards each
    assert limit - 1.5 * a_round <= record.environment["seconds"] <= limit
    assert record.environment["complete"] and record.environment["limit"]["late_s"] == 0
    assert not failed(record)


@pytest.mark.parametrize("share", [0.65, 0.8])
def test_all_cells_lose_the_same_share_of_their_rounds(share):
    trio = [candidate(name, seconds=0.01) for name in "abc"]  # short rounds must not fill what is left
    record, _ = limited_run(share, *trio, batch_sizes=(1, 2, 16))
    rounds = rounds_of(record)
    counts = {len(found) for found in rounds.values()}
    assert max(counts) - min(counts) <= 1 and LEAST_ROUNDS <= min(counts) and max(counts) < 10
    for size in (1, 2, 16):
        assert rounds["a", size] == rounds["b", size] == rounds["c", size], "their ratios are paired"
    facts = record.environment["limit"]
    timed = sum(len(found) for (backend, _), found in rounds.items() if backend == "a")
    assert (facts["rounds"], facts["rounds"] - facts["rounds_left_out"]) == (30, timed)


@pytest.mark.parametrize("share", [0.01, 0.4, 0.7, 0.9])
def test_a_slow_cell_keeps_its_rounds_and_its_peers_are_in_them(share):
    slow = (candidate("slow", seconds=1.0), candidate("slower", seconds=1.2))
    record, _ = limited_run(share, *TRIO[:2], *slow, batch_sizes=(1,))
    rounds = rounds_of(record)
    assert all(len(found) >= LEAST_ROUNDS for found in rounds.values())
    assert rounds["slower", 1] <= rounds["slow", 1] <= rounds["a", 1] == rounds["b", 1]
    assert record.rows.sequence.is_monotonic_increasing and record.rows.start_s.is_monotonic_increasing


def test_what_every_cell_needs_is_timed_however_late_that_is():
    record, limit = limited_run(0.01, *TRIO)
    assert {len(found) for found in rounds_of(record).values()} == {LEAST_ROUNDS}
    assert record.environment["complete"] and not failed(record)
    assert record.environment["limit"]["late_s"] == pytest.approx(record.environment["seconds"] - limit)
    late = re.escape(f"The run took {record.environment['limit']['late_s']:.0f} s longer than its limit of")
    (left_out, exceeded) = limited(record)
    assert re.match(late, exceeded) and left_out.endswith("s left out 12 of 20 rounds.")


def test_a_limit_counts_from_where_the_command_began():
    cases = case(*TRIO)
    limit = run(cases).environment["seconds"]
    settings = replace(SETTINGS, limit=1.2 * limit)
    record = run(cases, settings=settings)
    assert record.environment["limit"] == {"rounds": 20, "rounds_left_out": 0, "late_s": 0.0}
    record = run(cases, settings=settings, begin=CLOCK.now - 0.5 * limit)
    assert record.environment["seconds"] <= 0.7 * limit and record.environment["limit"]["late_s"] == 0
    assert record.environment["limit"]["rounds_left_out"] > 0


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9])
def test_every_cell_is_checked_to_the_end_under_a_limit(share):
    record, _ = limited_run(share, *TRIO)
    last = [(c["backend"], c["batch_size"]) for c in record.checks if c["when"] == "last trial"]
    assert sorted(last) == sorted(rounds_of(record)) and len(last) == 6
    late = candidate("late", seconds=0.03, error=0.5, wrong_after=40)
    record, _ = limited_run(share, candidate("a", seconds=0.03), late, batch_sizes=(1,))
    assert [cell["state"] for cell in record.cells] in (["steady", "dropped"], ["few", "dropped"])
    assert [check["when"] for check in record.checks if not check["passed"]] == ["last trial"]


def test_bursts_that_take_longer_than_their_forwards_are_learnt_from(monkeypatch):
    slow = LocalWorker.ask

    def ask(self, method, **arguments):
        CLOCK.now += 0.5 if method == "burst" else 0.0
        return slow(self, method, **arguments)

    monkeypatch.setattr(LocalWorker, "ask", ask)
    record, limit = limited_run(0.7, candidate("a"), candidate("b"))
    assert limit - 2.5 <= record.environment["seconds"] <= limit
    assert record.environment["limit"]["rounds_left_out"] >= 5


def test_energy_and_trace_have_their_time_under_a_limit(monkeypatch):
    settings = replace(SETTINGS, energy=2.0)

    def joules(counter, call, idle, seconds):
        call()
        CLOCK.now += seconds
        return 32.0

    monkeypatch.setattr(worker_module, "open_counter", lambda: lambda: 0.0)
    monkeypatch.setattr(worker_module, "idle_watts", lambda counter: 90.0)
    monkeypatch.setattr(worker_module, "joules_per_call", joules)
    monkeypatch.setattr(worker_module, "open_trace", FakeTrace)
    monkeypatch.setattr(worker_module, "Trace", FakeTrace)
    gpus = [candidate(name, target="cuda", traced=True, seconds=0.03) for name in ("gpu", "other")]
    record, limit = limited_run(0.8, *gpus, settings=settings)
    assert limit - 8.0 <= record.environment["seconds"] <= limit
    assert record.environment["limit"]["rounds_left_out"] > 0 and not failed(record)
    device = record.rows[record.rows.kind == "device"]
    assert len(device) == 4 * measure_module.TRACE_ROUNDS * measure_module.TRACED_FORWARDS
    assert all("joules_per_image" in cell for cell in record.cells)


# Cells that cannot be measured, and drift


def test_a_slow_cell_is_few():
    record = run(case(candidate("a", seconds=4.0), batch_sizes=(1,)))
    assert (record.cells[0]["state"], record.cells[0]["trials"]) == ("few", LEAST_ROUNDS)


def test_a_slow_down_halfway_is_drift():
    begin = CLOCK.now
    steady = run(case(candidate("a"), batch_sizes=(1,)))
    length = CLOCK.now - begin
    assert steady.cells[0]["state"] == "steady"
    record = run(case(candidate("a", slower_from=CLOCK.now + length / 2), batch_sizes=(1,)))
    assert record.cells[0]["state"] == "drifting"
    assert record.cells[0]["drift_percent"] == pytest.approx(20, abs=1)


def test_a_wrong_backend_is_dropped_with_its_numbers():
    record = run(case(candidate("a"), candidate("wrong", error=0.5)))
    assert {cell["state"] for cell in cells(record, backend="wrong")} == {"dropped"}
    assert {cell["state"] for cell in cells(record, backend="a")} == {"steady"}
    assert "wrong" not in set(record.rows.backend)
    (check,) = [check for check in record.checks if not check["passed"]]
    assert check["where"] == [0, 2] and check["relative_error"] == pytest.approx(0.5 / 6)
    (sentence,) = failed(record)
    assert sentence.startswith(
        "wrong (doubling) was dropped: wrong result at batch 1: largest relative error"
    )


def test_a_backend_that_turns_wrong_is_dropped_at_its_last_trial():
    record = run(case(candidate("a"), candidate("late", error=0.5, wrong_after=60), batch_sizes=(1,)))
    assert cells(record, backend="late")[0]["state"] == "dropped"
    assert "late" not in set(record.rows.backend)
    assert [check["when"] for check in record.checks if not check["passed"]] == ["last trial"]


def test_the_tolerance_can_be_that_of_another_row():
    wrong = candidate("rounded", error=0.01)
    assert failed(run(case(wrong, batch_sizes=(1,))))
    assert not failed(run(case(wrong, batch_sizes=(1,), tolerance="float16")))


def test_a_backend_that_cannot_run_is_unavailable_and_the_others_run():
    record = run(case(candidate("gpu", factory="fake_backends:refuse"), candidate("a")))
    assert unavailable(record) == ["gpu (doubling) is unavailable: this machine has no such GPU"]
    assert not failed(record)
    assert {cell["state"] for cell in cells(record, backend="a")} == {"steady"}


def test_a_framework_that_is_not_installed_is_unavailable():
    missing = candidate("peer", worker="peer")
    record = run(case(candidate("a"), missing.__class__(**{**vars(missing), "module": "no_such_framework"})))
    assert unavailable(record) == ["peer (doubling) is unavailable: no_such_framework is not installed"]


def test_an_exception_costs_its_cell_only():
    record = run(case(candidate("a"), candidate("b", raise_after=30), batch_sizes=(1,)))
    assert failed(record) == ["b (doubling) was dropped: RuntimeError: out of memory"]
    assert "b" not in set(record.rows.backend) and (record.rows.backend == "a").sum() > 40


def test_a_crash_costs_the_backends_of_its_worker_only():
    record = run(
        case(candidate("a"), candidate("b", "two", crash_after=30), candidate("c", "two"), batch_sizes=(1,))
    )
    assert [cell["state"] for cell in record.cells] == ["steady", "dropped", "dropped"]
    assert all("SIGSEGV" in sentence for sentence in failed(record)) and len(failed(record)) == 2
    assert record.environment["workers"]["two"]["reason"] == "the fake worker ended with SIGSEGV"


def test_ctrl_c_keeps_what_was_measured():
    with pytest.raises(Interrupted) as stop:
        run(case(candidate("a"), candidate("b", stop_after=100), batch_sizes=(1,)))
    record = stop.value.record
    assert isinstance(stop.value, KeyboardInterrupt)
    assert record.environment["complete"] is False
    assert 20 < (record.rows.kind == "latency").sum() < 80
    assert {cell["backend"] for cell in record.cells} == {"a", "b"}


def test_probes_fill_the_ceilings():
    probes = (
        Probe("one", "fake_backends:limits", {}, module="json"),
        Probe("one", "fake_backends:refuse", {}, module="json"),
    )
    study = Study([], SETTINGS, LocalWorker, CLOCK)
    study.run_probes(probes[1:])
    assert study.ceilings == [
        {"name": "fake_backends:refuse", "framework": "one", "reason": "this machine has no such GPU"}
    ]
    study.run_probes(probes[:1])
    assert study.ceilings[1] == {"name": "copy", "value": 1.0}


def test_a_crash_of_a_probe_leaves_the_backends_a_new_process():
    probe = Probe("one", "fake_backends:crash", {}, module="json")
    record = run(case(candidate("a"), batch_sizes=(1,)), probes=(probe,))
    assert record.environment["ceilings"][0]["reason"] == "the fake worker ended with SIGSEGV"
    assert record.cells[0]["state"] == "steady"


def test_energy_is_counted_where_there_is_a_counter(monkeypatch):
    settings = MeasureSettings(trials=4, warmup=2, budget=5.0, rounds=2, energy=0.5)
    asked = []

    def joules(counter, call, idle, seconds):
        call()
        asked.append((idle, seconds))
        return 32.0

    monkeypatch.setattr(worker_module, "open_counter", lambda: lambda: 0.0)
    monkeypatch.setattr(worker_module, "idle_watts", lambda counter: 90.0)
    monkeypatch.setattr(worker_module, "joules_per_call", joules)
    cases = case(candidate("gpu", target="cuda"), candidate("a"), batch_sizes=(4,))
    (gpu, a) = run(cases, settings=settings).cells
    assert gpu["joules_per_image"] == pytest.approx(32.0 / 8 / 4) and gpu["idle_watts"] == 90.0
    assert "joules_per_image" not in a and asked == [(90.0, 0.5)]
    monkeypatch.setattr(worker_module, "open_counter", lambda: None)
    assert "joules_per_image" not in run(cases, settings=settings).cells[0]


class FakeTrace:
    """A GPU that is busy for 0.25 ms in every forward, in two kernels; `calls` counts what was traced."""

    calls = 0
    stayed = 0

    def stay_on(self):
        FakeTrace.stayed += 1

    def record(self, work):
        work()
        FakeTrace.calls += 1
        return [Activity(0, 200_000, "a"), Activity(250_000, 300_000, "b")]


def traced(monkeypatch, trace=None, **changes):
    """A run of a traced backend beside one that is not; `trace`: FakeTrace's, or why there is none."""
    monkeypatch.setattr(worker_module, "open_trace", lambda: trace or FakeTrace())
    monkeypatch.setattr(worker_module, "Trace", FakeTrace)
    monkeypatch.setattr(FakeTrace, "calls", 0)
    return run(case(candidate("gpu", traced=True, **changes), candidate("a"), batch_sizes=(1, 4)))


def test_a_gpu_is_traced_after_everything_else(monkeypatch):
    record = traced(monkeypatch)
    rows = record.rows
    device = rows[rows.kind == "device"]
    assert set(device.backend) == {"gpu"} and set(device.latency_ms) == {0.25}
    assert device.sequence.min() > rows[rows.kind != "device"].sequence.max()
    per_cell = measure_module.TRACE_ROUNDS * measure_module.TRACED_FORWARDS
    assert len(device) == 2 * per_cell == FakeTrace.calls
    assert device["round"].nunique() == measure_module.TRACE_ROUNDS
    gpu = [cell for cell in record.cells if cell["backend"] == "gpu"]
    assert all(cell["device_clock"] == "GPU trace" and cell["kernels_traced"] == 2 for cell in gpu)
    assert all("device" not in cell["left_out"] for cell in gpu)


def test_a_gpu_that_cannot_be_traced_keeps_its_other_times_and_says_why(monkeypatch):
    reason = "the GPU cannot be traced: cuptiActivityRegisterCallbacks gave status 35"
    record = traced(monkeypatch, trace=reason)
    gpu = [cell for cell in record.cells if cell["backend"] == "gpu"]
    assert [cell["state"] for cell in gpu] == ["steady", "steady"]
    assert all(cell["left_out"]["device"] == reason for cell in gpu)
    assert not (record.rows.kind == "device").any()


def test_a_crash_while_tracing_costs_no_time_that_was_measured(monkeypatch):
    monkeypatch.setattr(FakeTrace, "record", lambda self, work: (_ for _ in ()).throw(WorkerCrash("died")))
    record = traced(monkeypatch)
    gpu = [cell for cell in record.cells if cell["backend"] == "gpu"]
    assert all(cell["state"] == "steady" and cell["left_out"]["device"] for cell in gpu)
    assert record.environment["workers"]["one"]["trace_failed"] == "died"


class Faulty(LocalWorker):
    """Like a process whose GPU context a fault has spoiled: from `faults`' trace on every one fails.

    `faults`: for each process of the worker "one" in turn, the trace that meets a fault; `bad`: a backend
    that meets one whenever it is traced.
    """

    faults = ()
    bad = None
    started = 0
    log = ()

    def __init__(self, name):
        super().__init__(name)
        self.traces, self.fault, self.number = 0, None, Faulty.started
        Faulty.log.append((name, "start"))
        if name == "one":
            self.fault = Faulty.faults[Faulty.started] if Faulty.started < len(Faulty.faults) else None
            Faulty.started += 1

    def ask(self, method, **arguments):
        """As LocalWorker, but for traces."""
        Faulty.log.append((self.name, method))
        if method == "trace":
            if Faulty.bad and Faulty.bad in arguments["key"]:
                self.fault = self.traces
            if self.fault is not None and self.traces >= self.fault:
                raise WorkerError("RuntimeError: misaligned address")
            self.traces += 1
        return super().ask(method, **arguments)

    def close(self):
        Faulty.log.append((self.name, "close"))


def faulty(monkeypatch, faults=(), bad=None, batch_sizes=(1, 2, 3, 4, 5, 6), settings=SETTINGS):
    """A run of three traced backends whose worker fails while it traces, beside one in another worker."""
    for name, value in {"faults": faults, "bad": bad, "started": 0, "log": []}.items():
        monkeypatch.setattr(Faulty, name, value)
    monkeypatch.setattr(worker_module, "open_trace", FakeTrace)
    monkeypatch.setattr(worker_module, "Trace", FakeTrace)
    gpus = [candidate(name, traced=True) for name in ("a", "b", "c")]
    cases = case(*gpus, candidate("other", worker="two", traced=True), batch_sizes=batch_sizes)
    return run_study([cases], settings, make_worker=Faulty, clock=CLOCK)


PER_CELL = measure_module.TRACE_ROUNDS * measure_module.TRACED_FORWARDS


def traces_of(record):
    """How many traced forwards each backend has at each batch size."""
    device = record.rows[record.rows.kind == "device"]
    return device.groupby(["backend", "batch_size"]).size().unstack()


def test_a_fault_while_tracing_costs_the_other_cells_of_its_worker_nothing(monkeypatch):
    record = faulty(monkeypatch, faults=(8,))
    assert (traces_of(record) == PER_CELL).all(axis=None) and traces_of(record).shape == (4, 6)
    facts = record.environment["workers"]
    assert (
        facts["one"]["trace_failed"] == "RuntimeError: misaligned address" and facts["one"]["retraces"] == 1
    )
    assert (
        "import_s" in facts["one"] and "peak_memory_mb" in facts["one"] and "trace_failed" not in facts["two"]
    )
    assert all("device" not in cell["left_out"] for cell in record.cells)
    assert {cell["state"] for cell in record.cells} == {"steady"}
    ones = [entry for entry in Faulty.log if entry[0] == "one"]
    assert [what for _, what in ones if what in ("start", "close")] == ["start", "close", "start", "close"]
    second = [what for _, what in ones[ones.index(("one", "close")) :]]
    assert (
        second[1:4] == ["start", "import_module", "trace_from_now"]
        and second.count("open") == 3
        and second.count("batch") == 6
    )


def test_only_the_backend_that_cannot_be_traced_has_no_device_times(monkeypatch):
    record = faulty(monkeypatch, bad="/b/")
    for cell in record.cells:
        bad = cell["backend"] == "b"
        assert cell["left_out"].get("device") == ("RuntimeError: misaligned address" if bad else None)
        assert ("device_clock" in cell) != bad and ("kernels_traced" in cell) != bad
    assert set(traces_of(record).index) == {"a", "c", "other"}
    assert (traces_of(record) == PER_CELL).all(axis=None) and traces_of(record).shape == (3, 6)
    assert record.environment["workers"]["one"]["retraces"] == 1 + measure_module.TRACE_FAULTS


def test_a_worker_that_always_faults_is_given_up(monkeypatch):
    record = faulty(monkeypatch, faults=(0,) * 99)
    cells = [cell for cell in record.cells if cell["backend"] != "other"]
    assert all("misaligned address" in cell["left_out"]["device"] for cell in cells)
    assert set(traces_of(record).index) == {"other"}
    assert record.environment["workers"]["one"]["retraces"] == 3 * measure_module.TRACE_FAULTS


def test_what_was_traced_before_the_processes_ran_out_is_kept(monkeypatch):
    record = faulty(monkeypatch, faults=(20, *(7,) * 99))  # each process lasts for less than half a round
    left = measure_module.RETRACES * 7
    counts = traces_of(record).drop("other")
    # and a few that only the first process had traced
    assert (
        0
        <= counts.sum(axis=None) - measure_module.TRACED_FORWARDS * left
        < 20 * measure_module.TRACED_FORWARDS
    )
    assert record.environment["workers"]["one"]["retraces"] == measure_module.RETRACES
    without = [c for c in record.cells if c["left_out"].get("device")]
    assert all((c["backend"], c["batch_size"]) not in counts.stack().index for c in without)


def test_no_new_process_traces_after_the_limit(monkeypatch):
    settings = replace(SETTINGS, limit=1e-3)
    record = faulty(monkeypatch, faults=(8,), settings=settings)
    assert "retraces" in record.environment["workers"]["one"]
    assert record.environment["workers"]["one"]["retraces"] == 0
    counts = traces_of(record).drop("other")
    assert counts.sum(axis=None) == 8 * measure_module.TRACED_FORWARDS, (
        "what the first process traced is kept"
    )
    reasons = {c["left_out"].get("device") for c in record.cells} - {None}
    assert reasons == {"RuntimeError: misaligned address; there was no time to trace anew"}


@pytest.mark.parametrize("process", [0, 1])
def test_a_wrong_result_while_tracing_drops_the_backend(monkeypatch, process):
    ask = Faulty.ask

    def wrong(self, method, **arguments):
        answer = ask(self, method, **arguments)
        if (
            method == "trace"
            and "/b/" in arguments["key"]
            and self.number == process
            and answer["output"] is not None
        ):
            return answer | {"output": answer["output"] + 1}
        return answer

    monkeypatch.setattr(Faulty, "ask", wrong)
    record = faulty(monkeypatch, faults=(30,))
    states = {cell["backend"]: cell["state"] for cell in record.cells}
    assert states == {"a": "steady", "b": "dropped", "c": "steady", "other": "steady"}
    assert any(check["when"] == "traced" and not check["passed"] for check in record.checks)
    assert failed(record) and set(traces_of(record).index) == {"a", "c", "other"}


def test_an_interrupted_run_says_that_the_gpu_was_not_traced(monkeypatch):
    with pytest.raises(Interrupted) as stop:
        traced(monkeypatch, stop_after=60)
    reasons = {c["left_out"].get("device") for c in stop.value.record.cells if c["backend"] == "gpu"}
    assert reasons == {measure_module.NOT_YET_TRACED}


def test_a_reference_that_fails_is_a_fault():
    broken = candidate("reference", "reference", factory="fake_backends:refuse")
    with pytest.raises(Fault, match="no such GPU"):
        run(case(candidate("a"), reference=broken))
    raising = candidate("reference", "reference", raise_after=0)
    with pytest.raises(Fault, match="float64 reference could not be computed: RuntimeError: out of memory"):
        run(case(candidate("a"), reference=raising))


# Worker processes


@pytest.fixture
def worker():
    worker = Worker("test", thread_variables(3), timeout_s=60)
    yield worker
    worker.close()


def test_a_crash_of_a_real_process_is_survived():
    settings = MeasureSettings(trials=20, warmup=2, budget=0.5, rounds=4)
    real = "fake_backends:make_real"
    record = run_study(
        [
            case(
                candidate("a", "one", real),
                candidate("b", "two", real, crash_after=20),
                batch_sizes=(1,),
                reference=candidate("reference", "three", real),
            )
        ],
        settings,
    )
    assert [cell["state"] for cell in record.cells] == ["steady", "dropped"]
    assert "SIGABRT" in record.cells[1]["reason"]
    assert record.environment["workers"]["one"]["idle_cpu_percent"] < 40


def test_a_worker_answers_only_when_its_threads_sleep(worker):
    worker.ask("open", key="a", factory="fake_backends:make_real", arguments={"spin_s": 0.3})
    worker.ask("batch", key="x", batch=inputs(1))
    start = time.perf_counter()
    worker.ask("result", key="a", batch="x")
    assert time.perf_counter() - start >= 0.1, "well after the output, which takes a millisecond"
    time.sleep(0.4)
    assert worker.ask("status")["idle_cpu_percent"] < 10


def test_threads_are_set_before_the_framework_is_imported(worker):
    for name in ("OMP_NUM_THREADS", "HOST_THREADS", "OPENBLAS_NUM_THREADS"):
        assert (
            worker.ask("call", function="fake_backends:environment_variable", arguments={"name": name}) == "3"
        )


def test_peak_memory_is_the_workers_own(worker):
    ballast = np.ones(40_000_000)  # 320 MB here, none of it there
    assert worker.ask("status")["peak_memory_mb"] < 200 < ballast.nbytes / 1e6


def test_peak_memory_outlives_the_cells_that_reset_it(worker):
    worker.ask("call", function="fake_backends:allocate", arguments={"megabytes": 300})
    worker.ask("open", key="a", factory="fake_backends:make_real", arguments={})
    worker.ask("batch", key="x", batch=inputs(1))
    cell = worker.ask("warm", key="a", batch="x", at_least=2, seconds=1.0)
    assert worker.ask("status")["peak_memory_mb"] > 300
    if sys.platform == "linux":
        assert cell["peak_memory_mb"] < 200, "a cell's peak is its own"


def test_errors_cross_the_process_boundary(worker):
    with pytest.raises(Fault, match="this machine has no such GPU"):
        worker.ask("open", key="a", factory="fake_backends:refuse", arguments={})
    with pytest.raises(WorkerError, match="KeyError: 'nothing'"):
        worker.ask("result", key="nothing", batch="x")
    assert worker.ask("import_module", module="json") >= 0
    with pytest.raises(Fault, match="no_such_framework is not installed"):
        worker.ask("import_module", module="no_such_framework")


def test_a_worker_that_hangs_is_given_up():
    worker = Worker("test", {}, timeout_s=1.0)
    with pytest.raises(WorkerCrash, match="no answer from the test worker in 1 s"):
        worker.ask("call", function="fake_backends:sleep_forever", arguments={})
    worker.close()
    assert worker.process.returncode is not None


def test_the_parent_imports_no_framework():
    program = (
        "import sys; import harness.measure, harness.worker, harness.backends, harness.ceilings, benchmark\n"
        "print([name for name in ('torch', 'mlx', 'onnxruntime', 'matplotlib') if name in sys.modules])"
    )
    folder = Path(__file__).parents[1] / "scr"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=folder)
    assert done.stdout.strip() == "[]", done.stderr


def test_workers_ignore_ctrl_c_and_end_with_their_parent(worker):
    os.kill(worker.process.pid, signal.SIGINT)
    assert worker.ask("import_module", module="json") >= 0
    worker.connection.close()
    assert worker.process.wait(timeout=10) == 0


def test_a_session_needs_no_process():
    session = Session(CLOCK)
    session.open("a", "fake_backends:make", {"name": "a"})
    session.batch("x", inputs(2))
    assert session.result("a", "x") == pytest.approx(2 * inputs(2))


def test_device_times_longer_than_their_forward_are_left_out_and_said_to_be():
    record = make_gpu_record(batch_sizes=(1, 128))
    wrong = (record.rows["backend"] == "mlx-block") & (record.rows["batch_size"] == 1)
    record.rows.loc[wrong & (record.rows["kind"] == "device"), "latency_ms"] *= 100
    kept = without_false_device_times(record)
    assert len(record.rows) - len(kept.rows) == (wrong & (record.rows["kind"] == "device")).sum() > 0
    said = {(c["backend"], c["batch_size"]): (c.get("left_out") or {}).get("device") for c in kept.cells}
    assert said.pop(("mlx-block", 1)) == FALSE_CLOCK and not any(said.values())
    assert len(without_false_device_times(kept).rows) == len(kept.rows)
