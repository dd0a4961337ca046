"""Where the time goes: the network's layers timed by kind, each on the activations that it gets there.

A backend here runs all layers of one kind (depthwise, pointwise, stem, skip, head, element-wise), one after
the other, on the activations of a real forward, and nothing else. The kinds together do what one forward
does; their times add up to more than a forward's where launches overlap, and say how it is shared out.
The study is "layers", its cases are the kinds. Layers of the network as written, in PyTorch and in MLX.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from harness.backends import NO_TF32, MlxNetwork, Options, TorchNetwork, count_launches
from harness.measure import Candidate, Case

KINDS = ("stem", "depthwise", "pointwise", "skip", "element-wise", "head")
BACKENDS = ("torch", "mlx")
BUDGET_SHARE = 0.15  # of a cell's budget: twelve cells that are only summed up


def cases(
    backends: tuple[str, ...],
    options: Options,
    inputs: Callable[[int], Any],
    batch_sizes: tuple[int, ...],
) -> list[Case]:
    """One case per kind of layer, for those of `backends` that have the network as written."""

    def candidates(kind: str) -> Iterator[Candidate]:
        if "torch" in backends:
            arguments: dict[str, Any] = {"checkpoint": str(options.checkpoint), "kind": kind}
            arguments |= {"device": options.device, "threads": options.threads}
            yield Candidate("torch", "torch", "harness.layers:TorchLayers", arguments)
        if "mlx" in backends:
            arguments = {"checkpoint": str(options.mlx_checkpoint or options.checkpoint), "kind": kind}
            yield Candidate("mlx", "mlx", "harness.layers:MlxLayers", arguments, "mlx.core", NO_TF32)

    def reference(kind: str) -> Candidate:
        arguments = {"checkpoint": str(options.checkpoint), "kind": kind, "dtype": "float64", "device": "cpu"}
        return Candidate("reference", "reference", "harness.layers:TorchLayers", arguments, "torch")

    return [
        Case(
            study="layers",
            name=kind,
            batch_sizes=batch_sizes,
            inputs=inputs,
            candidates=tuple(candidates(kind)),
            reference=reference(kind),
            budget_share=BUDGET_SHARE,
        )
        for kind in KINDS
        if set(backends) & set(BACKENDS)
    ]


Step = tuple[Callable[..., Any], tuple[Any, ...]]  # an operation and what it is applied to


def torch_steps(model: Any, x: Any) -> dict[str, list[Step]]:
    """The operations of one forward of the PyTorch network on x (N, 1, 28, 28), by kind."""
    import torch

    steps: dict[str, list[Step]] = {kind: [] for kind in KINDS}

    def do(kind: str, function: Callable[..., Any], *arguments: Any) -> Any:
        steps[kind].append((function, arguments))
        return function(*arguments)

    convolution, norm, relu = model.conv1
    x = do("element-wise", relu, do("element-wise", norm, do("stem", convolution, x)))
    for block in model.stages:
        y = do("element-wise", torch.relu, do("element-wise", block.bn1, do("depthwise", block.dw, x)))
        y = do("element-wise", block.bn2, do("pointwise", block.pw, y))
        if len(list(block.skip.children())):
            convolution, norm = block.skip
            x = do("element-wise", norm, do("skip", convolution, x))
        x = do("element-wise", torch.relu, do("element-wise", torch.add, y, x))
    do("head", lambda x: model.fc(model.avgpool(x).flatten(1)), x)
    return steps


def mlx_steps(model: Any, x: Any) -> dict[str, list[Step]]:
    """The operations of one forward of the MLX network as written on x (N, 28, 28, 1), by kind."""
    import mlx.core as mx
    import mlx.nn as nn

    steps: dict[str, list[Step]] = {kind: [] for kind in KINDS}

    def do(kind: str, function: Callable[..., Any], *arguments: Any) -> Any:
        steps[kind].append((function, arguments))
        return function(*arguments)

    x = do("element-wise", nn.relu, do("element-wise", model.bn1, do("stem", model.conv1, x)))
    for block in model.stages.layers:
        y = do("element-wise", nn.relu, do("element-wise", block.bn1, do("depthwise", block.dw, x)))
        y = do("element-wise", block.bn2, do("pointwise", block.pw, y))
        if "skip_conv" in block:
            x = do("element-wise", block.skip_bn, do("skip", block.skip_conv, x))
        x = do("element-wise", nn.relu, do("element-wise", mx.add, y, x))
    do("head", lambda x: model.fc(mx.mean(x, axis=(1, 2))), x)
    return steps


class TorchLayers(TorchNetwork):
    """All layers of one kind in PyTorch."""

    def __init__(self, checkpoint: str, kind: str, **arguments: Any) -> None:
        super().__init__(checkpoint, **arguments)
        self.kind = kind

    def prepare(self, batch: np.ndarray) -> None:
        """Run the network once on the images, to get every layer's input."""
        super().prepare(batch)
        with self.torch.inference_mode():
            self.steps = torch_steps(self.model, self.x)[self.kind]
        self.wait()

    def run(self) -> None:
        """Every layer of the kind once."""
        with self.torch.inference_mode():
            self.outputs += [function(*arguments) for function, arguments in self.steps]


class MlxLayers(MlxNetwork):
    """All layers of one kind in MLX."""

    def __init__(self, checkpoint: str, kind: str) -> None:
        super().__init__(checkpoint)
        self.kind = kind

    def prepare(self, batch: np.ndarray) -> None:
        """Run the network once on the images, to get every layer's input."""
        super().prepare(batch)
        self.steps = mlx_steps(self.model, self.x)[self.kind]
        self.mx.eval([arguments for _, arguments in self.steps])

    def run(self) -> None:
        """Describe every layer of the kind once."""
        self.outputs += [function(*arguments) for function, arguments in self.steps]

    def launch(self) -> None:
        """Describe every layer of the kind and start them."""
        self.run()
        self.mx.async_eval(self.outputs)

    def device_ms(self) -> None:
        """Not measured: these layers do not feed each other, so they make no chain."""
        return None

    def facts(self) -> dict[str, Any]:
        """Launches of the kind, counted on the graph."""
        if not self.outputs:
            return {}
        outputs = [function(*arguments) for function, arguments in self.steps]
        return {"launches_counted": sum(count_launches(output) for output in outputs)}
