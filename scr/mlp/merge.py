"""Which Linear layers may become one, as a torch.fx pass.

    merged, done = merge_linears(module.eval())

Two rules are exact up to rounding:

    shared input   y₁ = W₁x + b₁, y₂ = W₂x + b₂   →  one product with [W₁; W₂], its parts views
    product        y = W₂(W₁x + b₁) + b₂          →  one product with W₂W₁, bias W₂b₁ + b₂

The second holds only when nothing stands between the layers: with an activation there is no such matrix.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import fx, nn

from harness.cli import Fault


def merge_linears(module: nn.Module) -> tuple[fx.GraphModule, list[str]]:
    """A copy of `module` for inference with its legal merges done, and one line per merge.

    Layers are merged by product only where that does not add work. A layer that is called twice, has hooks,
    or whose intermediate result is used elsewhere stays as it is. Raises Fault for a module in training mode
    (merged weights would not be trained alike) and for one that torch.fx cannot trace.
    """
    if module.training:
        raise Fault("merging is for inference; call .eval() on the module first.")
    try:
        traced = fx.symbolic_trace(module)
    except Exception as error:  # fx raises whatever the traced code raises on a proxy
        raise Fault(f"torch.fx cannot trace {type(module).__name__}: {error}") from error
    done: list[str] = []
    _drop_identities(traced)
    while _merge_product(traced, done):
        pass
    _merge_shared(traced, done)
    traced.delete_all_unused_submodules()
    traced.graph.lint()
    traced.recompile()
    return traced, done


def _linear(traced: fx.GraphModule, node: object) -> nn.Linear | None:
    """The Linear layer that `node` calls, if it is one that may be replaced."""
    if not isinstance(node, fx.Node) or node.op != "call_module" or len(node.args) != 1:
        return None
    layer = traced.get_submodule(str(node.target))
    calls = sum(other.op == "call_module" and other.target == node.target for other in traced.graph.nodes)
    hooked = layer._forward_hooks or layer._forward_pre_hooks
    return layer if type(layer) is nn.Linear and calls == 1 and not hooked else None


def _drop_identities(traced: fx.GraphModule) -> None:
    """Remove what does nothing in evaluation: Identity and Dropout."""
    for node in list(traced.graph.nodes):
        if node.op == "call_module" and isinstance(
            traced.get_submodule(str(node.target)), (nn.Identity, nn.Dropout)
        ):
            node.replace_all_uses_with(node.args[0])
            traced.graph.erase_node(node)


def _merge_product(traced: fx.GraphModule, done: list[str]) -> bool:
    """Replace one pair of Linear layers with nothing between them; False when there is none."""
    for node in traced.graph.nodes:
        second, before = _linear(traced, node), node.args[0] if node.args else None
        if second is None or not isinstance(before, fx.Node) or len(before.users) != 1:
            continue
        first = _linear(traced, before)
        if first is None:
            continue
        work = first.in_features * first.out_features + second.in_features * second.out_features
        if first.in_features * second.out_features > work or first.weight.dtype != second.weight.dtype:
            continue
        layer = _like(second, first.in_features, second.out_features, first.bias, second.bias)
        w1, w2 = first.weight.double(), second.weight.double()
        with torch.no_grad():
            layer.weight.copy_(w2 @ w1)
            if layer.bias is not None:
                bias = 0 if second.bias is None else second.bias.double()
                layer.bias.copy_(bias if first.bias is None else w2 @ first.bias.double() + bias)
        name = _add(traced, f"{_short(before)}_{_short(node)}", layer)
        with traced.graph.inserting_before(node):
            merged = traced.graph.call_module(name, (before.args[0],))
        node.replace_all_uses_with(merged)
        traced.graph.erase_node(node)
        traced.graph.erase_node(before)
        done.append(f"product: {before.target}, {node.target}")
        return True
    return False


def _merge_shared(traced: fx.GraphModule, done: list[str]) -> None:
    """Replace every group of Linear layers of one input by one layer and a split."""
    groups: dict[tuple[Any, ...], list[tuple[fx.Node, nn.Linear]]] = defaultdict(list)
    for node in traced.graph.nodes:
        layer = _linear(traced, node)
        if layer is not None:
            like = (layer.in_features, layer.weight.dtype, layer.weight.device, layer.bias is None)
            groups[(node.args[0], *like)].append((node, layer))
    for (source, *_), members in groups.items():
        nodes, layers = [node for node, _ in members], [layer for _, layer in members]
        if len(nodes) < 2 or _written_between(traced, source, nodes):
            continue
        sizes = [layer.out_features for layer in layers]
        layer = _like(layers[0], layers[0].in_features, sum(sizes), layers[0].bias)
        with torch.no_grad():
            layer.weight.copy_(torch.cat([part.weight for part in layers]))
            if layer.bias is not None:
                layer.bias.copy_(torch.cat([part.bias for part in layers]))
        name = _add(traced, "_".join(_short(node) for node in nodes), layer)
        with traced.graph.inserting_before(nodes[0]):
            merged = traced.graph.call_module(name, (source,))
            # Not torch.split: autograd forbids writing in place to one of several views.
            starts = [sum(sizes[:i]) for i in range(len(sizes))]
            pieces = [
                traced.graph.call_function(torch.narrow, (merged, -1, start, size))
                for start, size in zip(starts, sizes, strict=True)
            ]
        for node, piece in zip(nodes, pieces, strict=True):
            for user in node.users:
                if user.op == "call_method" and user.target == "view":
                    user.target = "reshape"  # a piece is a strided view, which .view may refuse
            node.replace_all_uses_with(piece)
            traced.graph.erase_node(node)
        done.append("shared input: " + ", ".join(str(node.target) for node in nodes))


def _written_between(traced: fx.GraphModule, source: fx.Node, nodes: list[fx.Node]) -> bool:
    """Whether anything may change `source` in place between the first and the last of `nodes`.

    What shares memory with `source` is not known exactly; taken for it is everything computed from it or from
    what it was computed from, without a Linear layer between.
    """
    related, stack = set(), [source]
    while stack:
        node = stack.pop()
        related.add(node)
        stack += [other for other in node.all_input_nodes if other not in related]
    order = list(traced.graph.nodes)
    first, last = order.index(nodes[0]), order.index(nodes[-1])
    for position, node in enumerate(order):
        if not related.intersection(node.all_input_nodes) or _linear(traced, node) is not None:
            continue
        related.add(node)
        if first < position < last and _writes(traced, node):
            return True
    return False


def _writes(traced: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node changes its input in place."""
    if node.op == "call_module":
        return bool(getattr(traced.get_submodule(str(node.target)), "inplace", False))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return (
        in_place
        or name in ("setitem", "iadd", "imul", "isub", "itruediv")
        or bool(node.kwargs.get("inplace"))
    )


def _like(layer: nn.Linear, inputs: int, outputs: int, *biases: torch.Tensor | None) -> nn.Linear:
    """An uninitialised Linear like `layer`, with a bias if any of `biases` is one."""
    bias = any(part is not None for part in biases)
    return nn.Linear(inputs, outputs, bias=bias, device=layer.weight.device, dtype=layer.weight.dtype).eval()


def _short(node: fx.Node) -> str:
    """A node's target as part of a name."""
    return str(node.target).replace(".", "_")


def _add(traced: fx.GraphModule, name: str, layer: nn.Linear) -> str:
    """Register a layer under a free name; returns the name."""
    name = f"merged_{name}"
    while hasattr(traced, name):
        name += "_"
    traced.add_submodule(name, layer)
    return name
