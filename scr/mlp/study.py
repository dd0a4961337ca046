"""The seven experiments: what is run, what is predicted before it runs, and what is found out besides timing.

`run(settings, folder)` predicts and profiles every way of running every case, leaves a trace of each in
`folder`, then times all of them against each other with the harness. What is not a time (compiled graphs,
errors of merges, recompilations) goes into the cells, or into the environment's "findings".
"""

import gc
import importlib.metadata
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from harness import ceilings, machine, tolerances
from harness.backends import torch_device
from harness.cli import Fault
from harness.measure import Case, run_study
from harness.present import present
from harness.record import Record
from harness.worker import RAMP_S
from mlp import models, predictions, profiling
from mlp.backends import FunctionBackend, Here, compiled, graphs_compiled, one_line, register, wait
from mlp.merge import merge_linears
from mlp.predictions import ITEM_BYTES, Prediction
from mlp.settings import Settings

STUDY = "mlp_fusion"

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class Sizes:
    """What is run on a kind of device. Rows are batch × sequence."""

    matmul: tuple[int, ...] = (64, 4096)
    linear: tuple[int, int, int] = (1024, 32, 64)  # rows, inputs, outputs
    mlp: tuple[int, int, int] = (128, 1024, 3)  # rows, width, layers
    mlp_dtypes: tuple[str, ...] = ("float32", "float16")
    geglu_rows: int = 8192
    geglu_widths: tuple[int, ...] = (768, 1024, 4096)  # hidden is four times as wide
    geglu_dtype: str = "bfloat16"
    two_layer_rows: int = 128
    two_layer_widths: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096)
    two_layer_dtype: str = "float16"
    merge: tuple[int, int] = (1024, 1024)  # rows, width
    norm: tuple[int, int] = (8192, 1024)  # rows, width
    shape_rows: tuple[int, ...] = (256, 384, 512, 640, 768)
    shape_width: int = 768


GPU = Sizes()
CPU = Sizes(
    mlp_dtypes=("float32",),
    geglu_rows=256,
    geglu_widths=(768, 1024, 2048),
    geglu_dtype="float32",
    two_layer_widths=(64, 256, 1024, 4096),
    two_layer_dtype="float32",
    merge=(128, 1024),
    norm=(1024, 1024),
    shape_rows=(32, 48, 64, 80),
    shape_width=256,
)
QUICK: dict[str, Any] = {
    "matmul": (64, 512),
    "mlp": (16, 64, 3),
    "geglu_rows": 64,
    "geglu_widths": (64,),
    "two_layer_widths": (64,),
    "merge": (16, 64),
    "norm": (64, 64),
    "shape_rows": (16, 24, 32),
    "shape_width": 64,
}
# What a device cannot be asked for, and why; printed in the report.
LEFT_OUT = {
    "cpu": (
        "float16 (a CPU without half-precision arithmetic converts every operand: not the claim's setting)",
        "CUDA graphs, reduce-overhead, Triton and Liger (they need an NVIDIA GPU)",
        "GeGLU at 8192 rows and at width 4096 (minutes per forward pass in a five-minute run)",
    ),
    "mps": (
        "kernel counts and idle share (torch.profiler records no Metal activity, only operators)",
        "CUDA graphs, reduce-overhead, Triton and Liger (they need an NVIDIA GPU)",
    ),
    "cuda": (),
}


@dataclass(frozen=True)
class Way:
    """One way of running a case."""

    name: str
    function: Callable[[], Callable[[Tensor], Tensor]] | nn.Module  # a maker may raise Fault: unavailable
    prediction: Prediction | None = None
    compile: dict[str, Any] | None = None  # torch.compile's options; None: not compiled
    graph: bool = False


