"""The report: computed from a stored record, the same each time, right also when the news is bad."""

import itertools
import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from harness import costs, published, sections, verdicts
from harness.analysis import groups
from harness.cli import Fault
from harness.ladder import crossovers, steps
from harness.paths import ROOT
from harness.record import load, save
from harness.report import Companions, build, screen_table, text
from harness.tables import markdown_table, percent, ratio, significant
from synthetic_record import expected_ms, make_gpu_record, make_record, unavailable_cells


def report_text(record, **companions):
    """The Markdown without drawing anything."""
    return text(record, groups(record), {}, "per_trial.npz", Companions(**companions))


def section(markdown, title):
    """The body of the section whose title begins so."""
    found = re.search(rf"^## {re.escape(title)}[^\n]*\n\n(.*?)(?=^## |\Z)", markdown, re.M | re.S)
    return found.group(1) if found else ""


def joined(*records):
    """Several records as one."""
    first = records[0]
    first.rows = pd.concat([record.rows for record in records], ignore_index=True)
    for other in records[1:]:
        first.cells += other.cells
        first.checks += other.checks
    return first


@pytest.fixture(scope="module")
def record():
    return make_record()


@pytest.fixture(scope="module")
def markdown(record):
    return report_text(record)


def test_tables_by_hand():
    rows = [{"a": 1, "b": None, "empty": None}, {"a": "x|y", "b": 2.5}]
    assert markdown_table(rows) == "| a | b |\n|---|---:|\n| 1 | – |\n| x\\|y | 2.5 |"
    assert markdown_table([]) == ""


def test_numbers_by_hand():
    assert [significant(v) for v in (0.012345, 12.345, 1234.5, 0, None)] == [
        "0.0123",
        "12.3",
        "1,234",
        "0",
        None,
    ]
    assert [percent(v) for v in (0, 0.334, 5.25, 81.6)] == ["0 %", "0.33 %", "5.2 %", "82 %"]
    texts = ["0.0394", "0.66", "1.23", "12.3", "123"]
    assert [ratio(v) for v in (0.0394, 0.66, 1.2345, 12.34, 123.4)] == texts


def test_a_rebuild_gives_the_same_bytes_and_removes_stale_plots(tmp_path):
    path = tmp_path / "output" / "per_trial.npz"
    save(make_record(backends=("torch", "mlx", "mlx-fused"), batch_sizes=(1, 128)), path)
    plots_dir, result = tmp_path / "output" / "plots", tmp_path / "conclusions" / "benchmark_result.md"
    build(load(path), plots_dir, result)
    first = {p.name: p.read_bytes() for p in [result, *plots_dir.iterdir()]}
    result.unlink()
    (plots_dir / "cdf.png").unlink()
    (plots_dir / "gone.png").write_bytes(b"from an older program")
    build(load(path), plots_dir, result)
    assert {p.name: p.read_bytes() for p in [result, *plots_dir.iterdir()]} == first
    links = re.findall(r"\]\(([^)]+)\)", result.read_text())
    assert len(links) >= 9
    for link in links:
        assert not link.startswith("/") and (result.parent / link).exists(), link


def test_the_screen_gets_few_columns_with_the_same_figures(record, markdown):
    header, *lines = screen_table(record).splitlines()
    assert header.split() == ["batch", "backend", "P50", "ms", "P95", "ms", "×", "torch"]
    assert len(lines) == 4 * len(groups(record)[0].backends) and max(map(len, lines)) < 80
    row = next(line for line in section(markdown, "Results").splitlines() if "| mlx-block |" in line)
    p50, speedup = (row.split("|")[i].strip() for i in (3, 7))
    assert any(p50 in line and speedup in line for line in lines if "mlx-block" in line)


