"""DepthwiseMNIST in MLX, the port of PyTorch's weights, and the fusion levels.

Layout in this file is MLX's: images (N, H, W, C), convolution weights (out, kH, kW, in / groups).

    import mlx_model
    model = mlx_model.get_model(level="fused")   # output/best_model.pth, eval mode
    logits = model(images)                       # (N, 28, 28, 1) -> (N, 10)

A fusion level is a value, not a copy of the model. Every level has the same parameters under the same names;
`level` picks the block class, and `fold()` derives from the parameters what that class runs on.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

import kernels
from harness.cli import Fault
from harness.paths import CHECKPOINT, shown

STEM_CHANNELS = 48
CLASSES = 10
EXPORT_VERSION = "1"  # of the safetensors files that export.py writes
EXPORT_LAYOUT = "MLX: convolution weights (out, kH, kW, in / groups)"
BLOCKS = ((48, 96, 2), (96, 96, 1), (96, 192, 2), (192, 192, 1))  # (channels in, channels out, stride)
SHAPE = kernels.NetworkShape(
    blocks=tuple(
        kernels.BlockShape(side, side, channels_in, channels_out, stride, stem=number == 0)
        for number, (side, (channels_in, channels_out, stride)) in enumerate(
            zip((28, 14, 14, 7), BLOCKS, strict=True)
        )
    ),
    classes=CLASSES,
)
IMAGE = (SHAPE.blocks[0].height, SHAPE.blocks[0].width, 1)


class FusedDepthwise(nn.Module):
    """Depthwise 3×3 (padding 1) + BatchNorm + ReLU in one launch: the layer of `kernels.dw_bn_relu`.

    (N, H, W, C) -> (N, ceil(H / stride), ceil(W / stride), C). BatchNorm's statistics are folded to a scale
    and a shift per channel in float32 when the layer is made.
    """

    def __init__(
        self,
        weight: mx.array,
        scale: mx.array,
        shift: mx.array,
        stride: int = 1,
        target: str | None = None,
        relu: bool = True,
    ):
        super().__init__()
        self.params = kernels.depthwise_params(weight, scale, shift)  # (11, C) float32
        mx.eval(self.params)
        self.stride, self.target, self.relu = stride, target, relu

    def __call__(self, x: mx.array) -> mx.array:
        """x: (N, H, W, C) float32, float16 or bfloat16 -> (N, ceil(H / stride), ceil(W / stride), C)."""
        return kernels.dw_bn_relu(x, self.params, self.stride, self.target, self.relu)


class Block(nn.Module):
    """Depthwise-separable residual block as the article writes it: every layer an operation of its own.

    (N, H, W, channels_in) -> (N, ceil(H / stride), ceil(W / stride), channels_out). The skip is the identity
    where the shape stays, else a 1×1 convolution with the block's stride + BatchNorm.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int, target: str | None):
        super().__init__()
        self.dw = nn.Conv2d(channels_in, channels_in, 3, stride, padding=1, groups=channels_in, bias=False)
        self.bn1 = nn.BatchNorm(channels_in)
        self.pw = nn.Conv2d(channels_in, channels_out, 1, bias=False)
        self.bn2 = nn.BatchNorm(channels_out)
        if stride != 1 or channels_in != channels_out:
            self.skip_conv = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)
            self.skip_bn = nn.BatchNorm(channels_out)
        self.stride, self.target = stride, target

    def __call__(self, x: mx.array) -> mx.array:
        """x: (N, H, W, channels_in) -> (N, ceil(H / stride), ceil(W / stride), channels_out)."""
        return nn.relu(self.pointwise(self.depthwise(x)) + self.skip(x))

    def depthwise(self, x: mx.array) -> mx.array:
        """Depthwise 3×3 + BatchNorm + ReLU."""
        return nn.relu(self.bn1(self.dw(x)))

    def pointwise(self, y: mx.array) -> mx.array:
        """Pointwise 1×1 + BatchNorm."""
        return self.bn2(self.pw(y))

    def skip(self, x: mx.array) -> mx.array:
        """Skip connection: the identity, or 1×1 convolution + BatchNorm."""
        return self.skip_bn(self.skip_conv(x)) if "skip_conv" in self else x

    def fold(self, dtype: mx.Dtype) -> None:
        """Derive from the parameters, in float32, what the block runs on, stored as `dtype`."""