class Run:
    """A run in progress: the cases so far and what was found out."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings, self.folder = settings, folder
        self.begin = time.perf_counter()
        self.device = torch_device(settings.device)
        sizes = CPU if self.device == "cpu" else GPU
        self.sizes = replace(sizes, **QUICK) if settings.quick else sizes
        self.cases: list[Case] = []
        self.findings: dict[str, Any] = {}
        self.limits: list[dict[str, Any]] = []

    def say(self, text: str) -> None:
        """Print progress with the time since the start."""
        print(f"[{time.perf_counter() - self.begin:4.0f} s] {text}", flush=True)

    def rates(self, dtype: str) -> tuple[float, float]:
        """Measured operations per second of a dtype (bfloat16 as float16) and bytes per second."""
        kind = "float32" if dtype == "float32" else "float16"
        # The best sample: a disturbed one would put the floor above what the machine can do.
        rate = max(entry["best"] for entry in self.limits if entry.get("dtype") == kind)
        # The largest set fits no cache; a smaller one gives a bandwidth that large cases never see.
        copies = [entry for entry in self.limits if entry["name"] == "copy" and "value" in entry]
        return 1e9 * rate, 1e9 * max(copies, key=lambda entry: entry["bytes"])["value"]

    def place(self, module: Module, dtype: str, training: bool = False) -> Module:
        """The module on the device, in `dtype`."""
        return module.to(self.device, getattr(torch, dtype)).train(training)

    def case(
        self,
        experiment: int,
        name: str,
        module: nn.Module,
        shape: tuple[int, int],
        dtype: str,
        ways: Sequence[Way],
        training: bool = False,
        checked: bool = True,
    ) -> None:
        """Predict and profile every way of running `module` on rows of `shape`, and keep it for timing."""
        candidates = []
        for way in ways:
            key = f"{name}/{dtype}/{way.name}"
            notes: dict[str, Any] = {"experiment": experiment, "columns": shape[1], "training": training}
            if way.prediction:
                expected = way.prediction
                if self.device == "cpu" and experiment != 2:  # experiment 2 predicts what is published
                    expected = predictions.with_bias_copies(expected, shape[0], ITEM_BYTES[dtype])
                notes["prediction"] = expected.describe()
                notes["prediction"]["floor_ms"] = expected.floor_ms(*self.rates(dtype))
            try:
                backend = self.build(way, module, dtype, training)
                backend.notes = notes
                self.profile(backend, key, self.rows(shape))
            except Fault as fault:
                candidates.append(register(key, fault))
                self.say(f"{experiment} {name} {dtype}, {way.name}: unavailable, {fault}")
                continue
            except Exception as error:  # a compiler may raise anything; the other ways still run
                candidates.append(register(key, error))
                self.say(f"{experiment} {name} {dtype}, {way.name}: failed, {one_line(error)}")
                continue
            candidates.append(register(key, backend))
            verdict = notes.get("verdict", "no prediction")
            self.say(f"{experiment} {name} {dtype}, {way.name}: {_counts(notes['observed'])}: {verdict}")
        gradient = _checks_gradient(training, dtype)
        where = "cpu" if self.device == "mps" else self.device  # MPS has no float64
        twin = models.twin(module).to(where)
        reference = FunctionBackend(twin, twin, where, torch.float64, training, gradient=gradient)
        self.cases.append(
            Case(
                study=STUDY,
                name=name,
                batch_sizes=(shape[0],),
                inputs=lambda rows: self.rows((rows, shape[1])),
                candidates=tuple(candidates),
                reference=register(f"{name}/{dtype}/reference", reference) if checked else None,
                dtype=dtype,
            )
        )

    def rows(self, shape: tuple[int, int]) -> np.ndarray:
        """The input of a case: standard normal, the same for every way. shape: (rows, columns), float32."""
        return np.random.default_rng(self.settings.seed).standard_normal(shape, dtype=np.float32)

    def build(self, way: Way, module: nn.Module, dtype: str, training: bool) -> FunctionBackend:
        """The backend of a way. Raises Fault where it cannot run here."""
        if way.compile and way.compile.get("mode") == "reduce-overhead" and self.device != "cuda":
            raise Fault("reduce-overhead is CUDA graphs, which need an NVIDIA GPU")
        function = way.function if isinstance(way.function, nn.Module) else way.function()
        if way.compile is not None:
            function = compiled(function, **way.compile)
        kind, gradient = getattr(torch, dtype), _checks_gradient(training, dtype)
        return FunctionBackend(function, module, self.device, kind, training, way.graph, gradient)

    def profile(self, backend: FunctionBackend, key: str, batch: np.ndarray) -> None:
        """Call the backend cold, then warm, profile it, and note what was seen beside what was predicted."""
        notes = backend.notes
        before = graphs_compiled()
        # Data first, so that a cold call is the call alone; a graph's capture cannot be told apart.
        backend.prepare(batch)
        cold = []
        for _ in range(4):
            start = time.perf_counter()
            backend.run()
            backend.synchronize()
            cold.append(1e3 * (time.perf_counter() - start))
        notes |= {"first_ms": cold[0], "second_ms": cold[1], "graphs": graphs_compiled() - before}
        if notes["graphs"]:
            notes["compile_s"] = (cold[0] - cold[-1]) / 1e3
        trace = re.sub(r"[^A-Za-z0-9.-]+", "_", key.replace("×", "x").replace("→", "-"))
        summary = profiling.profile_backend(backend, self.folder / f"{trace}.json.gz")
        notes |= {"trace": f"{trace}.json.gz", "observed": asdict(summary)}
        if "prediction" in notes and self.device != "mps":
            notes["verdict"], notes["difference"] = predictions.compare(notes["prediction"], summary.kernels)


def _checks_gradient(training: bool, dtype: str) -> bool:
    """Whether a training step is checked by its gradient, else by its output.

    In half precision rounding moves some pre-activations across zero. Each takes its whole contribution to a
    gradient along, so that entries differ by a tenth of the largest without a mistake anywhere.
    """
    return training and dtype == "float32"


def _counts(observed: dict[str, Any]) -> str:
    """Kernels by kind in words."""
    return ", ".join(f"{count:g} {kind}" for kind, count in observed["kernels"].items()) or "no kernels"


# Experiments


def matmul_add(run: Run) -> None:
    """1: overhead-bound against compute-bound."""
    for n in run.sizes.matmul:
        module = run.place(models.MatmulAdd(n), "float32")
        prediction = predictions.matmul_add(n, 4)
        ways = [Way("torch", module, prediction), Way("torch-graph", module, prediction, graph=True)]
        run.case(1, f"matmul+add {n}", module, (n, n), "float32", ways)


def linear(run: Run) -> None:
    """2: what nn.Linear launches."""
    rows, inputs, outputs = run.sizes.linear
    module = run.place(nn.Linear(inputs, outputs), "float32")
    prediction = predictions.linear(rows, inputs, outputs, 4)
    ways = [Way("torch", module, prediction), Way("torch-compile", module, prediction, {})]
    run.case(2, f"linear {inputs}→{outputs}", module, (rows, inputs), "float32", ways)


def naive_mlp(run: Run) -> None:
    """3: a ReLU MLP forward, and a training step; launch gaps; CUDA graphs."""
    rows, width, layers = run.sizes.mlp
    for dtype in run.sizes.mlp_dtypes:
        item = ITEM_BYTES[dtype]
        module = run.place(models.relu_mlp(width, layers), dtype)
        eager = predictions.mlp_forward(rows, width, layers, item, compiled=False)
        fused = predictions.mlp_forward(rows, width, layers, item, compiled=True)
        name = f"mlp {layers}×{width}"
        ways = [
            Way("torch", module, eager),
            Way("torch-compile", module, fused, {}),
            Way("torch-compile-overhead", module, fused, {"mode": "reduce-overhead"}),
            Way("torch-graph", module, eager, graph=True),
        ]
        run.case(3, name, module, (rows, width), dtype, ways)
        module = run.place(models.relu_mlp(width, layers), dtype, training=True)
        ways = []
        for backend, options in (("torch", None), ("torch-compile", {})):
            passes = [
                part(rows, width, layers, item, compiled=options is not None)
                for part in (predictions.mlp_forward, predictions.mlp_backward)
            ]
            both = Prediction(passes[0].kernels + passes[1].kernels, "; ".join(part.why for part in passes))
            ways.append(Way(backend, module, both, options))
        run.case(3, f"{name} training step", module, (rows, width), dtype, ways, training=True)


def triton_kernels(run: Run) -> Any:
    """The module of our Triton kernels. Raises Fault where they cannot run."""
    if run.device != "cuda":
        raise Fault("our Triton kernels need an NVIDIA GPU; elsewhere they only run interpreted, for checks")
    try:
        from mlp import triton_kernels as kernels
    except ImportError as error:
        raise Fault("triton is not installed") from error
    return kernels


def liger_product(run: Run) -> Callable[[Tensor, Tensor], Tensor]:
    """Liger's fused GeGLU product. Raises Fault where it is missing."""
    if run.device != "cuda":
        raise Fault("Liger's kernels need an NVIDIA GPU")
    try:
        from liger_kernel.ops.geglu import LigerGELUMulFunction
    except ImportError as error:
        raise Fault("liger-kernel is not installed (pip install liger-kernel)") from error
    return LigerGELUMulFunction.apply


