"""The study's analysis and report on made-up records whose answers are known."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batch.analysis import Curve, Study, bandwidths, missing
from batch.cases import MLP_WIDTHS, Work, all_works
from batch.claims import claims_table
from batch.figures import FIGURES
from batch.report import build, text
from batch.roofline import Limits, predict
from batch.study import STUDY, device_case
from harness.cli import Fault
from harness.record import Record, load, rows_from, save

LIMITS = Limits(4e12, ((1e5, 4e11), (1e9, 2e11)), call_s=5e-6, launch_s=2e-6)
Slow = Callable[[Work, str, int], float]


def made_up(
    device: str = "cpu",
    slow: Slow = lambda work, backend, batch: 1.0,
    noise: float = 0.01,
    works: list[Work] | None = None,
    **environment: Any,
) -> Record:
    """A record of a machine that takes the model's time × `slow(work, backend, batch)`."""
    generator = np.random.default_rng(1)
    works = works or all_works(device, 16e9)
    rows, cells = [], []

    def add(case: str, dtype: str, backend: str, target: str, batch: int, seconds: float, kind: str) -> None:
        label = {"study": STUDY, "case": case, "backend": backend, "target": target}
        label |= {"batch_size": batch, "dtype": dtype}
        for trial in range(8):
            milliseconds = 1e3 * seconds * np.exp(generator.normal(0, noise))
            place = {"kind": kind, "round": trial, "trial": trial, "sequence": len(rows)}
            rows.append(label | place | {"start_s": 0.01 * len(rows), "latency_ms": milliseconds})
        cells.append(label | {"state": "steady", "reason": "", "tf32": None})

    for work in works:
        for backend in ("torch", "torch-graph") if device == "cuda" else ("torch",):
            for batch in work.batches:
                seconds = predict(work.layers(batch), LIMITS).total_s * slow(work, backend, batch)
                for kind in ("latency", "device") if device == "cuda" else ("latency",):
                    add(work.name, work.dtype, backend, device, batch, seconds, kind)
    if device == "cuda":
        for width in MLP_WIDTHS:
            add(device_case(width), "float32", "torch-cpu", "cpu", 1, 1e-10 * width**2, "latency")
            add(device_case(width), "float32", "torch", "cuda", 1, 1e-4, "latency")
    ceilings = [
        {"name": "copy", "framework": "torch", "target": device, "bytes": int(size), "value": rate / 1e9}
        for size, rate in LIMITS.bandwidth
    ]
    ceilings += [
        {
            "name": "fma",
            "framework": "torch",
            "target": device,
            "dtype": dtype,
            "value": LIMITS.flop_rate / 1e9,
        }
        for dtype in ("float32", "float16")
    ]
    facts = {"chip": "made up", "cores": 2, "os": "none", "versions": {}, "ceilings": ceilings}
    facts |= {
        "place": {"device": device, "name": "made-up device", "memory_bytes": 16e9, "cache_bytes": 10**7}
    }
    facts |= {"works": {f"{work.name} {work.dtype}": work.describe() for work in works}}
    facts |= {"network": {"source": "output/per_trial.npz", "reason": "there is none.", "cells": []}}
    for entry in ceilings:
        entry["unit"] = "GB/s" if entry["name"] == "copy" else "GFLOP/s"
    return Record(rows_from(rows), facts | environment, {}, [], cells)


def report(record: Record) -> str:
    """The report's text, nothing drawn."""
    return text(record, Study(record), {}, "per_trial.npz")


def built(record: Record, folder: Path) -> str:
    """The report's text as written beside its plots."""
    build(record, folder, folder / "batching.md")
    return (folder / "batching.md").read_text()


def test_limits_are_recovered_from_the_floor_cases() -> None:
    limits = Study(made_up(noise=0.0)).limits("torch", "latency", "float32")
    assert limits.call_s == pytest.approx(LIMITS.call_s, rel=0.02)
    assert limits.launch_s == pytest.approx(LIMITS.launch_s, rel=0.02)
    assert limits.flop_rate == LIMITS.flop_rate


def test_ceilings_that_the_cases_exceed_are_replaced_by_what_was_reached() -> None:
    record = made_up(noise=0.0)
    for entry in record.environment["ceilings"]:
        entry["value"] /= 3
    study = Study(record)
    # The widest products run at the full rate less the call and the launches between them.
    assert study.flop_rate("float32") == pytest.approx(LIMITS.flop_rate, rel=0.05)
    assert study.limits("torch", "latency", "float32").bandwidth_at(5e8) == pytest.approx(
        LIMITS.bandwidth_at(5e8), rel=0.1
    )
    assert "went beyond the ceilings" in report(record)
    assert "went beyond the ceilings" not in report(made_up(noise=0.0))


