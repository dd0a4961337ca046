"""The command on tiny sizes, its report rebuilt from the stored files, and what it refuses."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from harness.cli import Fault
from harness.measure import Candidate, Case, Cell
from harness.record import load, rows_from
from harness.worker import WorkerError
from mlp import backends, claims, report, timeline, traces
from mlp.view import View

SCR = Path(__file__).parents[1] / "scr"


def command(folder: Path, *options: str) -> subprocess.CompletedProcess:
    """Run mlp_fusion.py with its output and conclusions below `folder`."""
    program = (
        "import sys; from pathlib import Path; import mlp_fusion; from harness.cli import run_command; "
        "folder = Path(sys.argv.pop(1)); mlp_fusion.OUTPUT = folder / 'output'; "
        "mlp_fusion.CONCLUSIONS = folder / 'conclusions'; run_command(mlp_fusion.main)"
    )
    return subprocess.run(
        [sys.executable, "-c", program, str(folder), "--device", "cpu", *options],
        cwd=SCR,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mlp")
    options = ("--quick", "--seconds", "20", "--rounds", "4", "--trials", "8", "--experiments", "1", "2", "6")
    done = command(folder, *options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder


def test_it_writes_record_traces_plots_and_report(ran):
    output = ran / "output" / "quick" / "mlp_fusion"
    record = load(output / "per_trial.npz")
    assert record.environment["complete"]
    ran_here = [cell for cell in record.cells if "observed" in cell]
    assert {cell["experiment"] for cell in ran_here} == {1, 2, 6}
    for cell in ran_here:
        assert (output / "traces" / cell["trace"]).is_file()
        assert cell["prediction"]["launches"] == sum(cell["prediction"]["kernels"].values())
    assert all(check["passed"] for check in record.checks) and record.checks
    pictures = {f"timeline_{number}.png" for number in ("1a", "1b", 2, 6)}
    assert {path.name for path in (output / "plots").glob("*.png")} == pictures
    text = (ran / "conclusions" / "quick" / "mlp_fusion.md").read_text()
    for expected in ("CUDA graphs need an NVIDIA GPU", "**refuted**", "three layers with ReLU"):
        assert expected in text
    for link in (f"../../output/quick/mlp_fusion/plots/{name}" for name in pictures):
        assert link in text and (ran / "conclusions" / "quick" / link).resolve().is_file()
    assert str(ran) not in text


def test_a_quick_run_writes_where_no_full_one_does(ran):
    assert [path.name for path in (ran / "output").iterdir()] == ["quick"]
    assert [path.name for path in (ran / "conclusions").iterdir()] == ["quick"]


def test_rounds_that_the_time_limit_left_out_are_counted(ran):
    record = load(ran / "output" / "quick" / "mlp_fusion" / "per_trial.npz")
    assert "limit" not in record.environment and "time limit" not in report.doubts(View(record))
    record.settings["limit"] = 60.0
    record.environment["limit"] = {"rounds": 80, "rounds_left_out": 20, "late_s": 0.0}
    assert "- The time limit of 60 s left out 20 of 80 rounds." in report.doubts(View(record))


def test_compiled_graphs_are_counted(ran):
    view = View(load(ran / "output" / "quick" / "mlp_fusion" / "per_trial.npz"))
    name = view.case_names(lambda n: n.startswith("linear"))[0]
    assert view.cell(name, "torch")["graphs"] == 0
    assert view.cell(name, "torch-compile")["graphs"] == 1
    assert view.cell(name, "torch-compile")["compile_s"] > 0.05


def test_the_report_comes_again_from_the_stored_files(ran):
    markdown = ran / "conclusions" / "quick" / "mlp_fusion.md"
    before = markdown.read_bytes()
    markdown.unlink()
    picture = ran / "output" / "quick" / "mlp_fusion" / "plots" / "timeline_1b.png"
    drawn = picture.read_bytes()
    done = command(ran, "--quick", "--rebuild")
    assert done.returncode == 0, done.stderr
    assert markdown.read_bytes() == before
    assert picture.read_bytes() == drawn


def test_verdicts_follow_the_data(ran):
    """The same record with other times and counts gives other verdicts."""
    record = load(ran / "output" / "quick" / "mlp_fusion" / "per_trial.npz")
    name = "two layers, no activation"
    rows = record.rows
    merged = (rows["case"] == name) & (rows["backend"] == "torch-merged")
    apart = (rows["case"] == name) & (rows["backend"] == "torch")
    for slower, verdict in ((0.5, "faster"), (2.0, "slower")):
        rows.loc[apart, "latency_ms"] = 10 * (1 + 0.001 * np.arange(apart.sum()) % 3)
        rows.loc[merged, "latency_ms"] = 10 * slower * (1 + 0.001 * np.arange(merged.sum()) % 3)
        assert View(record).ratio(name, "torch-merged", "torch").verdict == verdict
    assert claims.one_kernel(View(record)).verdict == "refuted"  # a CPU copies the bias first
    for cell in record.cells:
        if cell["case"].startswith("linear") and "observed" in cell:
            cell["verdict"] = "confirmed"
    assert claims.one_kernel(View(record)).verdict == "confirmed"


def test_an_unexplained_refutation_is_said_to_be_open(ran):
    record = load(ran / "output" / "quick" / "mlp_fusion" / "per_trial.npz")
    cell = next(c for c in record.cells if c["case"].startswith("matmul") and "observed" in c)
    cell["observed"]["kernels"] = {"gemm": 2, "pointwise": 1}
    cell |= {"verdict": "refuted", "difference": "1 gemm more"}
    assert "1 gemm more: **open**" in report.refuted(View(record))


def test_a_case_that_fails_alike_in_every_way_puts_the_check_in_doubt(ran):
    record = load(ran / "output" / "quick" / "mlp_fusion" / "per_trial.npz")
    for cell in record.cells:
        if cell["case"] == "q+k+v":
            cell |= {"state": "dropped", "reason": "wrong result"}
    assert "q+k+v, float32: every way, plain eager among them, differs" in report.left_out(View(record))


def test_without_device_activity_no_claim_about_kernels_is_decided(ran):
    record = load(ran / "output" / "quick" / "mlp_fusion" / "per_trial.npz")
    record.environment["device"] = "mps"
    kernels = [claim for claim in claims.all_claims(View(record)) if "no Metal kernels" in claim.observed]
    assert len(kernels) == sum(test.on_kernels for test in claims.CLAIMS) == 7
    assert {claim.verdict for claim in kernels} == {claims.MISSING}


def gpu_record(ran, *, times):
    """A record of a GPU with wall and device times (ms) by (case, way, clock), three rounds of each."""
    record = load(ran / "output" / "quick" / "mlp_fusion" / "per_trial.npz")
    record.environment["device"] = "cuda"
    label = {"study": "mlp_fusion", "target": "cuda", "batch_size": 8, "dtype": "float16"}
    rows, cells = [], {}
    for (case, way, kind), value in times.items():
        place = label | {"case": case, "backend": way}
        cells[case, way] = place | {"observed": {}, "state": "steady", "reason": ""}
        for trial in range(6):
            noise = 1 + 0.0001 * (trial % 2)
            rows.append(
                place
                | {"kind": kind, "round": trial, "trial": trial, "sequence": len(rows), "start_s": 0.0}
                | {"latency_ms": value * noise}
            )
    record.rows, record.cells = rows_from(rows), list(cells.values())
    return record


def test_a_width_without_device_times_is_judged_by_the_wall_and_not_left_out(ran):
    times = {}
    for width, device, wall in ((64, 0.3, 0.9), (4096, None, 20.0)):
        name = f"two layers {width}"
        times |= {(name, "torch-compile", "latency"): 1.0, (name, "triton", "latency"): wall}
        times |= {(name, "torch-compile", "device"): 0.9}
        times |= {(name, "triton", "device"): device} if device else {}
    claim = claims.two_layer_kernel(View(gpu_record(ran, times=times)))
    assert "of 2: 1 above and 1 below" in claim.observed
    assert "width 64: 3.00 [3.00, 3.00] ×;" in claim.observed
    assert "width 4096: 0.05" in claim.observed and "(wall)" in claim.observed
    assert claim.observed.endswith("by the wall 1.11 ×")  # of the one told by the device's clock
    assert claim.verdict == "refuted"


@pytest.mark.parametrize(("seconds", "verdict"), [(0.001, "confirmed"), (0.3, "refuted")])
def test_a_hand_written_kernel_that_compiles_again_for_a_shape_is_seen(ran, seconds, verdict):
    record = load(ran / "output" / "quick" / "mlp_fusion" / "per_trial.npz")
    counts = {"torch-compile, dynamic=False": 3, "triton": 0}
    record.environment["findings"]["shape changes"] = [
        {"policy": policy, "graphs": graphs, "rows": [1, 2, 3], "first_call_s": [0.001, seconds, 0.001]}
        for policy, graphs in counts.items()
    ]
    assert claims.compile_costs(View(record)).verdict == verdict


def test_no_explanation_covers_a_product_too_many():
    expected = {"norm": 1, "pointwise": 1, "gemm": 1}
    seen = {"device": "cpu", "graph_launches": 0, "names": {"aten::mul": 1, "aten::addmm": 1}}
    cell = {"case": "rmsnorm+relu+linear", "backend": "torch", "training": False}
    cell |= {"prediction": {"kernels": expected}}
    kernels = {"pointwise": 4, "reduction": 1, "gemm": 1}
    assert "RMSNorm" in report.explain(cell | {"observed": seen | {"kernels": kernels}})
    assert report.explain(cell | {"observed": seen | {"kernels": kernels | {"gemm": 2}}}) is None


def test_the_operators_of_the_backward_are_drawn_too():
    """They run in another thread than the step."""
    trace = traces.read(Path(__file__).parent / "data" / "mlp_gpu_training_trace.json.gz")
    axes = Figure().subplots()
    timeline.draw(axes, trace)
    operators = [bar.get_paths()[0].get_extents() for bar in axes.collections]
    starts = [box.x0 for box in operators if box.y0 > 2]
    step = trace.steps[-1]
    backward = [s for s in trace.lane("cpu") if s.start > step.start and "evaluate_function" in s.name]
    assert backward and max(starts) >= max(span.start for span in backward) - step.start


@pytest.mark.parametrize(
    ("verdicts", "one"),
    [
        (["confirmed", "confirmed"], "confirmed"),
        (["refuted", "undecided"], "refuted"),
        (["confirmed", "undecided"], "partly"),
        (["confirmed", "refuted", claims.MISSING], "partly"),
        ([claims.MISSING], claims.MISSING),
        ([], claims.MISSING),
    ],
)
def test_several_tests_give_one_verdict(verdicts, one):
    assert claims.overall(verdicts) == one


def test_a_way_that_fails_is_dropped_and_one_that_cannot_run_is_unavailable():
    backends.register("k/failed", RuntimeError("no\nmore"))
    backends.register("k/missing", Fault("needs a GPU"))
    worker = backends.Here("torch")
    for key, kind, sentence in (
        ("k/failed", WorkerError, "RuntimeError: no"),
        ("k/missing", Fault, "needs a GPU"),
    ):
        with pytest.raises(kind) as caught:
            worker.ask("open", key=key, factory="mlp.backends:registered", arguments={"key": key})
        assert str(caught.value) == sentence


def test_one_case_in_two_dtypes_has_two_references():
    cases = [Case("s", "same", (1,), np.ones, (), None, dtype) for dtype in ("float32", "float16")]
    candidate = Candidate("torch", "torch", "x:y")
    first, second = (Cell(case, candidate, 1) for case in cases)
    assert first.batch_key != second.batch_key


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--experiments", "9"], "experiments are numbered 1 to 7"),
        (["--tag", "../x"], "names a folder"),
        (["--seconds", "0"], "must be positive"),
        (["--limit", "-1"], "must not be negative"),
        (["--rebuild"], "does not exist"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(tmp_path, options, sentence):
    done = command(tmp_path, *options)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.rglob("*.npz"))