def with_product(
    source: models.Geglu, make: Callable[[], Any], merged: bool = False
) -> Callable[[], nn.Module]:
    """A maker of `source` (or its merged form) with another product of gate and up, on the same weights."""

    def build() -> nn.Module:
        product = make()
        if merged:
            return models.MergedGeglu(source, product)
        other = models.Geglu(1, 1, product)
        other.gate, other.up, other.down = source.gate, source.up, source.down
        return other

    return build


class Product(nn.Module):
    """gelu(gate) · up alone, on the first and second half of x's memory, each contiguous as in the MLP."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor] = models.geglu_product) -> None:
        super().__init__()
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 2·hidden) → (rows, hidden)."""
        gate, up = x.view(2, len(x), -1).unbind(0)  # each (rows, hidden)
        return self.product(gate, up)


def geglu(run: Run) -> None:
    """4: the GeGLU MLP at the published shape and at other widths; its point-wise kernel; its products."""
    rows, dtype = run.sizes.geglu_rows, run.sizes.geglu_dtype
    item = ITEM_BYTES[dtype]
    for place, width in enumerate(run.sizes.geglu_widths):
        hidden = 4 * width
        module = run.place(models.Geglu(width, hidden), dtype)
        merged = models.MergedGeglu(module).eval()

        def ours() -> Callable[[Tensor, Tensor], Tensor]:
            return triton_kernels(run).geglu

        expected = {
            form: predictions.geglu(rows, width, hidden, item, form) for form in predictions.GEGLU_FORMS
        }
        ways = [
            Way("torch", module, expected["eager"]),
            Way("torch-compile", module, expected["fused"], {}),
            Way("torch-merged", merged, expected["merged"]),
            Way("torch-merged-compile", merged, expected["merged fused"], {}),
            Way("triton", with_product(module, ours), expected["fused"]),
            Way("triton-merged", with_product(module, ours, merged=True), expected["merged fused"]),
            Way("liger", with_product(module, lambda: liger_product(run)), expected["fused"]),
        ]
        run.case(4, f"geglu {width}→{hidden}→{width}", module, (rows, width), dtype, ways)
        if place == 0:
            pointwise_product(run, rows, hidden, dtype)
            equal_products(run, rows, width, hidden, dtype)
    shape_changes(run)


