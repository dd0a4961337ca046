"""Blocks of other people's shapes: the depthwise-separable block alone, at the sizes of MobileNet.

The block is the network's (depthwise, pointwise, skip, all with BatchNorm), its weights random. The study is
"shapes", its cases are named by the input, HEIGHT×WIDTH×CHANNELS, and the stride.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness import causal
from harness.backends import NO_TF32, MlxBackend, Options, TorchBackend
from harness.cli import Fault
from harness.measure import Candidate, Case

BUDGET_SHARE = 0.3  # of a cell's budget


@dataclass(frozen=True)
class Shape:
    """A block's input (side × side × channels), output channels and stride."""

    side: int
    channels: int
    outputs: int
    stride: int

    @property
    def name(self) -> str:
        """As the case is called."""
        return f"{self.side}×{self.side}×{self.channels}" + (" stride 2" if self.stride == 2 else "")


# Howard et al. 2017, table 1: one layer of each resolution; the second with stride 2.
SHAPES = {
    "mobilenet": (
        Shape(112, 32, 64, 1),
        Shape(56, 128, 256, 2),
        Shape(28, 256, 256, 1),
        Shape(14, 512, 512, 1),
        Shape(7, 1024, 1024, 1),
    )
}
SETS = (*SHAPES, "llm")  # the last one is of sequences: causal.py
BACKENDS = {  # backend: (worker, factory, its own arguments)
    "torch": ("torch", "torch_block", {}),
    "torch-channels-last": ("torch", "torch_block", {"variant": "channels-last"}),
    "torch-compile": ("torch", "torch_block", {"variant": "compile"}),
    "mlx": ("mlx", "mlx_block", {"level": "layers"}),
    "mlx-folded": ("mlx", "mlx_block", {"level": "folded"}),
    "mlx-fused": ("mlx", "mlx_block", {"level": "fused"}),
    "mlx-block": ("mlx", "mlx_block", {"level": "block"}),
}


def cases(
    shapes: str, backends: tuple[str, ...], options: Options, batch_sizes: tuple[int, ...]
) -> list[Case]:
    """One case per shape of the set `shapes`, for those of `backends` that a block can run on alone."""
    if shapes not in SETS:
        raise Fault(f"unknown shapes {shapes!r}; known are {', '.join(SETS)}.")
    if shapes == "llm":
        return causal.cases(backends, options)
    return [
        Case(
            study="shapes",
            name=shape.name,
            batch_sizes=batch_sizes,
            inputs=inputs(shape),
            candidates=tuple(candidate(name, shape, options) for name in backends if name in BACKENDS),
            reference=reference(shape),
            dtype=options.dtype,
            budget_share=BUDGET_SHARE,
        )
        for shape in SHAPES[shapes]
    ]


def candidate(name: str, shape: Shape, options: Options) -> Candidate:
    """A backend on a block."""
    framework, factory, own = BACKENDS[name]
    arguments = {"shape": shape, "dtype": options.dtype} | own
    if framework == "torch":
        arguments |= {"device": options.device, "threads": options.threads}
        return Candidate(name, "torch", f"harness.shapes:{factory}", arguments)
    arguments |= {"target": options.target}
    return Candidate(name, "mlx", f"harness.shapes:{factory}", arguments, "mlx.core", NO_TF32)


def reference(shape: Shape) -> Candidate:
    """The float64 answer, in a process of its own."""
    arguments = {"shape": shape, "dtype": "float64", "device": "cpu"}
    return Candidate("reference", "reference", "harness.shapes:torch_block", arguments, "torch")


def inputs(shape: Shape) -> Callable[[int], np.ndarray]:
    """Batch size -> images (N, C, H, W) float32, normal, rectified as a ReLU before the block leaves them."""

    def images(batch_size: int) -> np.ndarray:
        size = (batch_size, shape.channels, shape.side, shape.side)
        return np.maximum(np.random.default_rng(batch_size).normal(size=size), 0).astype(np.float32)

    return images


