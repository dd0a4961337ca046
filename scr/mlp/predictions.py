"""What an experiment should show, said before it runs: kernels by kind, bytes, operations and the least time.

Pure arithmetic, no framework. A matrix product of (m, k) by (k, n) takes 2·m·k·n operations and moves each
matrix once; a point-wise kernel reads each input once and writes each output once. The floor of a kernel is
the larger of operations over the machine's rate and bytes over its bandwidth; kernels that follow each other
add up.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

# Operations per element, counted as in the roofline literature: a tanh or exp counts as one.
GELU_FLOPS = 9  # 0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))


@dataclass(frozen=True)
class Kernel:
    """One predicted kernel: its kind, operations, and bytes through memory."""

    kind: str  # as traces.kernel_kind names them
    flops: int
    bytes: int
    bias: int = 0  # bias elements that come with a product


@dataclass(frozen=True)
class Prediction:
    """The kernels that one forward (or training step) should launch, and the sentence that says why."""

    kernels: tuple[Kernel, ...]
    why: str

    @property
    def counts(self) -> dict[str, int]:
        """Kernels by kind."""
        return dict(Counter(kernel.kind for kernel in self.kernels))

    @property
    def launches(self) -> int:
        """Kernels in all; a captured graph launches them with one call."""
        return len(self.kernels)

    @property
    def flops(self) -> int:
        """Operations in all."""
        return sum(kernel.flops for kernel in self.kernels)

    @property
    def bytes(self) -> int:
        """Bytes through memory in all."""
        return sum(kernel.bytes for kernel in self.kernels)

    def floor_ms(self, flops_per_s: float, bytes_per_s: float) -> float:
        """The least time in ms on a machine with this rate and bandwidth, each kernel at its own limit."""
        seconds = sum(max(k.flops / flops_per_s, k.bytes / bytes_per_s) for k in self.kernels)
        return 1e3 * seconds

    def describe(self) -> dict[str, object]:
        """As a record stores it."""
        return {
            "kernels": self.counts,
            "launches": self.launches,
            "flops": self.flops,
            "bytes": self.bytes,
            "why": self.why,
        }


def gemm(m: int, k: int, n: int, item: int, bias: bool = False) -> Kernel:
    """(m, k) by (k, n), elements of `item` bytes, with the bias of n elements in the epilogue."""
    moved = item * (m * k + k * n + m * n + bias * n)
    return Kernel("gemm", 2 * m * k * n + bias * m * n, moved, n if bias else 0)


def pointwise(
    elements: int, reads: float, writes: float, item: int, flops: int, kind: str = "pointwise"
) -> Kernel:
    """A kernel over `elements`: so many reads, writes and operations for each of them."""
    return Kernel(kind, flops * elements, round(item * elements * (reads + writes)))


def matmul_add(n: int, item: int) -> Prediction:
    """Product and sum, a @ b + c, for n × n matrices, as two eager operators."""
    return Prediction(
        (gemm(n, n, n, item), pointwise(n * n, 2, 1, item, 1)),
        "two operators, one kernel each; the sum is read back from memory",
    )


def linear(rows: int, k: int, n: int, item: int) -> Prediction:
    """nn.Linear with bias: (rows, k) → (rows, n), eager or compiled."""
    return Prediction(
        (gemm(rows, k, n, item, bias=True),), "addmm adds the bias in the product's epilogue; views are free"
    )


def mlp_forward(rows: int, width: int, layers: int, item: int, compiled: bool) -> Prediction:
    """`layers` times Linear with bias and ReLU, all of `width`."""
    if compiled:
        kernels = (
            gemm(rows, width, width, item, bias=True),
            pointwise(rows * width, 1, 1, item, 1, "fused"),
        ) * layers
        why = "the products stay library calls; what follows one becomes one fused kernel"
    else:
        kernels = (
            gemm(rows, width, width, item, bias=True),
            pointwise(rows * width, 1, 1, item, 1),
        ) * layers
        why = "one product with bias and one ReLU per layer"
    return Prediction(kernels, why)


def mlp_backward(rows: int, width: int, layers: int, item: int, compiled: bool) -> Prediction:
    """The backward pass of `mlp_forward`; the input needs no gradient."""
    weight = gemm(width, rows, width, item)
    products = (weight,) * layers + (gemm(rows, width, width, item),) * (layers - 1)
    if compiled:
        fused = pointwise(rows * width, 2, 1, item, 2, "fused")
        return Prediction(
            products + (fused,) * layers,
            "AOTAutograd compiles the backward too: ReLU gradient and bias sum of a layer in one kernel",
        )
    relu = pointwise(rows * width, 2, 1, item, 1)
    bias = Kernel("reduction", rows * width, item * (rows * width + width))
    return Prediction(
        products + (relu, bias) * layers,
        "per layer a weight, a bias and a ReLU gradient; input gradients for all but the first",
    )


GEGLU_FORMS: Mapping[str, tuple[int, str]] = {
    "eager": (5, "three products, GELU, multiplication"),
    "fused": (4, "the same three products and one fused point-wise kernel"),
    "merged": (4, "gate and up in one product, then down; GELU and multiplication apart"),
    "merged fused": (3, "gate and up in one product, one fused kernel, down"),
}


def geglu(rows: int, width: int, hidden: int, item: int, form: str) -> Prediction:
    """down(gelu(gate(x)) · up(x)) without bias, (rows, width) → (rows, hidden) → (rows, width).

    `form` is a key of GEGLU_FORMS.
    """
    launches, why = GEGLU_FORMS[form]
    if "merged" in form:
        projections = [gemm(rows, width, 2 * hidden, item)]
    else:
        projections = [gemm(rows, width, hidden, item)] * 2
    elements = rows * hidden
    if "fused" in form:
        middle = [pointwise(elements, 2, 1, item, GELU_FLOPS + 1, "fused")]
    else:
        middle = [pointwise(elements, 1, 1, item, GELU_FLOPS), pointwise(elements, 2, 1, item, 1)]
    prediction = Prediction((*projections, gemm(rows, hidden, width, item), *middle), why)
    assert prediction.launches == launches
    return prediction


def two_layers(rows: int, width: int, item: int, form: str) -> Prediction:
    """relu(linear(relu(linear(x)))), all of `width`: "eager", "compiled", or "fused" into one kernel.

    The fused kernel keeps the hidden rows on the chip. A program owns TILE_COLUMNS output columns at most and
    needs the whole hidden layer, so the first layer is computed once per tile of columns: the wider, the more
    often. Bytes are those of memory, everything once; what the tiles read again comes from the L2 cache.
    """
    if form != "fused":
        return mlp_forward(rows, width, 2, item, compiled=form == "compiled")
    times = -(-width // TILE_COLUMNS)
    flops = 2 * rows * width * width * (times + 1)
    moved = item * (2 * rows * width + 2 * width * width + 2 * width)
    return Prediction((Kernel("gemm", flops, moved),), f"one kernel; the first layer is computed {times} ×")


TILE_COLUMNS = 256  # of the fused two-layer kernel, at most (`triton_kernels.two_layers_tile`)


def norm_linear(rows: int, width: int, item: int, activation_flops: int, compiled: bool) -> Prediction:
    """linear(act(norm(x))) with bias, (rows, width) → (rows, width)."""
    product = gemm(rows, width, width, item, bias=True)
    if compiled:
        fused = Kernel("fused", (8 + activation_flops) * rows * width, item * 2 * rows * width)
        return Prediction((fused, product), "norm and activation in one kernel, then the product")
    norm = Kernel("norm", 8 * rows * width, item * 2 * rows * width)
    activation = pointwise(rows * width, 1, 1, item, activation_flops)
    return Prediction((norm, activation, product), "norm, activation and product apart")


def with_bias_copies(prediction: Prediction, rows: int, item: int) -> Prediction:
    """The prediction for a CPU, as experiment 2 taught: addmm first copies the bias into the result."""
    copies = tuple(pointwise(rows * k.bias, 0, 1, item, 0, "copy") for k in prediction.kernels if k.bias)
    if not copies:
        return prediction
    return Prediction(prediction.kernels + copies, prediction.why + "; on a CPU addmm copies the bias first")


def compare(prediction: dict[str, object], observed: Mapping[str, float]) -> tuple[str, str]:
    """The verdict on a prediction (as `describe` gives it) from the kernels observed by kind.

    Returns ("confirmed" | "refuted", the difference in words). Memory copies and sets are no kernels.
    """
    expected: Mapping[str, float] = prediction["kernels"]  # type: ignore[assignment]
    parts = []
    for kind in sorted(set(expected) | set(observed) - {"memcpy", "memset"}):
        difference = observed.get(kind, 0) - expected.get(kind, 0)
        if difference:
            parts.append(f"{abs(difference):g} {kind} {'more' if difference > 0 else 'fewer'}")
    return ("refuted" if parts else "confirmed"), ", ".join(parts)