def pointwise_product(run: Run, rows: int, hidden: int, dtype: str) -> None:
    """The point-wise part alone, where kernels differ; and its launch parameters, fixed against tuned."""
    item = ITEM_BYTES[dtype]
    whole = predictions.geglu(rows, 1, hidden, item, "eager")
    eager = Prediction(whole.kernels[3:], "GELU and multiplication")
    whole = predictions.geglu(rows, 1, hidden, item, "fused")
    fused = Prediction(whole.kernels[3:], "one kernel: two reads and one write per element")
    module = run.place(Product(), dtype)
    ways = [
        Way("torch", module, eager),
        Way("torch-compile", module, fused, {}),
        Way("triton", lambda: Product(triton_kernels(run).geglu), fused),
        Way("liger", lambda: Product(lambda g, u: liger_product(run)(g, u)), fused),
    ]
    run.case(4, f"geglu product {hidden}", module, (rows, 2 * hidden), dtype, ways)
    if run.device == "cuda":
        run.findings["launch parameters"] = launch_parameters(run, rows, hidden, dtype)


def launch_parameters(run: Run, rows: int, hidden: int, dtype: str) -> list[dict[str, Any]]:
    """Device time of our GeGLU kernel over block sizes and warps, µs, for this shape and a small one."""
    kernels = triton_kernels(run)
    found = []
    for count in (rows, 256):
        batch = run.rows((count, 2 * hidden))
        for block in (512, 1024, 2048, 4096):
            for warps in (2, 4, 8):
                product = Product(partial(kernels.geglu, block=block, warps=warps))
                backend = FunctionBackend(product, None, run.device, getattr(torch, dtype))
                backend.prepare(batch)
                times = sorted(present(backend.device_ms()) for _ in range(5))
                fixed = (block, warps) == (kernels.GEGLU_BLOCK, kernels.GEGLU_WARPS)
                found.append(
                    {"rows": count, "block": block, "warps": warps, "us": 1e3 * times[2], "fixed": fixed}
                )
    return found


