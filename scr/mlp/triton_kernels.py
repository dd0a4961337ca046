"""Two hand-written Triton kernels: the GeGLU product, and two Linear+ReLU layers in one launch.

Importing this module needs triton; import it only where a kernel is called. With TRITON_INTERPRET=1 in the
environment before the import both run on a CPU, for checks (never for timing).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Columns per program and warps. Fixed, so that a new shape needs no tuning run; the study sweeps both and
# reports what tuning would gain.
GEGLU_BLOCK, GEGLU_WARPS = 1024, 4


@triton.jit
def geglu_kernel(gate, up, out, hidden, gate_stride, up_stride, BLOCK: tl.constexpr):
    """One program computes BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    g = tl.load(gate + row * gate_stride + column, mask=inside).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside).to(tl.float32)
    # tanh(z) = 1 - 2/(exp(2z) + 1): one exponential; for large |z| it goes to ±1 without overflow trouble.
    z = 0.7978845608028654 * (g + 0.044715 * g * g * g)
    tanh = 1.0 - 2.0 / (tl.exp(2.0 * z) + 1.0)
    # Eager rounds GELU to the storage type before it multiplies; keeping fp32 here is closer to float64.
    value = 0.5 * g * (1.0 + tanh) * u
    tl.store(out + row * hidden + column, value.to(out.dtype.element_ty), mask=inside)


def geglu(gate: Tensor, up: Tensor, block: int = GEGLU_BLOCK, warps: int = GEGLU_WARPS) -> Tensor:
    """gelu(gate) · up with the tanh form of GELU.

    gate, up: (rows, hidden), any row stride, columns contiguous, same dtype; so the two halves of a merged
    projection need no copy. Returns (rows, hidden), contiguous. Raises ValueError for other layouts.
    """
    if gate.shape != up.shape or gate.ndim != 2 or gate.dtype != up.dtype:
        raise ValueError(f"gate and up must be two matrices alike, not {gate.shape} and {up.shape}")
    if gate.stride(1) != 1 or up.stride(1) != 1:
        raise ValueError("the columns of gate and up must be contiguous")
    rows, hidden = gate.shape
    out = torch.empty(rows, hidden, dtype=gate.dtype, device=gate.device)
    if rows and hidden:
        grid = (rows, triton.cdiv(hidden, block))
        geglu_kernel[grid](gate, up, out, hidden, gate.stride(0), up.stride(0), BLOCK=block, num_warps=warps)
    return out


def geglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """The same in plain operations."""
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


@triton.jit
def two_layer_kernel(
    x,
    w1,
    b1,
    w2,
    b2,
    out,
    rows,
    k_size,
    h_size,
    n_size,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
):
    """One program computes BM rows × BN columns of the output; the hidden layer never reaches memory.

    It walks the hidden layer in tiles of BH. Each tile is a loop over K, gets bias and ReLU, and is at once
    multiplied into the output's accumulator. Programs that share rows compute the hidden layer again.
    """
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    row_in, column_in = row < rows, column < n_size
    result = tl.zeros((BM, BN), dtype=tl.float32)
    for h0 in range(0, h_size, BH):
        h = h0 + tl.arange(0, BH)
        h_in = h < h_size
        hidden = tl.zeros((BM, BH), dtype=tl.float32)
        for k0 in range(0, k_size, BK):
            k = k0 + tl.arange(0, BK)
            k_in = k < k_size
            a = tl.load(
                x + row[:, None].to(tl.int64) * k_size + k[None, :],
                mask=row_in[:, None] & k_in[None, :],
                other=0.0,
            )  # (BM, BK)
            b = tl.load(
                w1 + h[None, :].to(tl.int64) * k_size + k[:, None],
                mask=h_in[None, :] & k_in[:, None],
                other=0.0,
            )  # (BK, BH): nn.Linear stores (out, in)
            hidden = tl.dot(a, b, hidden, input_precision="ieee")
        bias = tl.load(b1 + h, mask=h_in, other=0.0).to(tl.float32)
        # A padded hidden unit is relu(0 + 0) = 0 and meets weights loaded as 0.
        hidden = tl.maximum(hidden + bias[None, :], 0.0)
        w = tl.load(
            w2 + column[None, :].to(tl.int64) * h_size + h[:, None],
            mask=column_in[None, :] & h_in[:, None],
            other=0.0,
        )  # (BH, BN)
        result = tl.dot(hidden.to(w.dtype), w, result, input_precision="ieee")
    bias = tl.load(b2 + column, mask=column_in, other=0.0).to(tl.float32)
    result = tl.maximum(result + bias[None, :], 0.0)
    tl.store(
        out + row[:, None].to(tl.int64) * n_size + column[None, :],
        result.to(out.dtype.element_ty),
        mask=row_in[:, None] & column_in[None, :],
    )


def two_layers_tile(n_size: int) -> tuple[int, int, int, int]:
    """(BM, BN, BH, BK): as many output columns per program as registers allow, for less recomputation."""
    return 16, min(256, max(16, triton.next_power_of_2(n_size))), 64, 64


def two_layers(
    x: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    tile: tuple[int, int, int, int] | None = None,
) -> Tensor:
    """relu(relu(x · w1ᵀ + b1) · w2ᵀ + b2) in one launch.

    x: (rows, k), w1: (h, k), b1: (h,), w2: (n, h), b2: (n,), contiguous, all float32 or all
    float16; fp32 accumulators. Returns (rows, n). `tile` is (BM, BN, BH, BK), powers of two, at least 16.
    Raises ValueError for other dtypes, and for sizes or layouts that do not fit together.
    """
    rows, k_size = x.shape
    h_size, n_size = len(w1), len(w2)
    if w1.shape != (h_size, k_size) or w2.shape != (n_size, h_size) or len(b1) != h_size or len(b2) != n_size:
        raise ValueError(
            f"sizes do not chain: x {tuple(x.shape)}, w1 {tuple(w1.shape)}, w2 {tuple(w2.shape)}"
        )
    operands = (x, w1, b1, w2, b2)
    kinds = {tensor.dtype for tensor in operands}
    if not all(tensor.is_contiguous() for tensor in operands):
        raise ValueError("all operands must be contiguous")
    if kinds not in ({torch.float32}, {torch.float16}):
        raise ValueError(f"all operands must be float32 or all float16, not {sorted(map(str, kinds))}")
    bm, bn, bh, bk = tile or two_layers_tile(n_size)
    out = torch.empty(rows, n_size, dtype=x.dtype, device=x.device)
    if rows and n_size:
        grid = (triton.cdiv(rows, bm), triton.cdiv(n_size, bn))
        two_layer_kernel[grid](
            x, w1, b1, w2, b2, out, rows, k_size, h_size, n_size, BM=bm, BN=bn, BH=bh, BK=bk
        )
    return out


def two_layers_reference(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """The same in plain operations."""
    hidden = torch.relu(torch.nn.functional.linear(x, w1, b1))
    return torch.relu(torch.nn.functional.linear(hidden, w2, b2))