class FoldedBlock(Block):
    """The block with every BatchNorm folded into its convolution: fewer operations, no custom kernel."""

    def fold(self, dtype: mx.Dtype) -> None:
        """Derive folded weights and biases."""
        super().fold(dtype)
        self._dw = FoldedConv(self.dw, self.bn1, dtype)
        self._pw = FoldedConv(self.pw, self.bn2, dtype)
        self._skip = FoldedConv(self.skip_conv, self.skip_bn, dtype) if "skip_conv" in self else None

    def depthwise(self, x: mx.array) -> mx.array:
        """Depthwise 3×3 with bias + ReLU."""
        return nn.relu(self._dw(x))

    def pointwise(self, y: mx.array) -> mx.array:
        """Pointwise 1×1 with bias."""
        return self._pw(y)

    def skip(self, x: mx.array) -> mx.array:
        """Skip connection: the identity, or 1×1 convolution with bias."""
        return self._skip(x) if self._skip is not None else x


class FusedBlock(Block):
    """The article's step: depthwise + BatchNorm + ReLU in one custom kernel, the rest as written."""

    def fold(self, dtype: mx.Dtype) -> None:
        """Make the fused layer."""
        super().fold(dtype)
        scale, shift = scale_and_shift(self.bn1)
        self._fused = FusedDepthwise(self.dw.weight, scale, shift, self.stride, self.target)

    def depthwise(self, x: mx.array) -> mx.array:
        """Depthwise 3×3 + BatchNorm + ReLU in one launch."""
        return self._fused(x)


class FusedFoldedBlock(FusedBlock, FoldedBlock):
    """The article's kernel with BatchNorm folded everywhere else too."""


class FoldedConv:
    """A convolution with its BatchNorm folded in: weight·scale and a bias, computed in float32."""

    def __init__(self, conv: nn.Conv2d, bn: nn.BatchNorm, dtype: mx.Dtype):
        scale, shift = scale_and_shift(bn)
        weight = conv.weight.astype(mx.float32) * scale[:, None, None, None]
        self.weight, self.bias = weight.astype(dtype), shift.astype(dtype)
        mx.eval(self.weight, self.bias)  # else mx.compile would fold anew at every call
        self.stride, self.padding, self.groups = conv.stride, conv.padding, conv.groups

    def __call__(self, x: mx.array) -> mx.array:
        """x: (N, H, W, C) -> (N, H', W', out)."""
        return mx.conv2d(x, self.weight, self.stride, self.padding, groups=self.groups) + self.bias


BLOCK_CLASSES = {
    "layers": Block,
    "folded": FoldedBlock,
    "fused": FusedBlock,
    "fused-folded": FusedFoldedBlock,
}
LAUNCH_LEVELS = ("block", "network")
LEVELS = (*BLOCK_CLASSES, *LAUNCH_LEVELS)


class Tunings(Protocol):
    """What replaces default tilings, such as `kernels.Tunings`."""

    def pick(self, level: str, batch: int) -> tuple[Any, ...] | None:
        """One tiling per block, or the network's one; None, or a None in it: the default."""