def test_small_copies_paced_by_launches_do_not_lower_the_bandwidth() -> None:
    entries = [(2**16, 20), (2**20, 300), (2**24, 500), (2**30, 400)]
    ceilings = [
        {"name": "copy", "target": "cuda", "bytes": size, "value": rate} for size, rate in reversed(entries)
    ]
    ceilings.append({"name": "copy", "target": "cpu", "bytes": 2**20, "value": 900.0})
    ceilings.append({"name": "copy", "target": "cuda", "framework": "torch", "reason": "no memory"})
    found = bandwidths(ceilings, "cuda")
    assert [rate / 1e9 for _, rate in found] == pytest.approx([500, 500, 500, 400])
    assert [size for size, _ in found] == [2**16, 2**20, 2**24, 2**30]


def test_a_machine_that_keeps_to_the_model_is_said_to() -> None:
    said = report(made_up())
    assert "launches, arithmetic) predicts the knees of the MLPs" in said
    assert "**no**" not in said
    assert "missing term" not in said


def test_slow_weights_are_found_as_the_missing_term() -> None:
    """Reading takes three times the model's time, arithmetic the model's."""

    def slow(work: Work, backend: str, batch: int) -> float:
        model = predict(work.layers(batch), LIMITS)
        longest = max(3 * model.memory_s, model.compute_s, model.launch_s)
        return longest / model.total_s if work.family == "mlp" else 1.0

    record = made_up(slow=slow)
    wide = [curve for curve in Study(record).best("mlp") if curve.work.sizes["width"] in (1024, 2048)]
    assert len(wide) == 2
    for curve in wide:
        factors = missing(curve)
        assert factors.flat == pytest.approx(3.0, rel=0.1)
        assert factors.rise == pytest.approx(1.0, rel=0.1)
        assert curve.agreement == pytest.approx(factors.flat / factors.rise)
    said = report(record)
    assert "does not predict all of the knees" in said
    assert "is the price of a small product: in float32 one of 2 rows or more lasts as long as 1" in said


def test_a_shortest_product_is_found_and_explains_the_other_widths() -> None:
    """No product of two rows or more takes less than 10 launches; its size is read off the narrowest MLP."""

    def slow(work: Work, backend: str, batch: int) -> float:
        if work.family != "mlp" or batch == 1:
            return 1.0
        model = predict(work.layers(batch), LIMITS)
        floor = LIMITS.call_s + work.sizes["depth"] * (10 + 1) * LIMITS.launch_s  # a ReLU: one launch
        return max(model.total_s, floor) / model.total_s

    study = Study(made_up("cuda", slow=slow, noise=0.0))
    seconds, width = study.shortest["float32"]
    assert seconds == pytest.approx(10 * LIMITS.launch_s, rel=0.02)
    assert width == min(MLP_WIDTHS)
    for curve in study.best("mlp"):
        if curve.work.dtype == "float32" and curve.agreement > 1.5:
            assert curve.knee.batch / study.corrected_knee(curve).batch == pytest.approx(1.0, abs=0.15)
    assert Study(made_up("cuda")).shortest == Study(made_up("cpu")).shortest == {}


def test_slow_arithmetic_is_told_from_slow_weights() -> None:
    def slow(work: Work, backend: str, batch: int) -> float:
        bound = predict(work.layers(batch), LIMITS).bound
        return 4.0 if work.family == "mlp" and bound == "compute" else 1.0

    said = report(made_up(slow=slow))
    assert "missing term is arithmetic" in said


def test_answers_on_a_gpu() -> None:
    def slow(work: Work, backend: str, batch: int) -> float:
        return 2.0 if backend == "torch" and batch == 1 else 1.0

    said = report(made_up("cuda", slow))
    # The made-up CPU takes 1e-10 · width² seconds, the GPU 1e-4: equal at width 1000.
    assert "the GPU beats the CPU beside it from width 1024 with `torch`" in said
    assert "A CUDA graph makes batch 1 1." in said or "A CUDA graph makes batch 1 2." in said
    assert "TF32 is off" in said