class DownOnly(nn.Module):
    """The down projection on rows of its own: the argument only sets their number and is not read."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) → (rows, width), from hidden rows drawn once."""
        if self.hidden is None or len(self.hidden) != len(x):
            self.hidden = torch.randn(len(x), self.layer.in_features, device=x.device, dtype=x.dtype)
        return self.layer(self.hidden)


def equal_products(run: Run, rows: int, width: int, hidden: int, dtype: str) -> None:
    """Up and down projection alone: equal operations, other shapes."""
    item = ITEM_BYTES[dtype]
    up = run.place(nn.Linear(width, hidden, bias=False), dtype)
    down = DownOnly(run.place(nn.Linear(hidden, width, bias=False), dtype))
    one = "one product"
    ways = [
        Way("up", up, Prediction((predictions.gemm(rows, width, hidden, item),), one)),
        Way("down", down, Prediction((predictions.gemm(rows, hidden, width, item),), one)),
    ]
    # Not checked: the two have different outputs, and both products are checked inside the MLP.
    run.case(4, f"projections {width}↔{hidden}", up, (rows, width), dtype, ways, checked=False)


def shape_changes(run: Run) -> None:
    """Graphs compiled and seconds spent when the rows change, by policy."""
    width, dtype = run.sizes.shape_width, run.sizes.geglu_dtype
    module = run.place(models.Geglu(width, 4 * width), dtype)

    def policies() -> dict[str, Callable[[], Callable[[Tensor], Tensor]]]:
        return {
            "torch": lambda: module,
            "torch-compile, default": lambda: compiled(module),
            "torch-compile, dynamic=False": lambda: compiled(module, dynamic=False),
            "torch-compile, mark_dynamic": lambda: compiled(module),
            "triton": with_product(module, lambda: triton_kernels(run).geglu),
            "liger": with_product(module, lambda: liger_product(run)),
        }

    found: list[dict[str, Any]] = []
    for name, make in policies().items():
        try:
            function = make()
        except Fault as fault:
            found.append({"policy": name, "reason": str(fault)})
            continue
        before, times = graphs_compiled(), []
        for count in run.sizes.shape_rows:
            x = torch.from_numpy(run.rows((count, width))).to(run.device, getattr(torch, dtype))
            if "mark_dynamic" in name:
                torch._dynamo.mark_dynamic(x, 0)
            start = time.perf_counter()
            with torch.no_grad():
                function(x)
            wait(run.device)
            times.append(time.perf_counter() - start)
        entry = {"policy": name, "rows": list(run.sizes.shape_rows), "graphs": graphs_compiled() - before}
        found.append(entry | {"first_call_s": times})
        run.say(
            f"4 changing shapes, {name}: {entry['graphs']} graphs, {sum(times):.1f} s for {len(times)} shapes"
        )
    run.findings["shape changes"] = found


def two_layers(run: Run) -> None:
    """5: two layers in one kernel against compile and eager, over widths."""
    rows, dtype = run.sizes.two_layer_rows, run.sizes.two_layer_dtype
    item = ITEM_BYTES[dtype]
    for width in run.sizes.two_layer_widths:
        module = run.place(models.relu_mlp(width, 2), dtype)

        def fused(module: nn.Sequential = module) -> Callable[[Tensor], Tensor]:
            kernel = triton_kernels(run).two_layers
            first, second = module[0], module[2]
            return lambda x: kernel(x, first.weight, first.bias, second.weight, second.bias)

        expected = {
            form: predictions.two_layers(rows, width, item, form) for form in ("eager", "compiled", "fused")
        }
        ways = [
            Way("torch", module, expected["eager"]),
            Way("torch-compile", module, expected["compiled"], {}),
            Way("torch-graph", module, expected["eager"], graph=True),
            Way("triton", fused, expected["fused"]),
        ]
        run.case(5, f"two layers {width}", module, (rows, width), dtype, ways)