class FusedNetwork:
    """The network as a few launches: the layer of `kernels.network_by_blocks` and `kernels.network`.

    (N, 28, 28, 1) -> (N, 10). Level "block" is five launches (stem and block 0, three blocks, the head), or
    four where the last block's also computes the head; "network" is one. On the host either is one foreign
    call. The launches are prepared once per batch size; those of the last MAX_PLANS sizes are kept.
    """

    MAX_PLANS = 32  # at level "block" on the host each holds some MB, the activations of its chunks

    def __init__(self, level: str, weights: mx.array, target: str | None, tunings: Tunings | None = None):
        self.level, self.weights, self.tunings = level, weights, tunings
        self.target = target or kernels.default_target()
        self.parts = kernels.weight_parts(weights, SHAPE)
        self.plans: dict[tuple[int, mx.Dtype], Callable[[mx.array], mx.array]] = {}
        mx.eval(self.parts)

    def __call__(self, x: mx.array) -> mx.array:
        """x: (N, 28, 28, 1) float32 or float16, N ≥ 1 -> (N, 10). Raises ValueError for another shape."""
        shape, dtype = x.shape, x.dtype
        if shape[1:] != IMAGE or shape[0] == 0:  # the launches would read past x
            raise ValueError(f"x must be (N, 28, 28, 1) with N ≥ 1, got {shape}")
        size = shape[0]
        plan = self.plans.get((size, dtype))
        if plan is None:
            plan = kernels.make_plan(lambda count: self.calls(count, dtype, size), size, self.target)
            if len(self.plans) >= self.MAX_PLANS:
                self.plans.pop(next(iter(self.plans)), None)
            self.plans[size, dtype] = plan
        return plan(x)

    def calls(self, batch: int, dtype: mx.Dtype, whole: int | None = None) -> list[kernels.Call]:
        """The launches for `batch` images, which may be a chunk of a forward of `whole` images."""
        x = kernels.ARGUMENT
        found = self.tunings.pick(self.level, whole or batch) if self.tunings else None
        if self.level == "network" and not self.spreads(batch, dtype):
            tiling = found[0] if found else None
            return [kernels.network_call(x, batch, dtype, self.weights, SHAPE, self.target, tiling)]
        if self.level == "network":
            arrivals = mx.zeros((8,), mx.uint32)
            mx.eval(arrivals)  # else every forward would launch a kernel that fills it
            cut = kernels.default_spread_tiling(batch, kernels.multiprocessors())
            return [
                kernels.spread_call(x, batch, dtype, self.weights, SHAPE, arrivals, kernels.PREVIOUS, cut)
            ]
        return kernels.block_calls(x, batch, dtype, self.parts, SHAPE, self.target, found)

    def head_inside(self, batch: int, dtype: mx.Dtype) -> bool:
        """Whether level "block" computes the head in the last block's launch."""
        return self.calls(batch, dtype)[-1].kernel.name == "block_head"

    def spreads(self, batch: int, dtype: mx.Dtype) -> bool:
        """Whether level "network" spreads images over the GPU: few, or on one with little shared memory."""
        if self.target != "cuda" or batch <= kernels.SPREAD_BATCH:
            return self.target == "cuda"
        whole = kernels.network_call(kernels.ARGUMENT, batch, dtype, self.weights, SHAPE, "cuda")
        return not kernels.fits(whole, "cuda")


