"""The study's cases: what is run, at which batches, and what it costs. No framework is imported here.

A `Work` is a description that a worker can build (`batch.networks`) and that a report can cost again from the
record alone (`Work.layers`). The batches are one list for every machine; what would not fit the machine's
memory or take too long on its processor is trimmed by a rule, and the report says what was.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from batch.roofline import BYTES, Layer, cache_bytes, convolution, elementwise, linear

MLP_DEPTH = 8
MLP_WIDTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
FLOOR_WIDTH = 16
FLOOR_DEPTHS = (2, 8, 32)
EXPERTS, CHOSEN = 8, 2
ROUTINGS = ("balanced", "skewed", "expert-choice")
HEAD = 64  # values per attention head
SKEW = 1.5  # exponent of the Zipf weights by which skewed tokens choose their experts
RESNET_STAGES = ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2))  # blocks, inner channels, stride

# A forward of more FLOPs than this would cost seconds per cell on such a device.
MOST_FLOPS = {"cpu": 4e10, "mps": 4e11, "cuda": 5e12}
MEMORY_SHARE = 1 / 8  # of the device's memory that one case's weights, caches and activations may fill


def doubling(last: int) -> tuple[int, ...]:
    """1, 2, 4 … last."""
    return tuple(2**n for n in range(last.bit_length()))


@dataclass(frozen=True)
class Work:
    """One case. `family` is its section of the report, `kind` and `sizes` say what is built."""

    name: str
    family: str
    kind: str
    sizes: dict[str, Any]
    batches: tuple[int, ...]
    dtype: str = "float32"
    tolerance: str = ""  # the row of harness.tolerances; `dtype` where empty
    trimmed: tuple[int, ...] = field(default=())  # batches that this machine leaves out

    def layers(self, batch: int) -> list[Layer]:
        """What one forward at `batch` costs, layer by layer."""
        return COSTS[self.kind](batch, BYTES[self.dtype], **self.sizes)

    def flops(self, batch: int) -> float:
        """FLOPs of one forward: 2 per multiply-accumulate."""
        return sum(layer.flops for layer in self.layers(batch))

    def bytes(self, batch: int) -> float:
        """Bytes that one forward moves, each tensor read or written once per layer that does so."""
        return sum(layer.bytes for layer in self.layers(batch))

    def resident(self, batch: int) -> float:
        """Bytes that are there at once: all weights, and twice what the largest layer reads and writes."""
        layers = self.layers(batch)
        return sum(layer.weight_bytes for layer in layers) + 2 * max(
            layer.activation_bytes for layer in layers
        )

    def describe(self) -> dict[str, Any]:
        """JSON-able; `Work.restore` reads it."""
        return asdict(self)

    @staticmethod
    def restore(stored: dict[str, Any]) -> "Work":
        """The work that `describe` described."""
        return Work(**stored | {name: tuple(stored[name]) for name in ("batches", "trimmed")})


def all_works(device: str, memory_bytes: float, quick: bool = False) -> list[Work]:
    """The cases for a device (cpu, mps, cuda) with so much memory, trimmed to it."""
    gpu = device != "cpu"
    many = doubling(4096 if gpu else 512)
    some = doubling(256 if gpu else 32)
    works = [
        Work(
            f"floor {depth}×{FLOOR_WIDTH}",
            "floor",
            "mlp",
            {"width": FLOOR_WIDTH, "depth": depth},
            (1,),
            dtype,
        )
        for dtype in (("float32", "float16") if gpu else ("float32",))
        for depth in FLOOR_DEPTHS
    ]
    works += [mlp(width, many) for width in MLP_WIDTHS]
    if gpu:
        works += [mlp(width, many, "float16") for width in (1024, 4096, 8192)]
    works.append(
        # Fifty layers of other algorithms (Winograd, FFT) add up; a wrong layer is off by more than 0.1.
        Work("ResNet-50", "resnet", "resnet50", {}, (1, 2, 3, *doubling(256)[2:]), tolerance="tf32")
    )
    works.append(Work("linear 2048", "layers", "linear", {"inputs": 2048, "outputs": 2048}, many))
    for side, channels in ((56, 64), (28, 128), (14, 256), (7, 512), (2, 512)):
        works.append(convolution_work(f"conv 3×3 {side}×{side}×{channels}", side, channels, 1, some))
    works.append(convolution_work("depthwise 3×3 14×14×192", 14, 192, 192, some))
    for side in (14, 56, 224):
        sizes = {"side": side, "channels": 16}
        works.append(Work(f"pool 2×2 {side}×{side}×16", "layers", "pool", sizes, some))
    for context in (0, 128, 1024, 8192):
        name = f"decoder, context {context}" if context else "decoder without attention"
        sizes = {"width": 1024, "context": context}
        works.append(Work(name, "decoder", "decoder", sizes, doubling(64 if gpu else 32)))
    block = {"width": 1024, "inner": 2048, "experts": EXPERTS, "chosen": CHOSEN}
    for routing in ROUTINGS:
        works.append(Work(f"experts, {routing}", "experts", "experts", block | {"routing": routing}, many))
    if quick:
        works = [quicker(work) for work in works if work.sizes.get("width", 0) <= 1024]
    return [trim(work, device, memory_bytes) for work in works]


def mlp(width: int, batches: tuple[int, ...], dtype: str = "float32") -> Work:
    """MLP_DEPTH square linear layers without bias, ReLU between them."""
    name = f"MLP {MLP_DEPTH}×{width}"
    return Work(name, "mlp", "mlp", {"width": width, "depth": MLP_DEPTH}, batches, dtype)


def convolution_work(name: str, side: int, channels: int, groups: int, batches: tuple[int, ...]) -> Work:
    """A 3×3 convolution that keeps side and channels."""
    return Work(
        name, "layers", "convolution", {"side": side, "channels": channels, "groups": groups}, batches
    )


def quicker(work: Work) -> Work:
    """The same work at every fourth batch, the last of them small."""
    batches = tuple(batch for batch in work.batches[::2] if batch <= 64)
    return Work(**asdict(work) | {"batches": batches})


def trim(work: Work, device: str, memory_bytes: float) -> Work:
    """Leave out the batches that are too large for the device: all of them where the weights do not fit."""
    kept = tuple(
        batch
        for index, batch in enumerate(work.batches)
        if (index == 0 or work.flops(batch) <= MOST_FLOPS[device])
        and work.resident(batch) <= MEMORY_SHARE * memory_bytes
    )
    left_out = tuple(batch for batch in work.batches if batch not in kept)
    return Work(**asdict(work) | {"batches": kept, "trimmed": left_out})


def mlp_layers(batch: int, size: int, width: int, depth: int) -> list[Layer]:
    """Square linear layers; the ReLU between two is a launch that moves the activations once more."""
    product, relu = linear(batch, width, width, size), elementwise(batch, width, size)
    return [product, relu] * (depth - 1) + [product]


def linear_layers(batch: int, size: int, inputs: int, outputs: int) -> list[Layer]:
    """One linear layer."""
    return [linear(batch, inputs, outputs, size)]


def convolution_layers(batch: int, size: int, side: int, channels: int, groups: int) -> list[Layer]:
    """One 3×3 convolution."""
    return [convolution(batch, side, channels, channels, 3, size, groups=groups)]


def pool_layers(batch: int, size: int, side: int, channels: int) -> list[Layer]:
    """2×2 maximum with stride 2: reads four values for each it writes; no weights, nothing multiplied."""
    out = (side // 2) ** 2 * channels
    return [Layer(0, 0, size * batch * 5 * out)]


def decoder_layers(batch: int, size: int, width: int, context: int) -> list[Layer]:
    """A decoder block that makes one token per sequence: projections, attention over the cache, MLP.

    The cache belongs to its sequence: it is read in full for each, whatever the batch.
    """
    vector = elementwise(batch, width, size)
    scores = size * batch * (width // HEAD) * context
    half = cache_bytes(batch, context, width, size) / 2
    read = Layer(2 * batch * context * width, 0, half + scores)
    attention = [vector, vector, read, Layer(0, 0, 2 * scores), read] if context else []
    return [
        vector,
        linear(batch, width, 3 * width, size),
        *attention,
        linear(batch, width, width, size),
        vector,
        vector,
        linear(batch, width, 4 * width, size),
        elementwise(batch, 4 * width, size),
        linear(batch, 4 * width, width, size),
        vector,
    ]


def expert_layers(
    batch: int, size: int, width: int, inner: int, experts: int, chosen: int, routing: str
) -> list[Layer]:
    """A mixture of experts: an expert that no token chose costs nothing, not even its weights."""
    layers = []
    for tokens in routes(routing, batch, experts, chosen):
        count = len(tokens)
        if count:
            vector = elementwise(count, width, size)
            layers += [
                vector,
                linear(count, width, inner, size),
                elementwise(count, inner, size),
                linear(count, inner, width, size),
                vector,
                elementwise(count, width, size, reads=2),
            ]
    return layers


def resnet_layers(batch: int, size: int) -> list[Layer]:
    """ResNet-50 at 224×224, with BatchNorm, ReLU and additions as passes of their own, as eager runs them."""

    def conv(
        side: int, inputs: int, outputs: int, kernel: int, stride: int, relu: bool = True
    ) -> list[Layer]:
        out = (-(-side // stride)) ** 2 * outputs
        passes = [elementwise(batch, out, size)] * (2 if relu else 1)
        return [convolution(batch, side, inputs, outputs, kernel, size, stride), *passes]

    layers = conv(224, 3, 64, 7, 2)
    layers.append(Layer(0, 0, size * batch * 64 * (112**2 + 56**2)))
    side, channels = 56, 64
    for blocks, inner, first_stride in RESNET_STAGES:
        for block in range(blocks):
            stride = first_stride if block == 0 else 1
            out = side // stride
            layers += conv(side, channels, inner, 1, 1)
            layers += conv(side, inner, inner, 3, stride)
            layers += conv(out, inner, 4 * inner, 1, 1, relu=False)
            if block == 0:
                layers += conv(side, channels, 4 * inner, 1, stride, relu=False)
            layers.append(elementwise(batch, out * out * 4 * inner, size, reads=2))
            layers.append(elementwise(batch, out * out * 4 * inner, size))
            side, channels = out, 4 * inner
    layers.append(Layer(0, 0, size * batch * channels * (side**2 + 1)))
    layers.append(linear(batch, channels, 1000, size))
    return layers


COSTS: dict[str, Callable[..., list[Layer]]] = {
    "mlp": mlp_layers,
    "linear": linear_layers,
    "convolution": convolution_layers,
    "pool": pool_layers,
    "decoder": decoder_layers,
    "experts": expert_layers,
    "resnet50": resnet_layers,
}


def routes(routing: str, batch: int, experts: int, chosen: int, seed: int = 7) -> list[np.ndarray]:
    """Which tokens each expert works on: one rising array of token numbers per expert.

    balanced: token t takes experts t·k … t·k + k - 1, in a circle. skewed: every token takes k different
    experts, drawn by Zipf weights. expert-choice: every expert takes B·k/E tokens (at least one), drawn at
    random, so that a token may get more or fewer than k.
    """
    generator = np.random.default_rng(seed)
    if routing == "expert-choice":
        count = min(batch, max(1, round(batch * chosen / experts)))
        return [np.sort(generator.permutation(batch)[:count]) for _ in range(experts)]
    if routing == "balanced":
        picks = (np.arange(batch)[:, None] * chosen + np.arange(chosen)) % experts
    elif routing == "skewed":
        weights = 1.0 / np.arange(1, experts + 1) ** SKEW
        # The k largest of log weight + Gumbel noise are a draw without replacement.
        noise = generator.gumbel(size=(batch, experts)) + np.log(weights)
        picks = np.argsort(-noise, axis=1)[:, :chosen]
    else:
        raise ValueError(f"unknown routing {routing!r}")
    return [np.flatnonzero((picks == expert).any(axis=1)) for expert in range(experts)]
