"""The modules under study, small and plain. Rows come first: x is (rows, width), as in a flattened batch.

Every module has a float64 twin with the same (already rounded) weights: `twin`. It is the reference.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
}
NORMS: dict[str, Callable[[int], nn.Module]] = {"layernorm": nn.LayerNorm, "rmsnorm": nn.RMSNorm}


def geglu_product(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) · up with the tanh form of GELU, as two operators."""
    return functional.gelu(gate, approximate="tanh") * up


class MatmulAdd(nn.Module):
    """x @ b + c for square matrices: the article's first example."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.randn(n, n) / n**0.5)
        self.c = nn.Parameter(torch.randn(n, n))

    def forward(self, x: Tensor) -> Tensor:
        """(n, n) → (n, n)."""
        return torch.matmul(x, self.b) + self.c


def relu_mlp(width: int, layers: int) -> nn.Sequential:
    """`layers` times Linear with bias and ReLU, all of `width`."""
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())))


class Geglu(nn.Module):
    """down(gelu(gate(x)) · up(x)) without bias; `product` computes the middle from gate and up."""

    def __init__(
        self, width: int, hidden: int, product: Callable[[Tensor, Tensor], Tensor] = geglu_product
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) → (rows, width)."""
        return self.down(self.product(self.gate(x), self.up(x)))


class MergedGeglu(nn.Module):
    """`Geglu` with gate and up as one product of concatenated weights."""

    def __init__(self, source: Geglu, product: Callable[[Tensor, Tensor], Tensor] = geglu_product) -> None:
        super().__init__()
        hidden, width = source.gate.weight.shape
        like = {"device": source.gate.weight.device, "dtype": source.gate.weight.dtype}
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False, **like)
        self.gate_up.weight = nn.Parameter(torch.cat([source.gate.weight, source.up.weight]).detach())
        self.down = source.down
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) → (rows, width)."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # views: rows of 2·hidden, hidden of them each
        return self.down(self.product(gate, up))


class Qkv(nn.Module):
    """Three projections with bias of one input, summed so that the result is one tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) → (rows, 3·width)."""
        return torch.cat([self.q(x), self.k(x), self.v(x)], dim=-1)


class NormActLinear(nn.Module):
    """linear(activation(norm(x))) with bias."""

    def __init__(self, norm: str, activation: str, width: int) -> None:
        super().__init__()
        self.norm = NORMS[norm](width)
        self.activation = ACTIVATIONS[activation]
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) → (rows, width)."""
        return self.linear(self.activation(self.norm(x)))


class BrokenMlp(nn.Module):
    """A ReLU MLP with a forced graph break in the middle, as a stray print or `.item()` would cause."""

    def __init__(self, source: nn.Sequential) -> None:
        super().__init__()
        middle = len(source) // 2
        self.first, self.second = source[:middle], source[middle:]

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) → (rows, width)."""
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def twin(module: nn.Module) -> nn.Module:
    """The module in float64 on the CPU, with the weights as they are after rounding; eager products only."""
    double = copy.deepcopy(module).cpu().double()
    for part in double.modules():
        if isinstance(part, (Geglu, MergedGeglu)):
            part.product = geglu_product
    return double