def test_needs_no_framework():
    program = (
        "import sys; sys.path.insert(0, 'scr'); import report, harness.report, harness.compare;"
        "print([name for name in ('torch', 'mlx', 'onnxruntime') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_table_holds_what_numpy_computes(record, markdown):
    rows = record.rows[record.rows["kind"] == "latency"]
    cell = rows[(rows["backend"] == "mlx-fused") & (rows["batch_size"] == 1)]["latency_ms"].to_numpy()
    line = next(
        line.split(" | ") for line in section(markdown, "Results").splitlines() if "| mlx-fused |" in line
    )
    assert line[2] == f"{np.percentile(cell, 50):.1f}"
    assert line[3] == f"{np.percentile(cell, 95):.1f}"
    assert line[4].startswith(f"{100 * cell.std(ddof=1) / cell.mean():.1f}")
    assert line[-1].strip(" |") == "1.92"  # published
    assert re.search(r"1\.5\d \[1\.\d\d, 1\.\d\d\] faster", " ".join(line))


def test_no_speedup_without_interval_and_verdict(markdown):
    table = [line.split("|") for line in section(markdown, "Results").splitlines() if line.startswith("|")]
    columns = [i for i, name in enumerate(table[0]) if name.strip().startswith("× ")]
    assert len(columns) == 3
    cells = [line[i].strip() for line in table[2:] for i in columns]
    said = re.compile(r"[\d.,]+ (\[[\d.,]+ *[\d.,]+\]|\(no interval\)) (faster|slower|equivalent|undecided)")
    assert [cell for cell in cells if not said.fullmatch(cell) and cell not in ("1", "–")] == []
    assert sum(bool(said.fullmatch(cell)) for cell in cells) > len(cells) / 2


def test_few_trials_give_dashes_and_a_noisy_cell_is_flagged():
    noisy = make_record(backends=("torch", "mlx"), batch_sizes=(1, 512), noise=0.2)
    result = section(report_text(noisy), "Results")
    slow = next(line for line in result.splitlines() if "| mlx |" in line and "few" in line)
    assert slow.split(" | ")[3] == "–"
    assert re.search(r"\*\*\d\d %\*\* ⚠", result)
    assert "scattered by more than 10 %" in section(report_text(noisy), "Warnings")


def test_machine_warnings_and_absent_backends_are_named(record):
    with_absent = make_record(backends=("torch", "mlx"), batch_sizes=(1,))
    with_absent.cells += unavailable_cells("torch-graph", "CUDA graphs need an NVIDIA GPU", (1, 16))
    with_absent.cells += unavailable_cells("mlx-block", "wrong result at batch 1: …", (1,), "dropped")
    part = unavailable_cells("mlx-fused", "wrong result at batch 64: …", (64,), "dropped")
    with_absent.cells += [cell | {"study": "ablation", "case": "+ ReLU"} for cell in part]
    result = report_text(with_absent)
    assert "`mlx-fused` (+ ReLU, batch 64) dropped: wrong" in section(result, "Not measured")
    assert "Example CPU" in result.splitlines()[0]
    assert "the load average was 1.9" in section(result, "Warnings")
    absent = section(result, "Not measured")
    assert "`torch-graph` (batch 1 and 16) unavailable: CUDA graphs need an NVIDIA GPU" in absent
    assert "`mlx-block` (batch 1) dropped: wrong result" in absent
    both = unavailable_cells("torch-compile", "no", (64, 128), "dropped")
    both += [cell | {"case": "network, TF32"} for cell in both[1:]]
    with_absent.cells += both
    absent = section(report_text(with_absent), "Not measured")
    assert "`torch-compile` (batch 64 and 128; network, TF32, batch 128) dropped: no" in absent


def test_drift_is_said():
    drifting = make_record(backends=("torch", "mlx"), batch_sizes=(1,), slowdown_after=0.5)
    result = report_text(drifting)
    assert "2 cells drifted over the run" in section(result, "Warnings")
    assert "drifting +20 %" in section(result, "Results")
    assert "2 drifted" in section(result, "What pays")


def test_an_interrupted_run_says_so(record):
    partial = make_record(backends=("torch",), batch_sizes=(1,))
    partial.environment["complete"] = False
    assert "interrupted" in report_text(partial).split("## ")[0]


def test_rounds_that_the_time_limit_left_out_are_counted():
    record = make_record(backends=("torch",), batch_sizes=(1,))
    record.settings["limit"] = 500.0
    record.environment["limit"] = {"rounds": 1200, "rounds_left_out": 300, "late_s": 0.0}
    text = report_text(record)
    assert "- The time limit of 500 s left out 300 of 1200 rounds.\n" in section(text, "Warnings")
    assert "at most 500 s in all" in text and "longer than its limit" not in text
    record.environment["limit"] = {"rounds": 1200, "rounds_left_out": 0, "late_s": 12.4}
    said = section(report_text(record), "Warnings")
    assert "The run took 12 s longer than its limit of 500 s" in said and "left out 0" not in said


def test_closing_sentences_follow_the_data():
    closing = verdicts.five_sentences(groups(make_record())[0])
    assert len(closing) == 5
    assert "`mlx-block` at batch 1" in closing[0] and "`mlx-network` at batch 16, 128 and 512" in closing[0]
    assert re.search(r"1\.5\d–1\.5\d times faster at batch 1, 16, 128 and 512", closing[1])
    assert "1.49–2.89" in closing[1]
    assert "times faster" in closing[2] and "`onnxruntime`" in closing[2]
    assert "most of which is arithmetic" in closing[3]


def test_closing_sentences_are_unfavourable_when_the_data_are():
    scale = {"mlx-fused": 2.5, "mlx-block": 400.0, "mlx-network": 400.0}
    closing = verdicts.five_sentences(groups(make_record(scale=scale))[0])
    assert closing[0].startswith("**Fastest here** is `onnxruntime` at batch 1, 16, 128 and 512")
    assert "slower (0.6" in closing[1] and "times faster at batch" not in closing[1]
    assert "slower" in closing[2]
    assert "times faster" not in closing[2]


def test_closing_sentences_admit_what_was_not_measured():
    only_torch = make_record(backends=("torch",), batch_sizes=(1,))
    for cell in only_torch.cells:
        cell["cost"] = None
    closing = verdicts.five_sentences(groups(only_torch)[0])
    assert "unknown" in closing[1] and "cannot say" in closing[2] and "no floor" in closing[3]


def test_level_backends_are_not_called_slower():
    level = make_record(backends=("torch", "mlx-network"), batch_sizes=(1,), scale={"torch": 0.241 / 2.55})
    assert "not decidedly faster than" in verdicts.fastest_sentence(groups(level)[0])


def test_the_honest_baseline_is_stated_in_every_report(markdown):
    assert "folded and compiled" in markdown
    without = report_text(make_record(backends=("torch", "mlx", "mlx-fused"), batch_sizes=(1,)))
    assert "folded and compiled" in without and "did not measure both" in without


def test_prediction_stands_beside_measurement_with_the_missing_term(record, markdown):
    body = section(markdown, "Prediction")
    line = next(line for line in body.splitlines() if line.startswith("| 512 | mlx |"))
    cells = [cell.strip() for cell in line.split("|")]
    cost = next(c["cost"] for c in record.cells if (c["backend"], c["batch_size"]) == ("mlx", 512))
    measured = groups(record)[0].p50("mlx", 512)
    assert cells[10] == f"{100 * cost['floor_ms'] / measured:.1f} %"
    assert "slow kernels: time grows with the batch, at 1.1" in line  # 15.9 MFLOP in 14 ms
    small = next(line for line in body.splitlines() if line.startswith("| 1 | torch |"))
    assert "a fixed cost per forward, 1.6" in small


def test_missing_terms_by_what_was_measured():
    one = make_record(backends=("mlx",), batch_sizes=(1,), trials=40)
    assert groups(one)[0].missing_term("mlx", 1) == "unexplained"  # a single batch size has no slope
    python = make_record(backends=("mlx",), batch_sizes=(1,), trials=40, scale={"mlx": 0.065})
    term = groups(python)[0].missing_term("mlx", 1)
    assert re.match(r"Python and graph building, 0\.(29|30)", term)
    assert groups(make_record(backends=("mlx-network",)))[0].missing_term("mlx-network", 512) is None


def test_clocks_are_listed_apart_and_missing_ones_named(markdown):
    body = section(markdown, "Clocks")
    assert "| batch | backend | latency ms | throughput ms | python ms | transfer ms |" in body
    assert "not measured here: device" in body


def test_the_lazy_trap_is_shown_for_lazy_backends_only(markdown):
    body = section(markdown, "The lazy-evaluation trap")
    assert re.search(r"\| mlx \| 512 \| 0\.30\d \| 7,\d{3} \| 2\d,\d{3}× \|", body)
    assert "`torch`, `torch-compile` and `onnxruntime` return after more than 50 % of the true time" in body
    assert "| torch |" not in body


def test_correctness_names_the_largest_error():
    checked = make_record(backends=("torch", "mlx"), batch_sizes=(1, 16))
    checked.checks[-1] |= {"relative_error": 3.4e-3, "passed": False}
    body = section(report_text(checked), "Correctness")
    assert "1 backend failed" in body
    assert re.search(r"\| network \| mlx \| float32 \| 4 \| 3\.4e-03 \| 1e-04 \| 16 \| \*\*wrong", body)


def test_ladder_steps_by_hand(record):
    group = groups(record)[0]
    found = {step.rung: step for step in steps(group, 16)}
    assert found["mlx-fused"].base == "mlx"
    assert found["mlx-block"].base == "mlx-folded"  # mlx-fused-compile was not measured
    step = found["mlx-network"]
    assert step.base == "mlx-block"
    assert step.saved_ms == pytest.approx(group.p50("mlx-block", 16) - group.p50("mlx-network", 16))
    low, high = step.saved_interval_ms
    assert low < step.saved_ms < high
    assert step.pays == "saves"
    assert sum(v for v in step.model.values() if v is not None) == pytest.approx(step.saved_ms)
    assert step.model["launches"] == pytest.approx(4 * 0.006)  # four launches in the chain fewer


def test_ladder_says_what_does_not_pay():
    worse = make_record(scale={"mlx-network": 3.0}, batch_sizes=(1, 16))
    body = section(report_text(worse), "The ladder")
    assert "Steps that cost time here: mlx-block → mlx-network at batch 1 and mlx-block" in body
    assert "**costs**" in body


def test_crossovers_are_found_from_decided_verdicts(record):
    cross = make_record(scale={"mlx-network": 1.25})  # 1.25 × (0.13 + 0.11 b) against 0.08 + 0.155 b
    group = groups(cross)[0]
    assert expected_ms("mlx-block", 1) < 1.25 * expected_ms("mlx-network", 1)
    assert crossovers(group, "mlx-block", "mlx-network") == [(1, 16, "mlx-network")]
    body = section(report_text(cross), "Which rung wins")
    assert "`mlx-network` overtakes `mlx-block` between batch 1 and 16" in body


def test_the_peers_share_of_the_arithmetic_bounds_the_gain(record, markdown):
    group = groups(record)[0]
    body = section(markdown, "How much faster is possible")
    line = next(line for line in body.splitlines() if line.startswith("| 128 |"))
    cells = [cell.strip() for cell in line.split("|")]
    share = costs.FLOPS * 128 / group.p50("onnxruntime", 128) / 1e6 / 180  # of 180 GFLOP/s
    assert cells[2:6] == ["`onnxruntime`", "180", percent(100 * share), ratio(1 / share)]
    assert cells[6] == "`mlx-network`" and cells[8].startswith("1.")
    without = make_record(backends=("torch", "mlx", "mlx-network"), batch_sizes=(1, 16))
    without.environment = without.environment | {"ceilings": []}
    assert "How much faster" not in report_text(without)
    assert "How much faster" not in report_text(make_record(backends=("mlx", "mlx-block")))


def test_runs_without_rungs_have_no_ladder():
    result = report_text(make_record(backends=("torch", "onnxruntime")))
    assert "## The ladder" not in result and "Is BatchNorm free" not in result
    assert "Layers were not timed apart" in section(result, "Time by layer type")


def test_the_architecture_gives_every_rung_s_launches_and_the_depthwise_steps_intensities(markdown):
    body = section(markdown, "What each rung moves")
    lines = {line.split(" | ")[0]: line.split(" | ") for line in body.splitlines()}
    assert lines["| mlx"][1:] == ["93", "8.30 MB", "1.82", "1.91 |"]
    assert lines["| mlx-folded-eager (not timed: folded, not compiled)"][1] == "38"
    assert lines["| mlx-six (not timed: block, stem stored)"][1:3] == ["6", "756 kB"]
    assert lines["| block 1"][1:] == ["2.20", "0.99", "2.90", "2.55", "66 % |"]
    assert "What each rung moves" not in report_text(make_record(case="mobilenet", backends=("torch",)))


def test_groups_come_in_the_order_of_the_cells_not_of_the_first_rows():
    parts = ("depthwise alone", "+ folded", "+ ReLU")
    pieces = [make_record(backends=("mlx-fused",), batch_sizes=(1,), study="ablation", case=c) for c in parts]
    mixed = joined(*pieces)
    mixed.rows = mixed.rows.iloc[::-1].reset_index(drop=True)
    assert [group.case for group in groups(mixed)] == list(parts)
    body = sections.ablation(groups(mixed))
    assert [line.split(" | ")[2] for line in body.splitlines()[4:]] == list(parts)


@pytest.mark.parametrize("backends", [("mlx-block",), ("torch-compile",), ("mlx-block", "mlx-network")])
def test_any_choice_of_backends_has_a_report(backends, tmp_path):
    chosen = make_record(backends=backends, batch_sizes=(16,), trials=40)
    build(chosen, tmp_path / "output" / "plots", tmp_path / "result.md")
    body = section((tmp_path / "result.md").read_text(), "Results")
    assert all(f"| {name} |" in body for name in backends) and f"× {backends[0]}" in body
    assert ("speedup.png" in body) == (len(backends) > 1)


def test_scaling_is_relative_to_the_smallest_batch_that_ran():
    large = groups(make_record(backends=("torch",), batch_sizes=(16, 128), noise=0.0))[0]
    expected = 100 * expected_ms("torch", 16) / expected_ms("torch", 128)
    assert large.scaling_percent("torch", 128) == pytest.approx(expected, rel=0.01)
    assert "P50 at the backend's smallest batch ÷ P50" in sections.results_note(large)


def test_a_backend_that_failed_in_several_cases_is_one_backend():
    main = make_record(backends=("torch", "mlx"), batch_sizes=(1,))
    other = make_record(backends=("mlx",), batch_sizes=(1,), study="shapes", case="7×7×1024")
    for check in (*main.checks[2:], *other.checks):
        check |= {"passed": False, "relative_error": 0.1}
    assert "1 backend failed." in sections.correctness(joined(main, other))


def test_layer_times_and_ablation_are_used_when_present():
    parts = [
        make_record(backends=("mlx",), batch_sizes=(16,), study="layers", case=kind, scale={"mlx": factor})
        for kind, factor in (("depthwise", 0.1), ("pointwise", 0.3))
    ]
    pieces = [
        make_record(backends=("mlx",), batch_sizes=(16,), study="ablation", case=case, scale={"mlx": factor})
        for case, factor in (("depthwise alone", 1.0), ("+ ReLU", 1.3))
    ]
    main = make_record(backends=("mlx", "mlx-folded"), batch_sizes=(16,))
    result = report_text(joined(main, *parts, *pieces))
    body = section(result, "Time by layer type")
    assert "depthwise takes 25 % of the time; the largest part is pointwise" in body
    assert re.search(r"\| mlx \| 16 \| depthwise \| 22\.\d \| 25 % \| 4\.8 % \|", body)
    body = section(result, "Is BatchNorm free")
    slower = r"0\.7\d \[0\.\d+, 0\.\d+\] slower"
    assert re.search(rf"\+ ReLU \| \d+ \| {slower} \| {slower} \|", body)


def test_parts_that_share_rounds_are_compared_round_by_round():
    pieces = [
        make_record(backends=("mlx",), batch_sizes=(16,), study="ablation", case=case, scale={"mlx": factor})
        for case, factor in (("depthwise alone", 1.0), ("+ ReLU", 1.1))
    ]
    for piece in pieces:  # a course that both have in common, of ±30 %
        piece.rows["latency_ms"] *= np.exp(0.3 * np.sin(piece.rows["round"]))
    record = joined(*pieces)

    def width():
        row = next(line for line in sections.ablation(groups(record)).splitlines() if "+ ReLU |" in line)
        low, high = map(float, re.search(r"\[(0\.\d+), (\d\.\d+)\]", row).groups())
        return high / low

    apart = width()
    for cell in record.cells:
        cell["shares_rounds"] = "parts"
    assert width() < 1.15 < 1.3 < apart


def test_other_cases_and_half_precision_have_sections():
    main = make_record(backends=("torch", "mlx-block"), batch_sizes=(1, 16))
    half = make_record(
        backends=("mlx-block",), batch_sizes=(1, 16), dtype="float16", scale={"mlx-block": 0.8}
    )
    block = make_record(
        backends=("torch", "mlx-block"), batch_sizes=(1,), study="shapes", case="14×14×512 s1"
    )
    tf32 = make_record(backends=("torch",), batch_sizes=(1,), case="network, TF32", scale={"torch": 0.5})
    result = report_text(joined(main, half, block, tf32))
    line = next(line for line in section(result, "Other precisions").splitlines() if "TF32" in line)
    assert re.search(r"2\.0\d \[.*\] faster \| `mlx-block`, × this: 5\.\d\d \[.*\] faster", line)
    assert re.search(r"1\.2\d \[1\.\d\d, 1\.\d\d\] faster", section(result, "Other precisions"))
    assert "### 14×14×512 s1, float32" in section(result, "Other cases")
    assert "## Results, float16" in result


def test_prediction_for_apple_chips_is_labelled_and_agrees_with_the_published_machine(markdown):
    body = section(markdown, "Apple's chips")
    assert body.startswith("**A prediction, not a measurement**")
    assert "| **Apple M1, 8 GB, published** | **2.86** |" in body
    for rung in ("mlx", "mlx-fused"):
        assert sections.predict_apple("M1", rung, 1) == pytest.approx(published.P50_MS[rung][1], rel=0.1)
    # 5 launches at 30 µs, 0.455 + 0.415 MB at 68 GB/s
    assert sections.predict_apple("M1", "mlx-block", 1) == pytest.approx(0.15 + 0.0128, rel=0.05)


def test_published_figures_are_the_articles():
    assert published.speedups("mlx-fused", "mlx")[64] == pytest.approx(2.889, abs=1e-3)
    assert published.speedups("mlx-fused", "torch")[1] == pytest.approx(1.537, abs=1e-3)
    assert published.speedups("mlx-block", "torch") == {}
    assert published.LAUNCH_MS == pytest.approx(0.0301, abs=1e-4)


def test_rates_of_false_verdicts_are_quoted(record):
    pair = {"backends": ("torch", "torch-again"), "batch_sizes": (1, 16)}
    quiet = make_record(**pair, seed=3)
    body = sections.reliability(record, quiet)
    assert "97.6 % on average" in body and "in 0 of 2 comparisons (0 %)" in body
    loud = make_record(**pair, seed=3, scale={"torch-again": 1.2})
    assert "in 2 of 2 comparisons (100 %)" in sections.reliability(record, loud)
    assert "`make aa`" in sections.reliability(record)
    assert "in 0 of 2 comparisons (0 %)" in sections.reliability(quiet), "such a run quotes itself"


def test_energy_that_idle_power_hides_is_marked():
    record = make_gpu_record(batch_sizes=(1,))
    steady = record.rows[record.rows["kind"] == "latency"].copy()
    steady["kind"] = "throughput"
    record.rows = pd.concat([record.rows, steady], ignore_index=True)
    for cell, watts in zip(record.cells, itertools.cycle((4.9, 5.1)), strict=False):
        here = (steady["backend"] == cell["backend"]) & (steady["batch_size"] == cell["batch_size"])
        ms = steady[here]["latency_ms"].median()
        cell |= {"idle_watts": 100.0, "joules_per_image": watts * ms / 1e3}
    body = section(report_text(record), "Results").split("\n\n")
    lines = next(part for part in body if part.startswith("| batch")).splitlines()[2:]
    marks = ["≈" in line for line in lines]
    assert len(marks) == len(record.cells) and marks == [i % 2 == 0 for i in range(len(marks))]
    assert "less than 5 % of the idle power" in body[0]


def test_a_gpus_report_is_named_after_it_and_has_its_clock_and_energy():
    result = report_text(make_gpu_record(batch_sizes=(1, 128)))
    assert result.startswith("# Benchmark result: Example GPU\n")
    assert "**Example GPU, in a machine with Example CPU**" in result
    assert "## What pays on this machine (Example GPU)" in result
    assert "80 GiB, driver 1.2" in section(result, "The machine")
    header, _, line = section(result, "Results").split("\n\n")[1].splitlines()[:3]
    assert "| mJ/image |" in header and "| 2.10 |" in line
    clocks = section(result, "Clocks")
    assert "Device time, × torch-graph:" in clocks and "| device ms |" in clocks
    assert re.search(
        r"32 KB of threadgroup memory cost here.*\n\n\| batch.*\n.*\n(.*\n)\| 128 .*0\.8\d", clocks
    )
    prediction = section(result, "Prediction")
    assert re.search(
        r"\| 1 \| mlx-block \|.*launching and waiting: 0\.0\d+ ms beyond device time", prediction
    )
    assert re.search(r"\| 128 \| mlx \| [\d.]+ \| 93 ✓ .*device time alone is 1\.2", prediction)


def test_companions_are_found_where_tagged_runs_lie(tmp_path):
    for name in ("aa", "second"):
        save(make_record(backends=("torch",), batch_sizes=(1,)), tmp_path / "output" / name / "per_trial.npz")
    save(
        make_record(backends=("torch",), batch_sizes=(1,)),
        tmp_path / "output" / "m1-paused" / "per_trial.npz",
    )
    here = make_record(backends=("torch",), batch_sizes=(1,))
    found = Companions.find(tmp_path / "output", here)
    assert found.aa and found.second and not found.paused
    tagged = Companions.find(tmp_path / "output" / "m1", here)
    assert tagged.paused and tagged.aa, "what a tag has not of its own is the default run's"
    second = Companions.find(tmp_path / "output" / "second", here)
    assert second.aa and not second.second, "no run is its own second one"
    here.environment["chip"] = "another"
    assert Companions.find(tmp_path / "output", here) == Companions(), "runs of another machine do not count"


def test_a_second_run_is_held_against_the_first():
    pair = {"backends": ("torch", "mlx"), "batch_sizes": (1, 16)}
    body = section(report_text(make_record(**pair), second=make_record(**pair, seed=4)), "How far")
    assert "A second run of 2 pairs of backends on Example CPU contradicts 0 verdicts" in body
    other = make_record(**pair, seed=4, scale={"mlx": 0.01})
    body = section(report_text(make_record(**pair), second=other), "How far")
    assert "contradicts 2 verdicts" in body and "- network, float32, batch 1: mlx against torch" in body


def test_a_paused_run_is_held_against_a_continuous_one(markdown):
    pair = {"backends": ("torch", "mlx"), "batch_sizes": (1, 16)}
    paused = make_record(**pair, seed=8, pause=2.0)
    body = section(report_text(make_record(**pair), paused=paused), "Pauses against heat")
    assert "pause of 2 s" in body
    assert "## Pauses" not in markdown


def test_a_record_without_what_is_required_is_refused(record):
    broken = make_record(backends=("torch",), batch_sizes=(1,))
    del broken.environment["chip"]
    with pytest.raises(Fault, match="environment lacks chip"):
        build(broken, ROOT / "nowhere", ROOT / "nowhere.md")
    empty = make_record(backends=("torch",), batch_sizes=(1,))
    empty.rows = empty.rows[empty.rows["kind"] == "cold"]
    with pytest.raises(Fault, match="no latency"):
        build(empty, ROOT / "nowhere", ROOT / "nowhere.md")


def test_optional_facts_may_be_absent():
    bare = make_record(backends=("torch", "mlx"), batch_sizes=(1,), kinds=())
    bare.environment = {"chip": "C", "os": "O", "versions": {}}
    bare.settings, bare.checks = {}, []
    for cell in bare.cells:
        for name in ("cost", "peak_memory_mb", "left_out", "build_s", "drift_percent"):
            del cell[name]
    result = report_text(bare)
    assert "No output was checked" in result and "no ceilings were measured" in result


def with_direct(**changes):
    """A GPU's record with MLX's rungs also launched without graphs (0.8 of the time) and awake (0.6)."""
    record = make_gpu_record(batch_sizes=(1, 128))
    for case, factor in (("network, direct", 0.8), ("network, direct, awake", 0.6)):
        more = make_gpu_record(batch_sizes=(1, 128))
        rows = more.rows[more.rows["backend"].isin(["mlx-block", "mlx-network"])].copy()
        rows.loc[rows["kind"] == "latency", "latency_ms"] *= factor
        rows["case"] = case
        record.rows = pd.concat([record.rows, rows], ignore_index=True)
        kept = [cell for cell in more.cells if cell["backend"] in ("mlx-block", "mlx-network")]
        record.cells += [cell | {"case": case} | changes for cell in kept]
    return record


def test_ways_of_launching_are_compared_with_the_one_before():
    result = report_text(with_direct())
    body = section(result, "How MLX launches and waits")
    line = next(line for line in body.splitlines() if line.startswith("| 128 | float32 | mlx-network"))
    assert re.search(r"1\.2\d \[[^]]+\] faster .* 1\.3\d \[[^]]+\] faster", line)
    assert re.search(r"Shortest with either: .* at batch 1 \(`mlx-block` awake", body)
    assert "direct" not in section(result, "Other precisions") if "## Other precisions" in result else True
    assert "network, direct" not in section(result, "Other cases") if "## Other cases" in result else True
    assert "How MLX launches and waits" not in report_text(make_gpu_record(batch_sizes=(1,)))


def test_what_waiting_awake_leaves_beyond_the_devices_time_is_shown():
    record = with_direct()
    block = (record.rows["backend"] == "mlx-block") & (record.rows["batch_size"] == 128)
    block &= record.rows["case"].str.startswith("network") & (record.rows["dtype"] == "float32")
    record.rows.loc[block & (record.rows["kind"] == "device"), "latency_ms"] = 0.04
    awake = block & (record.rows["case"] == "network, direct, awake") & (record.rows["kind"] == "latency")
    record.rows.loc[awake, "latency_ms"] = 0.1
    usual = block & (record.rows["case"] == "network") & (record.rows["kind"] == "device")
    record.rows = record.rows[~usual]  # MLX as it is could not be traced
    body = section(report_text(record), "How MLX launches and waits")
    line = next(line for line in body.splitlines() if line.startswith("| 128 | float32 | mlx-block"))
    assert line.split("|")[4].strip() == "0.0400" and line.split("|")[-2].strip() == "0.0600"
    assert "(`mlx-block` awake, 0.0600 ms beyond the device's)" in body


def test_a_process_that_failed_while_it_was_traced_is_a_warning():
    record = make_gpu_record(batch_sizes=(1,))
    record.environment["workers"] = {
        "mlx": {"trace_failed": "RuntimeError: misaligned address", "retraces": 2}
    }
    assert (
        "While it was traced, the process `mlx` failed (RuntimeError: misaligned address); its cells were "
        "traced anew in 2 other processes." in section(report_text(record), "Warnings")
    )


def test_cells_that_could_not_be_traced_are_a_warning():
    record = make_gpu_record(batch_sizes=(1,))
    assert "could not be traced" not in report_text(record)
    for cell in record.cells[:2]:
        cell["left_out"] = {"device": "RuntimeError: misaligned address"}
    names = " and ".join(f"`{cell['backend']}`" for cell in record.cells[:2])
    assert (
        f"2 cells of {names} could not be traced on the GPU and have no device time; the first: "
        "RuntimeError: misaligned address." in section(report_text(record), "Warnings")
    )


def test_device_times_from_the_gpus_trace_are_said_to_be():
    record = make_gpu_record(batch_sizes=(1,))
    assert "slope between chains" in section(report_text(record), "Clocks")
    for cell in record.cells:
        cell |= {"device_clock": "GPU trace", "kernels_traced": 3}
    result = report_text(record)
    assert "the GPU's own, from its trace" in section(result, "Clocks")
    assert "slope between chains" not in section(result, "Clocks")
    assert re.search(r"kernels in the GPU's trace \|\n.*\n\|.* 3 \|", section(result, "Launches"))
