"""The study's networks in PyTorch, and the backend that runs them. Imported only inside a worker process.

Weights and inputs come from one pool of random numbers, so that every device and the float64 reference get
the same ones, and gigabytes of them cost no time. Layout: (N, C) for rows, (N, C, H, W) for images.
"""

import functools
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from batch.cases import HEAD, routes
from harness.backends import torch_device
from harness.cli import Fault
from harness.worker import Backend

CHECKED = 2  # items of a batch whose outputs are compared with the reference
IN_FLIGHT = 4  # forwards timed together by the device's clock, so that gaps between them count little
COPIES = 20  # per graph, to measure bandwidth
GRAPH_SETS = tuple(2**n for n in range(20, 31))  # working sets of 1 MB to 1 GB
POOL = 1_048_573  # a prime: rows and layers of any power of two start at different places in the pool


class Numbers:
    """Standard normal numbers, the same on every machine, from a pool that is read in a circle."""

    def __init__(self) -> None:
        pool = np.random.default_rng(0).standard_normal(POOL, dtype=np.float32)
        self.pool = torch.from_numpy(pool)

    def take(self, seed: int, *shape: int) -> torch.Tensor:
        """A float32 tensor on the CPU; another seed starts elsewhere in the pool."""
        count = int(np.prod(shape))
        start = seed * 7919 % POOL
        turns = self.pool.roll(-start).repeat(-(-count // POOL))
        return turns[:count].view(shape)


@functools.cache
def pool() -> Numbers:
    """The numbers, made once per process."""
    return Numbers()


def weight(numbers: Numbers, seed: int, outputs: int, inputs: int, gain: float = 2.0) -> nn.Parameter:
    """(outputs, inputs), scaled so that a ReLU network keeps the size of its activations."""
    return nn.Parameter(numbers.take(seed, outputs, inputs) * (gain / inputs) ** 0.5, requires_grad=False)


class Network(nn.Module):
    """A case's network: a module that makes its own inputs, a tensor or several."""

    def inputs(self, numbers: Numbers, batch: int) -> Any:
        """What `forward` takes at a batch of this size."""
        raise NotImplementedError


class Mlp(Network):
    """Square linear layers without bias, ReLU between them."""

    def __init__(self, numbers: Numbers, width: int, depth: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.ParameterList([weight(numbers, i, width, width) for i in range(depth)])

    def inputs(self, numbers: Numbers, batch: int) -> torch.Tensor:
        """(N, width)."""
        return numbers.take(101, batch, self.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, width) -> (N, width)."""
        for i, layer in enumerate(self.layers):
            x = functional.linear(x.relu() if i else x, layer)
        return x


class Linear(Network):
    """One linear layer without bias."""

    def __init__(self, numbers: Numbers, inputs: int, outputs: int) -> None:
        super().__init__()
        self.width = inputs
        self.weight = weight(numbers, 3, outputs, inputs)

    def inputs(self, numbers: Numbers, batch: int) -> torch.Tensor:
        """(N, inputs)."""
        return numbers.take(101, batch, self.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, inputs) -> (N, outputs)."""
        return functional.linear(x, self.weight)


class Convolution(Network):
    """One 3×3 convolution without bias that keeps side and channels."""

    def __init__(self, numbers: Numbers, side: int, channels: int, groups: int) -> None:
        super().__init__()
        self.side, self.channels, self.groups = side, channels, groups
        self.weight = nn.Parameter(
            weight(numbers, 3, channels, channels // groups * 9).view(channels, channels // groups, 3, 3),
            requires_grad=False,
        )

    def inputs(self, numbers: Numbers, batch: int) -> torch.Tensor:
        """(N, channels, side, side)."""
        return numbers.take(101, batch, self.channels, self.side, self.side)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Keeps the shape."""
        return functional.conv2d(x, self.weight, padding=1, groups=self.groups)


class Pool(Network):
    """2×2 maximum with stride 2."""

    def __init__(self, numbers: Numbers, side: int, channels: int) -> None:
        super().__init__()
        self.side, self.channels = side, channels

    def inputs(self, numbers: Numbers, batch: int) -> torch.Tensor:
        """(N, channels, side, side)."""
        return numbers.take(101, batch, self.channels, self.side, self.side)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, C, side, side) -> (N, C, side/2, side/2)."""
        return functional.max_pool2d(x, 2)


class Decoder(Network):
    """A decoder block that makes one token per sequence, the cache full but for that token.

    With a context of 0 the attention is left out: the values go straight to the output projection.
    """

    def __init__(self, numbers: Numbers, width: int, context: int) -> None:
        super().__init__()
        self.width, self.context, self.heads = width, context, width // HEAD
        self.qkv = weight(numbers, 1, 3 * width, width, gain=1.0)
        self.out = weight(numbers, 2, width, width, gain=1.0)
        self.up = weight(numbers, 3, 4 * width, width)
        self.down = weight(numbers, 4, width, 4 * width, gain=1.0)

    def inputs(self, numbers: Numbers, batch: int) -> tuple[torch.Tensor, ...]:
        """Token vectors (N, width); keys and values (N, heads, context, HEAD) where there is attention."""
        x = numbers.take(101, batch, self.width)
        if not self.context:
            return (x,)
        shape = (batch, self.heads, self.context, HEAD)
        return x, numbers.take(105, *shape), numbers.take(106, *shape)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Token vectors (N, width) and caches -> (N, width); the newest key and value go into the caches."""
        x, *caches = inputs
        normed = functional.layer_norm(x, (self.width,))
        query, key, value = functional.linear(normed, self.qkv).view(-1, 3, self.heads, HEAD).unbind(1)
        if caches:
            keys, values = caches
            keys[:, :, -1], values[:, :, -1] = key, value
            scores = torch.matmul(
                query[:, :, None] * HEAD**-0.5, keys.transpose(2, 3)
            )  # (N, heads, 1, context)
            value = torch.matmul(scores.softmax(-1), values)[:, :, 0]
        x = x + functional.linear(value.reshape(-1, self.width), self.out)
        inner = functional.linear(functional.layer_norm(x, (self.width,)), self.up)
        return x + functional.linear(functional.gelu(inner), self.down)


class Experts(Network):
    """Experts of two linear layers each, one after another over the tokens that are routed to them.

    The routing is part of the input, made before the clock runs: what is timed is the experts' work.
    """

    def __init__(
        self, numbers: Numbers, width: int, inner: int, experts: int, chosen: int, routing: str
    ) -> None:
        super().__init__()
        self.width, self.experts, self.chosen, self.routing = width, experts, chosen, routing
        self.up = nn.ParameterList([weight(numbers, 2 * i, inner, width) for i in range(experts)])
        self.down = nn.ParameterList([weight(numbers, 2 * i + 1, width, inner) for i in range(experts)])

    def inputs(self, numbers: Numbers, batch: int) -> tuple[torch.Tensor, ...]:
        """Token vectors (N, width), then the token numbers of every expert."""
        tokens = routes(self.routing, batch, self.experts, self.chosen)
        return (numbers.take(101, batch, self.width), *(torch.from_numpy(chosen) for chosen in tokens))

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """(N, width) -> (N, width): the sum over a token's experts, each with weight 1/k."""
        x, *routed = inputs
        result = torch.zeros_like(x)
        for tokens, up, down in zip(routed, self.up, self.down, strict=True):
            if len(tokens):
                inner = functional.linear(x[tokens], up).relu()
                result.index_add_(0, tokens, functional.linear(inner, down), alpha=1 / self.chosen)
        return result


class ResNet50(Network):
    """torchvision's ResNet-50 with its random initial weights."""

    def __init__(self, numbers: Numbers) -> None:
        super().__init__()
        from torchvision.models import resnet50

        torch.manual_seed(0)
        self.network = resnet50().eval()

    def inputs(self, numbers: Numbers, batch: int) -> torch.Tensor:
        """(N, 3, 224, 224)."""
        return numbers.take(101, batch, 3, 224, 224)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3, 224, 224) -> (N, 1000)."""
        return self.network(x)


NETWORKS: dict[str, Callable[..., Network]] = {
    "mlp": Mlp,
    "linear": Linear,
    "convolution": Convolution,
    "pool": Pool,
    "decoder": Decoder,
    "experts": Experts,
    "resnet50": ResNet50,
}
_answers: dict[str, np.ndarray] = {}  # of the reference
_built: dict[str, Network] = {}  # one copy of the weights for all backends of a case on a device


def placed(inputs: Any, form: dict[str, Any]) -> Any:
    """Copies of tensors in the form {device, dtype}, token numbers in their own dtype."""
    if isinstance(inputs, tuple):
        return tuple(placed(part, form) for part in inputs)
    if not inputs.is_floating_point():
        form = {name: value for name, value in form.items() if name != "dtype"}
    # A copy: a network that writes into its inputs must not write into the pool.
    return inputs.to(**form, copy=True)


class TorchCase(Backend):
    """A case of the study in PyTorch. `variant`: torch, or graph (a captured CUDA graph per batch).

    A batch is its size: the inputs are made here, once per size, and stay on the device.
    """

    def __init__(
        self,
        kind: str,
        sizes: dict[str, Any],
        dtype: str = "float32",
        device: str = "auto",
        threads: int = 0,
        variant: str = "torch",
    ) -> None:
        self.target = torch_device(device)
        self.variant = variant
        if variant == "graph" and self.target != "cuda":
            raise Fault("CUDA graphs need an NVIDIA GPU")
        if threads:
            torch.set_num_threads(threads)
        # The ridge of fp32 is meant: TensorFloat-32 has another rate and another precision.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        self.form = {"device": self.target, "dtype": getattr(torch, dtype)}
        key = f"{kind} {sizes} {dtype} {self.target}"
        if key not in _built:
            _built[key] = NETWORKS[kind](pool(), **sizes).to(**self.form)
        self.model = _built[key]
        self.wait = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(
            self.target, lambda: None
        )
        self.ready: dict[int, Any] = {}  # batch size -> inputs on the device
        self.graphs: dict[int, Any] = {}  # batch size -> graph, its input, its output
        # The collector runs before every burst; without the framework's own objects that is quick.
        gc.freeze()

    def prepare(self, batch: int) -> None:
        """Make the inputs of a batch of this size, and capture its graph, the first time it is asked for."""
        if batch not in self.ready:
            with torch.inference_mode():
                self.ready[batch] = placed(self.model.inputs(pool(), batch), self.form)
                self.x = self.ready[batch]
                if self.variant == "graph":
                    self.graphs[batch] = self.capture()
        self.x = self.ready[batch]
        if self.variant == "graph":
            self.graph, _, self.graph_output = self.graphs[batch]
        self.wait()

    def capture(self) -> tuple[Any, Any, Any]:
        """Capture one forward on the inputs as a CUDA graph: (graph, input, output)."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries allocate their workspaces before the capture
            for _ in range(3):
                self.model(self.x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = self.model(self.x)
        return graph, self.x, output

    def run(self) -> None:
        """One forward, without autograd; on a GPU it may return early."""
        if self.variant == "graph":
            self.graph.replay()
            self.output = self.graph_output
        else:
            with torch.inference_mode():
                self.output = self.model(self.x)

    def synchronize(self) -> None:
        """Wait for the device."""
        self.wait()

    def device_ms(self) -> float | None:
        """CUDA: events around IN_FLIGHT forwards one behind the other, per forward."""
        if self.target != "cuda":
            return None
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(IN_FLIGHT):
            self.run()
        end.record()
        self.wait()
        return start.elapsed_time(end) / IN_FLIGHT

    def peak_memory_mb(self) -> float | None:
        """What CUDA's allocator held at most; None elsewhere, where the process's memory is the answer."""
        return torch.cuda.max_memory_allocated() / 1e6 if self.target == "cuda" else None

    def reset_peak(self) -> None:
        """Start a new peak of the CUDA allocator."""
        if self.target == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def facts(self) -> dict[str, Any]:
        """Threads and TF32 as they are in this process."""
        tf32 = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
        return {"threads": torch.get_num_threads(), "tf32": tf32 if self.target == "cuda" else None}

    def result(self) -> np.ndarray:
        """The outputs of the first CHECKED items, float32."""
        return self.output[:CHECKED].to("cpu", torch.float32).numpy()


class Reference(Backend):
    """The outputs of the first CHECKED items in float64 on the CPU.

    Items do not see each other once they are routed, so the rest is not computed, and but for the
    experts (whose routes depend on the batch) one answer serves every batch and dtype of a network.
    """

    target = "cpu"

    def __init__(self, kind: str, sizes: dict[str, Any], threads: int = 0) -> None:
        if threads:
            torch.set_num_threads(threads)
        self.kind, self.sizes = kind, sizes
        self.model: Network | None = None

    def prepare(self, batch: int) -> None:
        """Compute the answer unless it is known."""
        self.count = min(batch, CHECKED)
        routed = self.kind == "experts"
        key = f"{self.kind} {self.sizes} {batch if routed else ''}"
        if key not in _answers:
            if self.model is None:
                self.model = NETWORKS[self.kind](pool(), **self.sizes).double()
            with torch.inference_mode():
                if routed:
                    x, *tokens = self.model.inputs(pool(), batch)
                    inputs = (x[:CHECKED].double(), *(chosen[chosen < CHECKED] for chosen in tokens))
                else:
                    inputs = placed(self.model.inputs(pool(), CHECKED), {"dtype": torch.float64})
                _answers[key] = self.model(inputs).numpy()
            if not routed:
                self.model = None
        self.answer = _answers[key]

    def run(self) -> None:
        """Nothing: `prepare` has the answer."""

    def synchronize(self) -> None:
        """Nothing."""

    def result(self) -> np.ndarray:
        """float64."""
        return self.answer[: self.count]


def graph_copies() -> list[dict[str, Any]]:
    """Copy bandwidth per working set without the launches, which pace small copies on a GPU: in a CUDA graph.

    Entries as those of harness.ceilings; GB/s, bytes read and written, from the difference of two graphs.
    """
    entries = []
    for nbytes in GRAPH_SETS:
        a, b = (torch.zeros(nbytes // 8, device="cuda") for _ in range(2))
        rates = []
        seconds = {}
        graphs = {}
        for count in (COPIES, 2 * COPIES):
            graphs[count] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[count]):
                for i in range(count):
                    (b.copy_(a) if i % 2 == 0 else a.copy_(b))
        for _ in range(8):
            for count, graph in graphs.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                seconds[count] = start.elapsed_time(end) / 1e3
            rates.append(COPIES * nbytes / 1e9 / max(seconds[2 * COPIES] - seconds[COPIES], 1e-9))
        label = {"name": "copy", "unit": "GB/s", "framework": "torch", "target": "cuda", "bytes": nbytes}
        value = float(np.median(rates[1:]))  # the first replay uploads the graph
        entries.append(label | {"source": "CUDA graph", "value": value, "best": max(rates[1:]), "samples": 7})
    return entries


def device_facts(device: str) -> dict[str, Any]:
    """What the study must know of the device: name, memory and last cache in bytes (None if unknown)."""
    target = torch_device(device)
    if target == "cuda":
        properties = torch.cuda.get_device_properties(0)
        name, memory = properties.name, properties.total_memory
        cache = getattr(properties, "L2_cache_size", None)
    else:
        name = "CPU" if target == "cpu" else "Apple GPU"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        cache = last_cache() if target == "cpu" else None
    return {"device": target, "name": name, "memory_bytes": memory, "cache_bytes": cache}


def last_cache() -> int | None:
    """Size of the CPU's last cache where Linux tells."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20}[text[-1]])
    return max(sizes, default=None)
