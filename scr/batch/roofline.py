"""The model: how long a forward must take at a batch, and from which batch on a larger one is not free.

A layer costs, per forward of batch B, 2 FLOPs per multiply-accumulate, its weights once, and its inputs and
outputs B times. It takes at least the longest of three times: launching it, moving its bytes, doing its
arithmetic. While weights or launches are the longest, a larger batch is free; the batch where arithmetic
takes over is the ridge batch. Everything here is plain arithmetic on seconds, bytes and FLOP/s; nothing is
measured.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def ridge_batch(flop_rate: float, bandwidth: float, bytes_per_parameter: float) -> float:
    """B* = bytes per parameter × FLOP/s ÷ (2 × bytes/s): where weights take as long as their arithmetic.

    A parameter is read once and costs 2 FLOPs per item of the batch. Only at 2 bytes per parameter is it
    FLOP/s ÷ bandwidth, the form in which it is often printed.
    """
    return bytes_per_parameter * flop_rate / (2 * bandwidth)


def ridge_batch_with_activations(ridge: float, inputs: int, outputs: int) -> float:
    """The ridge batch of an inputs × outputs layer that also moves its activations; inf where there is none.

    2·B·n·m/F = p·(n·m + B·(n + m))/W gives B = B* ÷ (1 - B*·(n + m)/(n·m)). Below a width of 2 B* the
    activations alone take longer than the arithmetic, whatever the batch.
    """
    remainder = 1 - ridge * (inputs + outputs) / (inputs * outputs)
    return ridge / remainder if remainder > 0 else math.inf


def ridge_batch_with_launch(
    activated: float, inputs: int, outputs: int, flop_rate: float, launch_s: float
) -> float:
    """The ridge batch when every layer takes at least `launch_s`: arithmetic must outlast that as well."""
    return max(activated, launch_s * flop_rate / (2 * inputs * outputs))


def ridge_batch_convolution(ridge: float, height: int, width: int) -> float:
    """Of a convolution with height × width outputs: each weight is used once per pixel, so B·H·W = B*."""
    return ridge / (height * width)


def tokens_per_expert(batch: int, chosen: int, experts: int) -> float:
    """Mean tokens that an expert sees: B·k/E."""
    return batch * chosen / experts


def ridge_batch_experts(ridge: float, chosen: int, experts: int) -> float:
    """Tokens at which an expert's own batch reaches the ridge: B·k/E = B*."""
    return ridge * experts / chosen


def cache_bytes(batch: int, context: int, width: int, bytes_per_value: int, layers: int = 1) -> int:
    """Size of a KV cache: a key and a value of `width` per position, sequence and layer."""
    return 2 * layers * batch * context * width * bytes_per_value


def convolution_weights(kernel: int, inputs: int, outputs: int, groups: int = 1) -> int:
    """Parameters of a convolution without bias: k²·C_in·C_out, divided by the groups."""
    return kernel * kernel * inputs * outputs // groups


@dataclass(frozen=True)
class Layer:
    """What one layer costs in one forward at one batch."""

    flops: float
    weight_bytes: float
    activation_bytes: float
    launches: float = 1

    @property
    def bytes(self) -> float:
        """All bytes moved, each input read once and each output written once."""
        return self.weight_bytes + self.activation_bytes


def linear(batch: float, inputs: int, outputs: int, size: int, launches: int = 1) -> Layer:
    """A matrix product of (batch, inputs) with (inputs, outputs); `size` is bytes per value."""
    return Layer(
        flops=2 * batch * inputs * outputs,
        weight_bytes=size * inputs * outputs,
        activation_bytes=size * batch * (inputs + outputs),
        launches=launches,
    )