class DepthwiseMNIST(nn.Module):
    """The article's network at one fusion level. Images (N, 28, 28, 1) -> logits (N, 10).

    `target` is where custom kernels run (None: where MLX's default device is). After the parameters change,
    `fold()` must be called again; `load_pt_weights` does.
    """

    def __init__(
        self,
        level: str = "layers",
        dtype: mx.Dtype = mx.float32,
        target: str | None = None,
        tunings: Tunings | None = None,
    ):
        super().__init__()
        if level not in LEVELS:
            raise ValueError(f"unknown fusion level {level!r}: one of {', '.join(LEVELS)}")
        block = BLOCK_CLASSES.get(level, Block)
        self.level, self.dtype, self.target, self._tunings = level, dtype, target, tunings
        self.conv1 = nn.Conv2d(1, STEM_CHANNELS, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm(STEM_CHANNELS)
        self.stages = nn.Sequential(*(block(*sizes, target=target) for sizes in BLOCKS))
        self.fc = nn.Linear(BLOCKS[-1][1], CLASSES)

    def __call__(self, x: mx.array) -> mx.array:
        """x: (N, 28, 28, 1) normalised images -> (N, 10) logits."""
        x = x.astype(self.dtype)
        if self._launches is not None:
            return self._launches(x)
        x = self.stem(x)  # (N, 28, 28, 48)
        x = self.stages(x)  # (N, 7, 7, 192)
        return self.fc(mx.mean(x, axis=(1, 2)))

    def head_inside(self, batch: int) -> bool:
        """Whether `batch` images run in launches per block of which the last computes the head too."""
        launches = self._launches
        return launches is not None and self.level == "block" and launches.head_inside(batch, self.dtype)

    def stem(self, x: mx.array) -> mx.array:
        """3×3 convolution + BatchNorm + ReLU, (N, 28, 28, 1) -> (N, 28, 28, 48)."""
        if self._folded_stem is not None:
            return nn.relu(self._folded_stem(x))
        return nn.relu(self.bn1(self.conv1(x)))

    def fold(self) -> "DepthwiseMNIST":
        """Derive what the level runs on from the parameters, in float32, stored as `dtype`; returns self."""
        for block in self.stages.layers:
            block.fold(self.dtype)
        self._launches = None
        if self.level in LAUNCH_LEVELS:
            self._launches = FusedNetwork(self.level, pack_network(self), self.target, self._tunings)
        folded = isinstance(self.stages.layers[0], FoldedBlock)
        self._folded_stem = FoldedConv(self.conv1, self.bn1, self.dtype) if folded else None
        self.set_dtype(self.dtype)
        return self


def scale_and_shift(bn: nn.BatchNorm) -> tuple[mx.array, mx.array]:
    """BatchNorm in eval mode as y = x·scale + shift per channel, both (C,) float32.

    scale = gamma / sqrt(var + eps), shift = beta - mean·scale (Ioffe and Szegedy 2015, section 3.1).
    """
    gamma, beta, mean, var = (
        a.astype(mx.float32) for a in (bn.weight, bn.bias, bn.running_mean, bn.running_var)
    )
    scale = gamma * mx.rsqrt(var + bn.eps)
    return scale, beta - mean * scale


def fused_from_torch(conv: Any, bn: Any, relu: bool = True, target: str | None = None) -> FusedDepthwise:
    """The fused MLX layer of a PyTorch depthwise 3×3 convolution, its BatchNorm and, if `relu`, a ReLU.

    conv: torch.nn.Conv2d(C, C, 3, stride 1 or 2, padding=1, groups=C), any C, with or without bias;
    bn: torch.nn.BatchNorm2d(C), used with its running statistics, as in eval mode. The layer takes NHWC.
    Raises ValueError naming what does not fit.
    """
    c = conv.out_channels
    needed = {
        "kernel_size": (3, 3),
        "padding": (1, 1),
        "dilation": (1, 1),
        "groups": c,
        "in_channels": c,
        "padding_mode": "zeros",
    }
    wrong = [
        f"{name} is {getattr(conv, name)}" for name, value in needed.items() if getattr(conv, name) != value
    ]
    if conv.stride not in ((1, 1), (2, 2)):
        wrong.append(f"stride is {conv.stride}")
    if bn.num_features != c:
        wrong.append(f"BatchNorm has {bn.num_features} channels")
    if bn.running_var is None:
        wrong.append("BatchNorm keeps no running statistics")
    if wrong:
        raise ValueError(
            f"not a depthwise 3×3 convolution over {c} channels with BatchNorm: {', '.join(wrong)}"
        )

    def array(tensor: Any, default: float) -> mx.array:
        return mx.full((c,), default) if tensor is None else mx.array(tensor.detach().cpu().float().numpy())

    scale = array(bn.weight, 1.0) * mx.rsqrt(array(bn.running_var, 1.0) + bn.eps)
    shift = array(bn.bias, 0.0) + (array(conv.bias, 0.0) - array(bn.running_mean, 0.0)) * scale
    weight = perm_conv(mx.array(conv.weight.detach().cpu().float().numpy()))
    return FusedDepthwise(weight, scale, shift, conv.stride[0], target, relu)


def pack_network(model: DepthwiseMNIST) -> mx.array:
    """The model's weights, BatchNorm folded in, as the one float32 array that `kernels.network` reads."""
    target = model.target or kernels.default_target()
    stem = folded_matrix(model.conv1, model.bn1)
    parts = []
    for block, shape in zip(model.stages.layers, SHAPE.blocks, strict=True):
        taps, bias = folded_matrix(block.dw, block.bn1)  # (9, C), (C,)
        matrix, out_bias = folded_matrix(block.pw, block.bn2)  # (C, N), (N,)
        if shape.projected:  # the skip convolution's rows below the pointwise convolution's
            skip, skip_bias = folded_matrix(block.skip_conv, block.skip_bn)
            matrix, out_bias = mx.concatenate([matrix, skip]), out_bias + skip_bias
        parts.append(
            kernels.pack_block(shape, taps, bias, matrix, out_bias, stem if shape.stem else None, target)
        )
    return mx.concatenate([*parts, kernels.pack_head(model.fc.weight, model.fc.bias)])


def folded_matrix(conv: nn.Conv2d, bn: nn.BatchNorm) -> tuple[mx.array, mx.array]:
    """A convolution with its BatchNorm folded in, as a matrix (kH·kW·in / groups, out) and a bias (out,)."""
    scale, shift = scale_and_shift(bn)
    weight = conv.weight.astype(mx.float32)  # (out, kH, kW, in / groups)
    return weight.reshape(weight.shape[0], -1).T * scale, shift


def perm_conv(weight: Any) -> Any:
    """A convolution weight from PyTorch's layout to MLX's: (out, in, kH, kW) -> (out, kH, kW, in)."""
    return weight.transpose(0, 2, 3, 1)


def perm_flat_linear(weight: Any, channels: int, height: int, width: int) -> Any:
    """A linear weight that follows a flatten: (out, C·H·W) for PyTorch's layout -> (out, H·W·C) for MLX's."""
    parts = weight.reshape(weight.shape[0], channels, height, width)
    return parts.transpose(0, 2, 3, 1).reshape(weight.shape[0], -1)


def mlx_name(name: str) -> str:
    """The MLX name of a PyTorch state_dict entry of this network."""
    for old, new in (("conv1.0.", "conv1."), ("conv1.1.", "bn1."), ("stages.", "stages.layers.")):
        if name.startswith(old):
            name = new + name.removeprefix(old)
            break
    return name.replace(".skip.0.", ".skip_conv.").replace(".skip.1.", ".skip_bn.")


def load_pt_weights(pt_path: Path | str, model: DepthwiseMNIST) -> DepthwiseMNIST:
    """Fill `model` from a PyTorch checkpoint, fold, and set eval mode; returns `model`.

    Raises Fault listing every missing, unexpected and wrongly shaped key, or naming what else is wrong.
    """
    from torch_model import read_checkpoint  # PyTorch is needed for this format only

    return _fill(model, list(ported(read_checkpoint(pt_path)).items()), shown(pt_path))


def ported(state: Mapping[str, Any]) -> dict[str, mx.array]:
    """PyTorch's state_dict (CPU tensors) under MLX's names and in MLX's layout."""
    arrays = {}
    for name, tensor in state.items():
        array = mx.array(tensor.numpy())
        arrays[mlx_name(name)] = perm_conv(array) if array.ndim == 4 else array
    return arrays


def load_exported(path: Path | str, model: DepthwiseMNIST) -> DepthwiseMNIST:
    """Fill `model` from a file of `export.py`, fold, and set eval mode; returns `model`. Imports no PyTorch.

    Raises Fault listing every missing, unexpected and wrongly shaped key, or naming what else is wrong.
    """
    arrays, _ = read_exported(path)
    name = shown(path)
    expected = {key: value.shape for key, value in flat(model).items()}
    faults = {
        "missing": [key for key in expected if key not in arrays],
        "unexpected": [key for key in arrays if key not in expected],
        "wrong shape": [
            f"{key} is {arrays[key].shape} instead of {shape}"
            for key, shape in expected.items()
            if key in arrays and arrays[key].shape != shape
        ],
    }
    parts = [f"{label}: {', '.join(keys)}" for label, keys in faults.items() if keys]
    if parts:
        raise Fault(f"{name} does not hold this network ({'; '.join(parts)}); export the checkpoint again.")
    return _fill(model, list(arrays.items()), name)


def read_exported(path: Path | str) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Arrays and metadata of a file of `export.py`; the layout is what the metadata says, never guessed.

    Raises Fault for a file that is missing, damaged, of another version or layout, or not finite.
    """
    path = Path(path)
    name = shown(path)
    if not path.is_file():
        raise Fault(f"{name} does not exist; `python scr/export.py` makes it.")
    try:
        # The format is named since MLX otherwise goes by the file's suffix.
        loaded = mx.load(str(path), format="safetensors", return_metadata=True)
        arrays, metadata = cast(tuple[dict[str, mx.array], dict[str, str]], loaded)
        mx.eval(arrays)
    except (RuntimeError, ValueError, OSError) as error:
        raise Fault(f"{name} is damaged or no safetensors file; export the checkpoint again.") from error
    for key, wanted in (("format_version", EXPORT_VERSION), ("layout", EXPORT_LAYOUT)):
        if metadata.get(key) != wanted:
            found = metadata.get(key, "missing")
            raise Fault(f"{name}: metadata {key} is {found}, not {wanted}; make the file with export.py.")
    for key, array in arrays.items():
        if not mx.issubdtype(array.dtype, mx.floating):
            raise Fault(f"{name}: {key} is {array.dtype}, not floating-point numbers.")
        if not mx.all(mx.isfinite(array)).item():
            raise Fault(f"{name}: {key} holds a value that is not finite; train again.")
    return arrays, metadata


def is_exported(path: Path | str) -> bool:
    """Whether the file is a safetensors file: eight bytes of header length, then a JSON object."""
    try:
        with open(path, "rb") as file:
            start = file.read(9)
    except OSError:
        return False
    return len(start) == 9 and start[8:] == b"{"


def _fill(model: DepthwiseMNIST, weights: list[tuple[str, mx.array]], source: str) -> DepthwiseMNIST:
    """Put `weights` into `model`, strictly, then fold and set eval mode; returns `model`."""
    try:
        model.load_weights(weights, strict=True)
    except ValueError as error:
        raise Fault(f"{source} does not fit this network: {error}") from error
    model.eval()
    model.fold()
    mx.eval(model.parameters())
    return model


def count_params(model: nn.Module) -> int:
    """Number of parameter elements, BatchNorm's running statistics among them (103,786 for this network)."""
    return sum(value.size for value in flat(model).values())


def flat(model: nn.Module) -> dict[str, mx.array]:
    """The parameters of `model` by dotted name."""
    return dict(cast(list[tuple[str, mx.array]], tree_flatten(model.parameters())))


def get_model(
    level: str = "layers",
    checkpoint: Path | str | None = None,
    dtype: mx.Dtype = mx.float32,
    target: str | None = None,
    tunings: Tunings | None = None,
) -> DepthwiseMNIST:
    """The trained network at a fusion level, in eval mode; `checkpoint` defaults to output/best_model.pth.

    `tunings` replace default tilings at the levels "block" and "network".

    It may be a PyTorch checkpoint or a file of `export.py`; the latter is read without importing PyTorch.
    Raises Fault for a checkpoint that is missing or does not fit, ValueError for an unknown level.
    """
    path, model = checkpoint or CHECKPOINT, DepthwiseMNIST(level, dtype, target, tunings)
    return load_exported(path, model) if is_exported(path) else load_pt_weights(path, model)
