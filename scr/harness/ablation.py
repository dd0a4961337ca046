"""Are BatchNorm and ReLU free in the fused kernel, as the article says? Its parts, one more each time.

The kernel is `dw_bn_relu` with its last steps replaced: the depthwise convolution alone; with BatchNorm from
mean, variance, gamma and beta for every pixel, as the article has it; with BatchNorm folded to scale and
shift; and with ReLU. A forward here is the network's four depthwise layers on random activations. The study
is "ablation", its cases are the parts.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from harness.backends import NO_TF32, MlxBackend, Options
from harness.costs import LAYERS, Layer
from harness.measure import Candidate, Case
from harness.worker import Backend

CASES = {  # case: (how BatchNorm is done, whether ReLU follows)
    "depthwise alone": ("none", False),
    "+ statistics per pixel": ("per pixel", False),
    "+ folded": ("folded", False),
    "+ ReLU": ("folded", True),
}
BUDGET_SHARE = 0.3
ROUNDS_TIMES = 3  # parts differ by a few percent, and a CPU's speed changes within longer rounds
DEPTHWISE = tuple(layer for layer in LAYERS if layer.kind == "depthwise")
EPSILON = 1e-5

# The line of dw_bn_relu.metal that is replaced, and by what; {rsqrt} is the target's own function.
FOLDED = "const float normal = metal::fma(sum, params[9 * C + c], params[10 * C + c]);"
NORMS = {
    "none": "const float normal = sum;",
    "per pixel": (
        "const float normal = (sum - params[9 * C + c]) * {rsqrt}(params[10 * C + c] + 1e-5f)"
        " * params[11 * C + c] + params[12 * C + c];"
    ),
    "folded": FOLDED,
}
RSQRT = {"metal": "metal::rsqrt", "cuda": "rsqrtf", "host": "1.0f / __builtin_sqrtf"}


def cases(backends: tuple[str, ...], options: Options, batch_sizes: tuple[int, ...]) -> list[Case]:
    """One case per part, where `backends` has the fused kernel."""
    if "mlx-fused" not in backends:
        return []

    def case(name: str) -> Case:
        norm, relu = CASES[name]
        arguments = {"norm": norm, "relu": relu}
        kernel = arguments | {"target": options.target}
        where = "harness.ablation:"
        return Case(
            study="ablation",
            name=name,
            batch_sizes=batch_sizes,
            inputs=inputs,
            candidates=(Candidate("mlx-fused", "mlx", where + "Parts", kernel, "mlx.core", NO_TF32),),
            reference=Candidate("reference", "reference", where + "Reference", arguments, "torch"),
            budget_share=BUDGET_SHARE,
            rounds_times=ROUNDS_TIMES,
            shares_rounds="parts",
        )

    return [case(name) for name in CASES]


def inputs(batch_size: int) -> list[np.ndarray]:
    """Activations before each depthwise layer, (N, H, W, C) float32."""
    random = np.random.default_rng(batch_size)
    sizes = [(batch_size, layer.side_in, layer.side_in, layer.channels_in) for layer in DEPTHWISE]
    return [random.standard_normal(size, dtype=np.float32) for size in sizes]


@dataclass(frozen=True)
class Weights:
    """A layer's taps (9, C) in row order; BatchNorm's mean, variance, gamma and beta, (C,) each. float32."""

    taps: np.ndarray
    norm: np.ndarray  # (4, C)

    def rows(self, norm: str) -> np.ndarray:
        """What the kernel reads behind the taps: nothing, the four as they are, or scale and shift."""
        mean, variance, gamma, beta = self.norm.astype(np.float64)
        scale = gamma / np.sqrt(variance + EPSILON)
        found = {
            "none": [],
            "per pixel": [mean, variance, gamma, beta],
            "folded": [scale, beta - mean * scale],
        }
        return np.array(found[norm]).reshape(-1, self.taps.shape[1])


def weights(layer: Layer) -> Weights:
    """Random weights, BatchNorm far from the identity."""
    random = np.random.default_rng(layer.channels_in + layer.stride)
    c = layer.channels_in
    norm = (
        random.normal(0.5, 1, c),
        random.uniform(0.5, 2, c),
        random.uniform(0.5, 2, c),
        random.normal(0, 1, c),
    )
    return Weights(random.normal(0, 1 / 3, (9, c)).astype(np.float32), np.array(norm, dtype=np.float32))


class Parts(MlxBackend):
    """The kernel with some of its parts, on the four layers."""

    def __init__(self, norm: str, relu: bool, target: str | None) -> None:
        import mlx.core as mx

        self.norm, self.relu = norm, relu
        super().__init__(lambda: None, "float32", compiled=False, custom=True, target=target)
        params = [np.concatenate([w.taps, w.rows(norm)]) for w in map(weights, DEPTHWISE)]
        self.params = [mx.array(rows.astype(np.float32)) for rows in params]

    def prepare(self, batch: Any) -> None:
        """Put the four layers' inputs, a list, on the device: launches of `dw_bn_relu` with another text."""
        from kernels.depthwise import dw_bn_relu_call

        x = [self.mx.array(part) for part in batch]
        self.mx.eval(x)
        self.calls = []
        for layer, part, params in zip(DEPTHWISE, x, self.params, strict=True):
            call = dw_bn_relu_call(part, params, layer.stride, self.relu)
            self.calls.append(replace(call, kernel=variant(call.kernel, self.norm, self.target)))

    def run(self) -> None:
        """All four layers once."""
        from kernels import launch

        self.outputs += [launch(call, self.target)[0] for call in self.calls]

    def launch(self) -> None:
        """All four layers, started."""
        self.run()
        self.mx.async_eval(self.outputs)

    def synchronize(self) -> None:
        """Compute every output and wait."""
        self.mx.eval(self.outputs)
        del self.outputs[: -len(DEPTHWISE)]

    def result(self) -> np.ndarray:
        """The four outputs in one vector."""
        return np.concatenate([np.array(output).ravel() for output in self.outputs])

    def device_ms(self) -> None:
        """Not measured: the layers do not feed each other here."""
        return None

    def facts(self) -> dict[str, Any]:
        """Nothing beside the case's name."""
        return {}