def merges(run: Run) -> None:
    """6: legal merges by the fx pass, timed; and a counterexample with its error."""
    rows, width = run.sizes.merge
    dtype = run.sizes.geglu_dtype
    item = ITEM_BYTES[dtype]
    one = predictions.gemm(rows, width, width, item, bias=True)
    subjects = {
        "gate+up": (
            models.Geglu(width, 4 * width),
            predictions.geglu(rows, width, 4 * width, item, "eager"),
            predictions.geglu(rows, width, 4 * width, item, "merged"),
        ),
        "q+k+v": (
            models.Qkv(width),
            Prediction((one, one, one, _copy(rows, 3 * width, item)), "three products and a concatenation"),
            Prediction(
                (predictions.gemm(rows, width, 3 * width, item, bias=True), _copy(rows, 3 * width, item)),
                "one product, and the same concatenation",
            ),
        ),
        "two layers, no activation": (
            nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)),
            Prediction((one, one), "two products"),
            Prediction((one,), "one product with W₂W₁"),
        ),
    }
    errors = []
    for name, (module, before, after) in subjects.items():
        module = run.place(module, dtype)
        merged, done = merge_linears(module)
        ways = [Way("torch", module, before), Way("torch-merged", merged, after)]
        run.case(6, name, module, (rows, width), dtype, ways)
        errors.append(merge_error(name, module, merged, run.rows((64, width)), dtype) | {"merges": done})
    run.findings["merges"] = [*errors, counterexample(width, run.rows((64, width)))]


def _copy(rows: int, columns: int, item: int) -> predictions.Kernel:
    """A concatenation: everything read and written once."""
    return predictions.pointwise(rows * columns, 1, 1, item, 0, "copy")


def merge_error(
    name: str, module: nn.Module, merged: nn.Module, rows: np.ndarray, dtype: str
) -> dict[str, Any]:
    """Errors of a module and its merged form against float64, relative to the largest output."""
    weight = next(module.parameters())
    x = torch.from_numpy(rows).to(weight.device, weight.dtype)
    with torch.no_grad():
        truth = models.twin(module)(x.cpu().double()).numpy()
        outputs = [part(x).float().cpu().numpy() for part in (module, merged)]
    apart, together = (tolerances.compare(output, truth, dtype) for output in outputs)
    return {
        "name": name,
        "error": together["relative_error"],
        "error_unmerged": apart["relative_error"],
        "legal": together["passed"],
    }


def counterexample(width: int, rows: np.ndarray) -> dict[str, Any]:
    """Three layers with ReLU as one product of their weights, in float64: the error is no rounding error.

    The claim's other form, concatenated weights, gives W₃x for the last third, not W₃·relu(W₂·relu(W₁x)).
    """
    torch.manual_seed(1)
    layers = [nn.Linear(width, width).double() for _ in range(3)]
    x = torch.from_numpy(rows).double()
    with torch.no_grad():
        truth = x
        for layer in layers:
            truth = torch.relu(layer(truth))
        w1, w2, w3 = (layer.weight for layer in layers)
        b1, b2, b3 = (layer.bias for layer in layers)
        product = torch.relu(x @ (w3 @ w2 @ w1).T + (w3 @ (w2 @ b1 + b2) + b3))
        third = torch.relu(torch.cat([x @ w.T + b for w, b in ((w1, b1), (w2, b2), (w3, b3))], dim=1))[
            :, -width:
        ]
    errors = [tolerances.compare(form.numpy(), truth.numpy(), "float64") for form in (product, third)]
    return {
        "name": "three layers with ReLU",
        "error": errors[0]["relative_error"],
        "error_concatenated": errors[1]["relative_error"],
        "legal": errors[0]["passed"],
    }