def convolution(
    batch: float,
    side: int,
    inputs: int,
    outputs: int,
    kernel: int,
    size: int,
    stride: int = 1,
    groups: int = 1,
) -> Layer:
    """A square convolution with padding kernel // 2 over side × side pixels."""
    out = -(-side // stride)
    weights = convolution_weights(kernel, inputs, outputs, groups)
    return Layer(
        flops=2 * batch * out * out * weights,
        weight_bytes=size * weights,
        activation_bytes=size * batch * (side * side * inputs + out * out * outputs),
    )


def elementwise(batch: float, values: int, size: int, reads: int = 1, writes: int = 1) -> Layer:
    """A layer without weights over `values` numbers per item, each read and written so many times."""
    return Layer(0, 0, size * batch * values * (reads + writes))


@dataclass(frozen=True)
class Limits:
    """What the machine can do, as measured for one kind of timing.

    `bandwidth` is read at the working set of the case: pairs (bytes, bytes/s), the sizes rising. `call_s` is
    the cost of a forward of no layers, `launch_s` that of one more layer that does next to nothing.
    """

    flop_rate: float
    bandwidth: tuple[tuple[float, float], ...]
    call_s: float = 0.0
    launch_s: float = 0.0

    def bandwidth_at(self, working_set: float) -> float:
        """Bytes/s over a working set of so many bytes, interpolated between the measured sizes (log-log)."""
        sizes, rates = zip(*self.bandwidth, strict=True)
        return float(np.exp(np.interp(math.log(max(working_set, 1)), np.log(sizes), np.log(rates))))


@dataclass(frozen=True)
class Prediction:
    """Least seconds of one forward, in all and per cause. `bound` names the cause of most of the time."""

    total_s: float
    launch_s: float
    memory_s: float
    compute_s: float
    working_set: float  # bytes
    bandwidth: float  # bytes/s used for it

    @property
    def bound(self) -> str:
        """launch, memory or compute: whichever would take longest alone."""
        times = {"launch": self.launch_s, "memory": self.memory_s, "compute": self.compute_s}
        return max(times, key=lambda cause: times[cause])


def predict(layers: list[Layer], limits: Limits) -> Prediction:
    """The least time of `layers` one after another: the call, then per layer the longest of its three times.

    All weights and activations are one working set, because a forward goes through them in a circle.
    """
    working_set = sum(layer.bytes for layer in layers)
    bandwidth = limits.bandwidth_at(working_set)
    launch = [limits.launch_s * layer.launches for layer in layers]
    memory = [layer.bytes / bandwidth for layer in layers]
    compute = [layer.flops / limits.flop_rate for layer in layers]
    longest = sum(max(times) for times in zip(launch, memory, compute, strict=True))
    return Prediction(
        total_s=limits.call_s + longest,
        launch_s=limits.call_s + sum(launch),
        memory_s=sum(memory),
        compute_s=sum(compute),
        working_set=working_set,
        bandwidth=bandwidth,
    )


def affine(counts: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(call, launch) in seconds from forwards of `counts` layers that do next to nothing: seconds = call +
    n·launch.

    Least squares, neither below zero.
    """
    launch, call = np.polyfit(counts, seconds, 1) if len(counts) > 1 else (seconds[0] / counts[0], 0.0)
    if call < 0:
        call, launch = 0.0, float(np.dot(counts, seconds) / np.dot(counts, counts))
    return float(call), float(max(launch, 0.0))


# Published figures and what they should be, recomputed by the functions above.
@dataclass(frozen=True)
class Published:
    """One statement of the articles: what is printed, and what its own formula gives."""

    statement: str
    printed: str
    recomputed: str
    remark: str


def published() -> list[Published]:
    """The published figures and their errors as rows, recomputed by the same functions as the predictions."""
    t4_tensor = ridge_batch(65e12, 300e9, 2)
    t4_single = ridge_batch(8.1e12, 300e9, 4)
    wide = {n: ridge_batch_with_activations(t4_tensor, n, n) for n in (256, 1024, 4096)}
    h200 = ridge_batch(51e12, 4.24e12, 4)
    return [
        Published(
            "ridge batch of a T4",
            "216",
            f"{t4_tensor:.1f}",
            "with the fp16 tensor rate, 65 TFLOP/s over 300 GB/s: true only for fp16 on tensor cores",
        ),
        Published(
            "the same in fp32",
            "216",
            f"{t4_single:.1f}",
            "8.1 TFLOP/s over 300 GB/s at 4 bytes per parameter: a quarter of the printed figure",
        ),
        Published(
            "B* = FLOP/s ÷ bandwidth",
            "for every dtype",
            "bytes per parameter × FLOP/s ÷ (2 × bandwidth)",
            "the printed form holds only at 2 bytes per parameter",
        ),
        Published(
            "activations left out (fp16 T4)",
            "216 at every width",
            ", ".join(
                f"width {n}: {batch:.0f}" if math.isfinite(batch) else f"width {n}: never"
                for n, batch in wide.items()
            ),
            "activations move too; below a width of 2 B* they alone outlast the arithmetic",
        ),
        Published(
            "H200, fp32, 51 TFLOP/s and 4.24 TB/s",
            "not given",
            f"{h200:.1f}; {ridge_batch_with_activations(h200, 1024, 1024):.1f} with activations at width "
            "1024",
            "measured rates, TF32 off",
        ),
        Published(
            "H200, dense bf16 of the datasheet",
            "not given",
            f"{ridge_batch(989e12, 4.8e12, 2):.0f}",
            "989 TFLOP/s over 4.8 TB/s",
        ),
        Published(
            "weights of a 3×3 convolution, 64 to 128 channels",
            "k²·C_out = 1,152",
            f"k²·C_in·C_out = {convolution_weights(3, 64, 128):,}",
            "the input channels were forgotten",
        ),
        Published(
            "how often a filter of a 224×224 layer is used",
            "224",
            f"224² = {224 * 224:,}",
            f"so its ridge batch is B*/224² = {ridge_batch_convolution(t4_tensor, 224, 224):.4f} on the "
            "fp16 T4: reached within one image",
        ),
        Published(
            "192 KB of shared memory",
            "of the GPU",
            "per multiprocessor",
            "an A100 has 108 of them: 20.7 MB together",
        ),
    ]
