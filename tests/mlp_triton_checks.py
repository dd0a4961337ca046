"""Errors of our Triton kernels against float64, as JSON, for test_mlp_triton.py (TRITON_INTERPRET=1)."""

import itertools
import json

import torch

from harness.tolerances import compare
from mlp import triton_kernels as kernels

GEGLU_ROWS = (1, 7, 33)
GEGLU_HIDDEN = (1, 31, 32, 33, 1023, 1025)
DTYPES = ("float32", "float16", "bfloat16")
# rows, inputs, hidden, outputs: around the tile of 16 × 256 columns, 64 deep
TWO_LAYERS = ((1, 1, 1, 1), (7, 48, 33, 65), (16, 64, 64, 64), (17, 65, 129, 257), (33, 130, 70, 31))


def main() -> None:
    torch.manual_seed(5)
    found = {}
    for rows, hidden, dtype in itertools.product(GEGLU_ROWS, GEGLU_HIDDEN, DTYPES):
        both = (3 * torch.randn(rows, 2 * hidden)).to(getattr(torch, dtype))
        gate, up = both.chunk(2, dim=-1)  # strided rows
        found[f"geglu {rows}×{hidden} {dtype}"] = check(kernels.geglu(gate, up), gate, up, dtype)
    extreme = torch.tensor([[-1e4, -60.0, -0.0, 0.0, 60.0, 1e4]])
    found["geglu extremes"] = check(kernels.geglu(extreme, extreme), extreme, extreme, "float32")
    for (rows, k, h, n), dtype in itertools.product(TWO_LAYERS, DTYPES[:2]):
        shapes = ((rows, k), (h, k), (h,), (n, h), (n,))
        kind = getattr(torch, dtype)
        operands = [(torch.randn(shape) / shape[-1] ** 0.5).to(kind) for shape in shapes]
        truth = kernels.two_layers_reference(*(operand.double() for operand in operands))
        found[f"two layers {rows}×{k}→{h}→{n} {dtype}"] = compare(
            kernels.two_layers(*operands).float().numpy(), truth.numpy(), dtype
        )
    found["empty"] = {"passed": kernels.geglu(torch.empty(0, 4), torch.empty(0, 4)).shape == (0, 4)}
    for name, arguments in {
        "shapes": (torch.ones(2, 3), torch.ones(2, 4)),
        "columns": (torch.ones(4, 6)[:, ::2], torch.ones(4, 3)),
    }.items():
        try:
            kernels.geglu(*arguments)
            found[f"refuses {name}"] = {"passed": False}
        except ValueError:
            found[f"refuses {name}"] = {"passed": True}
    operands = [torch.ones(2, 2), torch.ones(2, 2), torch.ones(2), torch.ones(2, 2), torch.ones(2)]
    for name, wrong in {
        "mixed dtypes": (1, torch.ones(2, 2).half()),
        "chain": (3, torch.ones(2, 3)),
        "layout": (0, torch.ones(2, 4)[:, ::2]),
    }.items():
        at, operand = wrong
        try:
            kernels.two_layers(*operands[:at], operand, *operands[at + 1 :])
            found[f"refuses {name}"] = {"passed": False}
        except ValueError:
            found[f"refuses {name}"] = {"passed": True}
    print(json.dumps(found))


def check(result: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, dtype: str) -> dict:
    truth = kernels.geglu_reference(gate.double(), up.double())
    return compare(result.float().numpy(), truth.numpy(), dtype)


if __name__ == "__main__":
    main()