def mistakes(run: Run) -> None:
    """7: a forced graph break, and norm + activation + Linear.

    The missing synchronise is read off the rows of experiment 1: when a call returns, and when it is done.
    """
    rows, width, layers = run.sizes.mlp
    module = run.place(models.relu_mlp(width, layers), "float32")
    broken = models.BrokenMlp(module).eval()
    ways = [
        Way("torch", module, predictions.mlp_forward(rows, width, layers, 4, compiled=False)),
        Way("torch-compile", module, predictions.mlp_forward(rows, width, layers, 4, compiled=True), {}),
        Way(
            "torch-compile-broken", broken, predictions.mlp_forward(rows, width, layers, 4, compiled=True), {}
        ),
    ]
    run.case(7, "graph break", module, (rows, width), "float32", ways)
    rows, width = run.sizes.norm
    dtype = run.sizes.geglu_dtype
    cost = {"relu": 1, "gelu": predictions.GELU_FLOPS, "silu": 4}
    for norm in models.NORMS:
        for activation in models.ACTIVATIONS:
            layer = run.place(models.NormActLinear(norm, activation, width), dtype)
            ways = []
            for name, options in (("torch", None), ("torch-compile", {})):
                expected = predictions.norm_linear(
                    rows, width, ITEM_BYTES[dtype], cost[activation], options is not None
                )
                ways.append(Way(name, layer, expected, options))
            run.case(7, f"{norm}+{activation}+linear", layer, (rows, width), dtype, ways)


EXPERIMENTS = {1: matmul_add, 2: linear, 3: naive_mlp, 4: geglu, 5: two_layers, 6: merges, 7: mistakes}


def run(settings: Settings, folder: Path) -> Record:
    """Run the study; traces go to `folder`. Raises Fault for a missing device, Interrupted on Ctrl-C."""
    torch.manual_seed(settings.seed)
    torch.set_num_threads(settings.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch._dynamo.config.recompile_limit = 64
    torch._inductor.config.force_disable_caches = True  # compile seconds are cold ones
    torch._inductor.config.cpp.enable_kernel_profile = True  # C++ kernels appear in CPU traces
    state = Run(settings, folder)
    environment = machine.describe(threads=settings.threads)
    state.say(f"measuring the limits of {state.device}")
    state.limits = ceilings.torch_ceilings(settings.device, settings.threads)
    for number in settings.experiments:
        title = present(EXPERIMENTS[number].__doc__).split(": ", 1)[1].splitlines()[0]
        state.say(f"experiment {number}: {title}")
        EXPERIMENTS[number](state)
    cells = sum(len(case.candidates) for case in state.cases)
    left = settings.seconds - (time.perf_counter() - state.begin)
    # A cell takes up to 1.9 budgets (all kinds and the warm-up) and wakes the machine in every round; the
    # report needs some 15 s after that.
    budget = min(settings.budget, max(0.1, ((left - 15) / cells - settings.rounds * RAMP_S) / 1.9))
    state.say(f"timing {cells} cells, at most {budget:.2f} s each")
    # A burst begins with a collection of garbage; over PyTorch's own objects each would take 0.2 s.
    gc.collect()
    gc.freeze()
    record = run_study(
        state.cases, replace(settings, budget=budget), environment, make_worker=Here, begin=state.begin
    )
    # Profiling came before: cold calls are in the cells, and rows that stayed on the device were not moved.
    record.rows = record.rows[~record.rows["kind"].isin(("cold", "transfer"))]
    record.environment |= {
        "ceilings": state.limits,
        "findings": state.findings,
        "sizes": asdict(state.sizes),
        "device": state.device,
        "left_out": list(LEFT_OUT[state.device]),
        "liger": _version("liger-kernel"),
        "triton": _version("triton"),
        "profiler": {"wait": profiling.WAIT, "warmup": profiling.WARMUP, "active": profiling.ACTIVE},
        "seconds": time.perf_counter() - state.begin,
        "precision": {
            "tf32": torch.backends.cuda.matmul.allow_tf32,
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
        },
    }
    return record


def _version(package: str) -> str | None:
    """The installed version of an optional package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
