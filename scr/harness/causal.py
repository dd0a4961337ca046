"""Depthwise causal convolution + bias + residual at the shapes of language models: `--shapes llm`.

The layer stands between attention and feed-forward. The study is "shapes", its cases are named by the
sequence, LENGTH×WIDTH causal. A batch is float32 (B, width, length, 1), so that the backends for images serve
it; the networks in here drop and restore the last axis.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.backends import NO_TF32, MlxBackend, Options, TorchBackend
from harness.measure import Candidate, Case

TAPS = 4
BUDGET_SHARE = 0.2  # of a cell's budget


@dataclass(frozen=True)
class Sequence:
    """A sequence: its length in tokens and its width in channels."""

    length: int
    width: int

    @property
    def name(self) -> str:
        """As the case is called."""
        return f"{self.length}×{self.width} causal"


# One token (decoding), a short prompt, long ones; widths from a small model's to a 7-billion one's.
SEQUENCES = tuple(
    Sequence(length, width)
    for length, width in ((1, 512), (1, 4096), (64, 512), (64, 4096), (1024, 1024), (4096, 512), (4096, 4096))
)
BACKENDS: dict[str, tuple[str, str, dict[str, Any]]] = {  # backend: (worker, factory, its own arguments)
    "torch": ("torch", "torch_layer", {}),
    "torch-compile": ("torch", "torch_layer", {"variant": "compile"}),
    "mlx": ("mlx", "mlx_layer", {"fused": False, "compiled": False}),
    "mlx-compile": ("mlx", "mlx_layer", {"fused": False, "compiled": True}),
    "mlx-fused": ("mlx", "mlx_layer", {"fused": True, "compiled": False}),
}


def cases(backends: tuple[str, ...], options: Options) -> list[Case]:
    """One case per sequence, batch 1, for those of `backends` that the layer has."""
    return [
        Case(
            study="shapes",
            name=sequence.name,
            batch_sizes=(1,),
            inputs=inputs(sequence),
            candidates=tuple(candidate(name, sequence, options) for name in backends if name in BACKENDS),
            reference=reference(sequence),
            dtype=options.dtype,
            budget_share=BUDGET_SHARE,
        )
        for sequence in SEQUENCES
    ]


def candidate(name: str, sequence: Sequence, options: Options) -> Candidate:
    """A backend on the layer."""
    framework, factory, own = BACKENDS[name]
    arguments = {"width": sequence.width, "dtype": options.dtype} | own
    if framework == "torch":
        arguments |= {"device": options.device, "threads": options.threads}
        return Candidate(name, "torch", f"harness.causal:{factory}", arguments)
    return Candidate(
        name,
        "mlx",
        f"harness.causal:{factory}",
        arguments | {"target": options.target},
        "mlx.core",
        NO_TF32,
    )


def reference(sequence: Sequence) -> Candidate:
    """The float64 answer, in a process of its own."""
    arguments = {"width": sequence.width, "dtype": "float64", "device": "cpu"}
    return Candidate("reference", "reference", "harness.causal:torch_layer", arguments, "torch")


def inputs(sequence: Sequence) -> Callable[[int], np.ndarray]:
    """Batch size -> normal float32 (B, width, length, 1)."""

    def tokens(batch_size: int) -> np.ndarray:
        size = (batch_size, sequence.width, sequence.length, 1)
        return np.random.default_rng(batch_size).normal(size=size).astype(np.float32)

    return tokens


def weights(width: int) -> np.ndarray:
    """Random taps, oldest first, and bias: (TAPS + 1, width) float32."""
    scale = np.array([TAPS**-0.5] * TAPS + [0.3])[:, None]
    return (np.random.default_rng(width).normal(size=(TAPS + 1, width)) * scale).astype(np.float32)


def torch_layer(width: int, **arguments: Any) -> TorchBackend:
    """The layer in PyTorch: conv1d over the past, bias, residual."""
    import torch
    from torch import nn

    class Layer(nn.Module):
        """(B, width, L, 1) -> the same."""

        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(width, width, TAPS, padding=TAPS - 1, groups=width)
            packed = torch.from_numpy(weights(width))
            self.conv.load_state_dict({"weight": packed[:-1].T[:, None], "bias": packed[-1]})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """x: (B, width, L, 1)."""
            x = x[..., 0]
            return (self.conv(x)[..., : x.shape[-1]] + x)[..., None]

    return TorchBackend(Layer().eval(), **arguments)


def mlx_layer(width: int, fused: bool, compiled: bool, dtype: str, target: str | None) -> MlxBackend:
    """The layer in MLX: as operations (pad, conv1d, bias, residual), or in one launch."""
    import mlx.core as mx

    import kernels

    def make() -> Callable[[Any], Any]:
        params = mx.array(weights(width))
        taps = params[:-1].T[:, :, None].astype(getattr(mx, dtype))  # (width, TAPS, 1)
        bias = params[-1].astype(getattr(mx, dtype))
        mx.eval(taps, bias)

        def as_written(x: mx.array) -> mx.array:
            x = x[:, :, 0]  # (B, L, 1, width) -> (B, L, width)
            padded = mx.pad(x, [(0, 0), (TAPS - 1, 0), (0, 0)])
            return (mx.conv1d(padded, taps, groups=width) + bias + x)[:, :, None]

        def in_one_launch(x: mx.array) -> mx.array:
            return kernels.causal_conv1d(x[:, :, 0], params, target=target)[:, :, None]

        return in_one_launch if fused else as_written

    return MlxBackend(make, dtype, compiled=compiled, custom=fused, target=target if fused else None)