@functools.cache
def variant(kernel: Any, norm: str, target: str) -> Any:
    """`kernel`, that of dw_bn_relu, with BatchNorm done as `norm` says."""
    from kernels import Kernel

    @dataclass(frozen=True)
    class Variant(Kernel):
        """A kernel whose body is not that of its file."""

        text: str = ""

        @property
        def body(self) -> str:
            """The changed body."""
            return self.text

    if kernel.body.count(FOLDED) != 1:
        raise RuntimeError("dw_bn_relu.metal no longer holds the line that the ablation replaces")
    text = kernel.body.replace(FOLDED, NORMS[norm].format(rsqrt=RSQRT[target]))
    name = f"{kernel.name}_{norm.replace(' ', '_')}"
    return Variant(name, kernel.inputs, kernel.outputs, kernel.headers, text)


class Reference(Backend):
    """The same in PyTorch and float64."""

    target = "cpu"

    def __init__(self, norm: str, relu: bool) -> None:
        self.norm, self.relu = norm, relu

    def prepare(self, batch: list[np.ndarray]) -> None:
        """Keep the inputs."""
        self.batch = batch

    def run(self) -> None:
        """All four layers."""
        import torch

        outputs = []
        for layer, x in zip(DEPTHWISE, self.batch, strict=True):
            found = weights(layer)
            c = layer.channels_in
            taps = torch.from_numpy(found.taps.astype(np.float64).T.reshape(c, 1, 3, 3).copy())
            images = torch.from_numpy(x.astype(np.float64)).permute(0, 3, 1, 2)
            convolved = torch.nn.functional.conv2d(images, taps, stride=layer.stride, padding=1, groups=c)
            y = convolved.permute(0, 2, 3, 1).numpy()  # (N, H, W, C)
            if self.norm != "none":
                mean, variance, gamma, beta = found.norm.astype(np.float64)
                y = (y - mean) / np.sqrt(variance + EPSILON) * gamma + beta
            outputs.append(np.maximum(y, 0) if self.relu else y)
        self.output = np.concatenate([y.ravel() for y in outputs])

    def result(self) -> np.ndarray:
        """The four outputs in one vector, float64."""
        return self.output