def test_attention_share_follows_the_caches_bytes() -> None:
    said = report(made_up(noise=0.0))
    row = next(line for line in said.splitlines() if line.startswith("| 8,192 | 16 |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[3] == "1.07 GB"  # 2 · 16 · 8192 · 1024 · 4 bytes
    assert cells[4] == cells[5]  # measured and modelled share
    assert "attention's share does not stay small" in said


def test_the_same_record_gives_the_same_report(tmp_path: Path) -> None:
    works = [work for work in all_works("cuda", 16e9) if work.batches and work.dtype == "float32"]
    floors = [work for work in works if work.family == "floor"]
    one_of_each = {(work.family, work.sizes.get("context")): work for work in works if work not in floors}
    record = made_up("cuda", works=[*floors, *one_of_each.values()])
    save(record, tmp_path / "per_trial.npz")
    first = built(record, tmp_path)
    pictures = {path.name: path.read_bytes() for path in tmp_path.glob("*.png")}
    for name in FIGURES:
        assert f"({name}.png)" in first
        assert len(pictures[f"{name}.png"]) > 5_000
    (tmp_path / "old.png").write_bytes(b"of an earlier run")
    assert built(load(tmp_path / "per_trial.npz"), tmp_path) == first
    assert pictures == {path.name: path.read_bytes() for path in tmp_path.glob("*.png")}


def test_a_batch_that_is_dearer_than_a_larger_one_is_named() -> None:
    def slow(work: Work, backend: str, batch: int) -> float:
        return 9.0 if work.name == "MLP 8×128" and batch == 16 else 1.0

    said = report(made_up(slow=slow))
    assert "1 case has batches that take longer than a larger one; at worst MLP 8×128 (float32)" in said
    row = next(line for line in said.splitlines() if line.startswith("| MLP 8×128 | float32 | 16 | 16 |"))
    assert float(row.split(" | ")[-1].strip("|× ")) == pytest.approx(9.0, rel=0.05)
    assert "Latency does not only rise" not in report(made_up())


def curve_of(*trials: list[float]) -> Curve:
    """A curve with these trials at batches 1, 2, 4 …"""
    work = all_works("cpu", 16e9)[3]
    batches = [2**n for n in range(len(trials))]
    return Curve(work, "torch", "latency", "cpu", batches, [np.array(t) for t in trials], None)


def test_noise_does_not_end_what_is_free() -> None:
    noisy = [0.7, 0.8, 1.0, 1.1, 1.3, 1.5]
    rising = [1.15 * value for value in noisy]
    assert curve_of(noisy, rising, rising).free == 4  # 15 % more, of trials that spread by 30 %
    quiet = [1.0, 1.001, 0.999]
    assert curve_of(quiet, [1.05, 1.051], [1.15, 1.151], quiet).free == 2
    assert curve_of(quiet, [1.9, 1.901], [1.95, 1.951], [5.0, 5.1]).free_from(2) == 4
    assert curve_of(noisy, rising, noisy).dearer == []
    assert curve_of([3.0, 3.001], quiet, [1.1, 1.1]).dearer == [(1, 2, pytest.approx(3.0, rel=0.01))]


def verdicts(record: Record) -> dict[str, str]:
    """Verdict by the first words of the claim."""
    rows = [line.split(" | ") for line in claims_table(Study(record)).splitlines()[2:]]
    return {row[0].removeprefix("| ")[:20]: row[-1].strip("*| ") for row in rows}


def test_verdicts_on_the_claims_follow_the_data() -> None:
    def slow(work: Work, backend: str, batch: int) -> float:
        if work.family == "experts":
            return 1.5 if work.sizes["routing"] == "skewed" else 1.0
        if work.family == "decoder":  # as long as without attention
            return 1e-4 / predict(work.layers(batch), LIMITS).total_s
        if work.family == "resnet" and batch <= 3:
            return predict(work.layers(1), LIMITS).total_s / predict(work.layers(batch), LIMITS).total_s
        return 1.0

    plain, changed = verdicts(made_up("cuda")), verdicts(made_up("cuda", slow=slow))
    assert plain["the ridge batch, fro"] == "confirmed"
    assert plain["with a KV cache atte"] == "refuted"
    assert changed["with a KV cache atte"] == "confirmed"
    assert plain["a GPU is worth it at"] == "confirmed"  # slower up to width 512, faster from 1024 on
    assert plain["latency is flat for "] == "refuted"
    assert changed["latency is flat for "] == "confirmed"
    assert plain["skewed routing costs"] != changed["skewed routing costs"] == "confirmed"
    on_cpu = verdicts(made_up())
    assert on_cpu["latency is flat for "] == on_cpu["a GPU is worth it at"] == "not tested here"


def test_pooling_is_judged_where_memory_bounds_it() -> None:
    def slow(work: Work, backend: str, batch: int) -> float:
        return batch**-0.4 if work.kind == "pool" else 1.0

    assert "Pooling is linear in pixels" in report(made_up("cuda"))
    assert "Pooling is not linear in pixels" in report(made_up("cuda", slow=slow))


def test_the_networks_own_record_is_read() -> None:
    cells = [
        {"backend": "torch", "dtype": "float32", "case": "network", "batch_size": batch, "p50_ms": p50}
        for batch, p50 in ((1, 1.0), (16, 1.05), (64, 1.08), (512, 9.0))
    ]
    said = report(made_up(network={"source": "output/per_trial.npz", "cells": cells}))
    assert "takes 9.00 times as long as the smallest, so the claim does not hold here" in said


def test_without_ceilings_there_are_measurements_and_no_predictions() -> None:
    said = report(made_up(ceilings=[]))
    assert "No knee of the width sweep can be compared" in said
    assert "| MLP 8×1024 | float32 |" in said


def test_rounds_that_the_time_limit_left_out_are_counted() -> None:
    record = made_up()
    record.settings["limit"] = 60.0
    record.environment["limit"] = {"rounds": 80, "rounds_left_out": 20, "late_s": 0.0}
    assert "The time limit of 60 s left out 20 of 80 rounds." in report(record)


def test_a_record_of_another_study_is_refused(tmp_path: Path) -> None:
    record = made_up()
    del record.environment["works"]
    with pytest.raises(Fault, match="lacks works"):
        build(record, tmp_path, tmp_path / "batching.md")
    assert not list(tmp_path.iterdir())
