"""What a forward must cost, computed from the architecture: parameters, FLOPs, bytes, launches, the floor.

`LAYERS` describes the network once; every figure follows from it. A rung is a list of launches
(`launches(rung)`), each with the activations it reads and writes per image; `predict` turns a rung, a batch
and the measured ceilings into a floor in milliseconds.

Conventions: one multiply-accumulate is two FLOPs. FLOPS (convolutions and linear) is used for every rate and
roofline point of every backend, whatever a fused kernel recomputes or folds away. Traffic is least traffic:
each launch reads each input value it uses once and writes each output value once; weights are read once per
batch.
"""

from dataclasses import dataclass
from typing import Any

from harness import ceilings

PIXELS = 28  # the image is PIXELS × PIXELS, one channel
CLASSES = 10
DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Layer:
    """A convolution or the linear layer. Sizes are sides of square feature maps."""

    block: str  # stem, block 0 … block 3, head
    kind: str  # stem, depthwise, pointwise, skip, head
    channels_in: int
    channels_out: int
    kernel: int
    stride: int
    side_in: int
    norm: bool = True  # followed by BatchNorm
    relu: bool = False  # … and at once by ReLU

    @property
    def groups(self) -> int:
        """Groups of the convolution."""
        return self.channels_in if self.kind == "depthwise" else 1

    @property
    def side_out(self) -> int:
        """Side of the output feature map."""
        return -(-self.side_in // self.stride)

    @property
    def outputs(self) -> int:
        """Output values per image."""
        return self.channels_out * self.side_out**2

    @property
    def inputs(self) -> int:
        """Input values per image that the layer uses: a 1×1 kernel with stride 2 skips three in four."""
        side = self.side_out if self.kernel == 1 else self.side_in
        return self.channels_in * side**2

    @property
    def weights(self) -> int:
        """Weight values."""
        return self.kernel**2 * self.channels_in // self.groups * self.channels_out

    @property
    def macs(self) -> int:
        """Multiply-accumulates per image, the padding's included."""
        return self.weights * self.side_out**2


def _block(number: int, channels_in: int, channels_out: int, stride: int, side: int) -> list[Layer]:
    """The layers of a depthwise-separable residual block."""
    name = f"block {number}"
    layers = [
        Layer(name, "depthwise", channels_in, channels_in, 3, stride, side, relu=True),
        Layer(name, "pointwise", channels_in, channels_out, 1, 1, -(-side // stride)),
    ]
    if stride != 1 or channels_in != channels_out:
        layers.append(Layer(name, "skip", channels_in, channels_out, 1, stride, side))
    return layers


LAYERS: tuple[Layer, ...] = (
    Layer("stem", "stem", 1, 48, 3, 1, PIXELS, relu=True),
    *_block(0, 48, 96, 2, 28),
    *_block(1, 96, 96, 1, 14),
    *_block(2, 96, 192, 2, 14),
    *_block(3, 192, 192, 1, 7),
    Layer("head", "head", 192, CLASSES, 1, 1, 1, norm=False),
)
BLOCKS = tuple(f"block {number}" for number in range(4))
POOLED = 192 * 7 * 7  # values that average pooling reads per image


def _of(block: str, kind: str) -> Layer:
    """The layer of a kind in a block that has one."""
    return next(layer for layer in LAYERS if (layer.block, layer.kind) == (block, kind))


def parameters() -> dict[str, int]:
    """Parameter counts by the three conventions, and their parts."""
    convolution = sum(layer.weights for layer in LAYERS if layer.norm)
    channels = sum(layer.channels_out for layer in LAYERS if layer.norm)
    linear = sum(layer.weights + layer.channels_out for layer in LAYERS if not layer.norm)
    trainable = convolution + 2 * channels + linear
    with_statistics = trainable + 2 * channels
    return {
        "convolution": convolution,
        "batchnorm": 2 * channels,
        "linear": linear,
        "trainable": trainable,
        "with_batchnorm_statistics": with_statistics,
        "state_dict": with_statistics + sum(layer.norm for layer in LAYERS),
    }


def article_flops() -> dict[str, int]:
    """FLOPs per image as the article counts: with 5 per BatchNorm element, 1 per ReLU, 1 per addition."""
    norm = 5 * sum(layer.outputs for layer in LAYERS if layer.norm)
    additions = sum(_of(block, "pointwise").outputs for block in BLOCKS)
    relu = additions + sum(layer.outputs for layer in LAYERS if layer.relu)
    parts = {"convolution and linear": FLOPS, "batchnorm": norm, "relu": relu, "addition": additions}
    return parts | {"total": sum(parts.values())}


MACS = sum(layer.macs for layer in LAYERS)  # per image
FLOPS = 2 * MACS  # per image
PARAMETERS = parameters()["with_batchnorm_statistics"]  # values read once per batch


def mac_shares() -> dict[str, float]:
    """Share of the multiply-accumulates by kind of layer."""
    kinds = dict.fromkeys(layer.kind for layer in LAYERS)
    return {kind: sum(layer.macs for layer in LAYERS if layer.kind == kind) / MACS for kind in kinds}


def depthwise_intensity(block: str) -> dict[str, float]:
    """Arithmetic intensity in FLOP/byte of a block's depthwise step: fp32, batch 1.

    "convolution": alone. "unfused": convolution, BatchNorm (5 FLOP) and ReLU (1 FLOP) per pixel as three
    passes. "fused": the same in one pass. "folded": one pass with scale and shift (2 FLOP) and ReLU. "saved":
    the share of the unfused bytes that fusing removes. BatchNorm's four parameters per channel count as read,
    two of them once folded.
    """
    layer = _of(block, "depthwise")
    ends = layer.inputs + layer.outputs + layer.weights
    norm = 4 * layer.channels_out
    unfused = 4 * (ends + 2 * layer.outputs + norm + 2 * layer.outputs)
    fused = 4 * (ends + norm)
    folded = 4 * (ends + 2 * layer.channels_out)
    return {
        "convolution": 2 * layer.macs / (4 * ends),
        "unfused": 24 * layer.outputs / unfused,
        "fused": 24 * layer.outputs / fused,
        "folded": 21 * layer.outputs / folded,
        "saved": 1 - fused / unfused,
    }


@dataclass(frozen=True)
class Launch:
    """One launch of a rung: which kind of work it is, activations read and written per image."""

    kind: str  # of its layer; "element-wise" for BatchNorm, ReLU, addition; "head" for pooling and linear
    reads: int
    writes: int


@dataclass(frozen=True)
class Form:
    """How a rung runs the network.

    `norm`: the passes of one BatchNorm, as the size of each relative to its layer's output (0: a few values).
    `element_wise`: "apart" (BatchNorm, ReLU and addition as passes of their own), "merged" (what follows a
    convolution in one pass, as compilers do), "inside" (in the convolution's own launch).
    """

    norm: tuple[int, ...] = (1,)
    element_wise: str = "apart"
    fused_depthwise: bool = False
    pooling: int = 1  # launches; MLX's mean is a sum and a multiplication
    per_block: bool = False  # one launch per block …
    stem_apart: bool = False  # … with the stem stored by its own
    head_inside: bool = False  # … with the head in the last block's
    whole: bool = False  # one launch


# MLX's BatchNorm in eval mode: − mean; variance + ε and its rsqrt per channel; · that; · weight; + bias.
MLX_NORM = (1, 0, 0, 1, 1, 1)

RUNGS = {
    "torch": Form(),
    "torch-channels-last": Form(),
    "torch-graph": Form(),
    "torch-graph-channels-last": Form(),
    "torch-compile": Form(element_wise="merged"),
    "torch-compile-overhead": Form(element_wise="merged"),
    "onnxruntime": Form(element_wise="inside"),
    "mlx": Form(MLX_NORM, pooling=2),
    "mlx-compile": Form(element_wise="merged", pooling=2),
    "mlx-folded-eager": Form(pooling=2),  # BatchNorm is the addition of a bias
    "mlx-folded": Form(element_wise="merged", pooling=2),
    "mlx-fused": Form(MLX_NORM, fused_depthwise=True, pooling=2),
    "mlx-fused-compile": Form(element_wise="merged", fused_depthwise=True, pooling=2),
    "mlx-six": Form(per_block=True, stem_apart=True),
    "mlx-block": Form(per_block=True),
    "mlx-block, head inside": Form(per_block=True, head_inside=True),
    "mlx-block-32kb": Form(per_block=True),
    "mlx-network": Form(whole=True),
}


def launches(rung: str) -> list[Launch]:
    """The launches of a rung (a key of RUNGS), in order. MLX's views (broadcast, transpose) are none."""
    form = RUNGS[rung]
    if form.whole:
        return [Launch("network", PIXELS**2, CLASSES)]
    if form.per_block:
        return _block_launches(form.stem_apart, form.head_inside)
    pooling = [Launch("head", POOLED, 192), Launch("head", 192, 192)][: form.pooling]
    layers = [launch for block in ("stem", *BLOCKS) for launch in _layer_launches(block, form)]
    return [*layers, *pooling, Launch("head", 192, CLASSES)]


def _layer_launches(block: str, form: Form) -> list[Launch]:
    """The launches of the stem or a block in a form that launches per layer."""
    found = []
    for layer in (layer for layer in LAYERS if layer.block == block):
        n = layer.outputs
        found.append(Launch(layer.kind, layer.inputs, n))
        if form.element_wise == "inside" or (layer.kind == "depthwise" and form.fused_depthwise):
            continue
        if form.element_wise == "apart":
            found += [Launch("element-wise", n * share, n * share) for share in form.norm]
        if layer.relu:  # under "merged" with its BatchNorm; without ReLU that waits for the addition
            found.append(_relu(n))
    if block == "stem":
        return found
    n = _of(block, "pointwise").outputs
    if form.element_wise == "inside":  # the convolution that ends the block also reads the other branch
        last = found.pop()
        return [*found, Launch(last.kind, last.reads + n, last.writes)]
    addition = Launch("element-wise", 2 * n, n)
    return [*found, addition] if form.element_wise == "merged" else [*found, addition, _relu(n)]


def _relu(n: int) -> Launch:
    """ReLU as a pass of its own over n values."""
    return Launch("element-wise", n, n)


def rung_of(cell: dict[str, Any]) -> str:
    """The rung that a cell ran: its backend, and for `mlx-block` whether the head is in the last launch."""
    rung = cell["backend"].removesuffix("-again")
    return f"{rung}, head inside" if cell.get("head_inside") else rung


def _block_launches(stem_apart: bool, head_inside: bool) -> list[Launch]:
    """One launch per block and one for the head, unless the last block's computes it; the stem in its own
    launch, or recomputed in block 0.
    """
    found = [Launch("stem", PIXELS**2, _of("stem", "stem").outputs)] if stem_apart else []
    for block in BLOCKS:
        reads = _of(block, "depthwise").inputs
        if block == "block 0" and not stem_apart:
            reads = PIXELS**2
        found.append(Launch("block", reads, _of(block, "pointwise").outputs))
    if head_inside:
        return [*found[:-1], Launch("block", found[-1].reads, CLASSES)]
    return [*found, Launch("head", POOLED, CLASSES)]


def activation_bytes(rung: str, dtype: str = "float32") -> int:
    """Least activation traffic of a rung in bytes per image."""
    return DTYPE_BYTES[dtype] * sum(launch.reads + launch.writes for launch in launches(rung))


def weight_bytes(dtype: str = "float32") -> int:
    """Bytes of all parameters, read once per batch."""
    return DTYPE_BYTES[dtype] * PARAMETERS


def intensity(rung: str, batch_size: int, flops: int = FLOPS, dtype: str = "float32") -> float:
    """Arithmetic intensity of the whole network in FLOP/byte, weights included."""
    return flops * batch_size / (activation_bytes(rung, dtype) * batch_size + weight_bytes(dtype))


def predict(
    backend: str,
    target: str,
    batch_size: int,
    dtype: str,
    limits: list[dict[str, Any]],
    launcher: str | None = None,
) -> dict[str, Any] | None:
    """What one forward must cost: the cell's `cost`. None for a backend that is no rung.

    `launcher`: whose price of a launch counts; None: that of the backend's framework.

    floor_ms = max(arithmetic, bytes) + launches × launch cost. Arithmetic at `peak_rate`; bytes at the best
    measured copy bandwidth of a working set as large as the average launch's; the first launch at the price
    of one launch and wait, each other at that of a dependent launch in a chain, both of the framework that
    launches. What was not measured is None, and so is the floor without it; a framework without a launch
    ceiling counts 0.
    """
    if backend not in RUNGS:
        return None
    count = len(launches(backend))
    flops = FLOPS * batch_size
    nbytes = activation_bytes(backend, dtype) * batch_size + weight_bytes(dtype)
    device = ceilings.device_of(target)
    rate = peak_rate(dtype, device, limits)
    bandwidth = ceilings.bandwidth(limits, nbytes / count, device)
    arithmetic_ms = flops / rate / 1e6 if rate else None
    bytes_ms = nbytes / bandwidth / 1e6 if bandwidth else None
    launch_ms = _launch_ms(backend, target, count, limits, launcher or backend.split("-")[0])
    least_ms = max(arithmetic_ms, bytes_ms) if arithmetic_ms is not None and bytes_ms is not None else None
    return {
        "flops": flops,
        "bytes": nbytes,
        "launches": count,
        "intensity": flops / nbytes,
        "arithmetic_ms": arithmetic_ms,
        "bytes_ms": bytes_ms,
        "launch_ms": launch_ms,
        "floor_ms": None if least_ms is None else least_ms + (launch_ms or 0.0),
    }


def peak_rate(dtype: str, device: str, limits: list[dict[str, Any]]) -> float | None:
    """The best measured rate of multiply-adds of a dtype in GFLOP/s, but at least that of float32.

    All backends may accumulate in float32. None where neither was measured.
    """
    rates = [ceilings.rate(limits, kind, device) for kind in {dtype, "float32"}]
    return max((r for r in rates if r), default=None)


def _launch_ms(
    backend: str, target: str, count: int, limits: list[dict[str, Any]], framework: str
) -> float | None:
    """The price of a rung's launches. On the host target, custom kernels are launched by the host's pool."""
    if backend in ("torch-graph", "torch-graph-channels-last", "torch-compile-overhead"):  # one graph
        count = 1
    own = {"mlx-fused": len(BLOCKS), "mlx-block": count, "mlx-network": count}.get(backend, 0)
    if target != "host":
        own = 0
    total = 0.0
    for who, number in ((framework, count - own), ("host", own)):
        if not number:
            continue
        price = ceilings.launch_ms(limits, who)
        if price is None:
            return None
        # The fused layer leaves MLX's graph every time; the block kernels are one foreign call.
        calls = number if who == "host" and backend == "mlx-fused" else min(number, 1)
        total += calls * price[0] + (number - calls) * price[1]
    return total