def weights(shape: Shape) -> dict[str, np.ndarray]:
    """Random weights by PyTorch's names; each convolution keeps the size of its input's values."""
    random = np.random.default_rng(shape.side)
    sizes = {"dw": (shape.channels, 1, 3, 3), "pw": (shape.outputs, shape.channels, 1, 1)}
    norms = {"bn1": shape.channels, "bn2": shape.outputs}
    if shape.stride != 1 or shape.channels != shape.outputs:
        sizes["skip.0"] = (shape.outputs, shape.channels, 1, 1)
        norms["skip.1"] = shape.outputs
    found = {
        f"{name}.weight": random.normal(size=size) / np.sqrt(np.prod(size[1:]))
        for name, size in sizes.items()
    }
    for name, channels in norms.items():
        found[f"{name}.weight"] = random.uniform(0.5, 1.5, channels)
        found[f"{name}.bias"] = random.normal(0.2, 0.3, channels)
        found[f"{name}.running_mean"] = random.normal(0.3, 0.3, channels)
        found[f"{name}.running_var"] = random.uniform(0.5, 2.0, channels)
    return {name: value.astype(np.float32) for name, value in found.items()}


def torch_block(shape: Shape, **arguments: Any) -> TorchBackend:
    """The block in PyTorch."""
    import torch

    from torch_model import DepthwiseSeparableConv

    block = DepthwiseSeparableConv(shape.channels, shape.outputs, shape.stride)
    state = {name: torch.from_numpy(value) for name, value in weights(shape).items()}
    counters = block.load_state_dict(state, strict=False).missing_keys
    assert all(name.endswith("num_batches_tracked") for name in counters)
    return TorchBackend(block.eval(), **arguments)


def mlx_block(shape: Shape, level: str, dtype: str, target: str | None) -> MlxBackend:
    """The block in MLX: as written, BatchNorm folded and compiled, with the fused layer, or in one launch."""
    import mlx.core as mx
    import mlx.nn as nn

    import kernels
    import mlx_model
    from kernels.blocks import block_call

    sizes = (shape.channels, shape.outputs, shape.stride)
    storage = getattr(mx, dtype)

    def make() -> Callable[[Any], Any]:
        block = mlx_model.BLOCK_CLASSES.get(level, mlx_model.Block)(*sizes, target=target)
        named = []
        for name, value in weights(shape).items():
            bare = name.replace("skip.0.", "skip_conv.").replace("skip.1.", "skip_bn.")
            named.append((bare, mx.array(value if value.ndim < 4 else mlx_model.perm_conv(value))))
        block.load_weights(named)
        block.eval()
        block.fold(storage)
        if level == "block":
            return one_launch(block)
        block.set_dtype(storage)
        return block

    def one_launch(block: nn.Module) -> Callable[[Any], Any]:
        form = kernels.BlockShape(shape.side, shape.side, *sizes)
        taps, bias = mlx_model.folded_matrix(block.dw, block.bn1)
        matrix, out_bias = mlx_model.folded_matrix(block.pw, block.bn2)
        if "skip_conv" in block:
            skip, skip_bias = mlx_model.folded_matrix(block.skip_conv, block.skip_bn)
            matrix, out_bias = mx.concatenate([matrix, skip]), out_bias + skip_bias
        packed = kernels.pack_block(form, taps, bias, matrix, out_bias, target=target)
        mx.eval(packed)
        plans: dict[int, Callable[[Any], Any]] = {}

        def run(x: Any) -> Any:
            """One launch, prepared once per batch size."""
            if len(x) not in plans:
                plans[len(x)] = kernels.make_plan(calls, len(x), target or kernels.default_target())
            return plans[len(x)](x)

        def calls(batch: int) -> list[kernels.Call]:
            where = target or kernels.default_target()
            return [block_call(kernels.ARGUMENT, batch, storage, packed, form, None, where)]

        return run

    custom = level in ("fused", "block")
    return MlxBackend(
        make, dtype, compiled=level == "folded", custom=custom, target=target if custom else None
    )
