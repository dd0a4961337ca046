"""The study's networks: their costs as PyTorch counts them, and the backend against its float64 reference."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from batch.cases import EXPERTS, ROUTINGS, Work
from batch.networks import CHECKED, NETWORKS, Numbers, Reference, TorchCase, device_facts
from harness.cli import Fault
from harness.tolerances import compare

NUMBERS = Numbers()
EXPERT_SIZES = {"width": 64, "inner": 96, "experts": EXPERTS, "chosen": 2}
SMALL = {
    "mlp": {"width": 48, "depth": 3},
    "linear": {"inputs": 40, "outputs": 24},
    "convolution": {"side": 7, "channels": 8, "groups": 1},
    "pool": {"side": 8, "channels": 3},
    "decoder": {"width": 128, "context": 9},
}
CASES = [
    *SMALL.items(),
    ("decoder", {"width": 128, "context": 0}),
    ("convolution", {"side": 5, "channels": 8, "groups": 8}),
    *(("experts", EXPERT_SIZES | {"routing": routing}) for routing in ROUTINGS),
]


@pytest.mark.parametrize("kind, sizes", CASES)
@pytest.mark.parametrize("batch", [1, 5])
def test_backend_agrees_with_the_reference(kind: str, sizes: dict, batch: int) -> None:
    backend, reference = TorchCase(kind, sizes, device="cpu"), Reference(kind, sizes)
    reference.prepare(batch)
    backend.prepare(batch)
    for _ in range(2):  # a decoder writes into its cache: a second forward must give the same
        backend.run()
        backend.synchronize()
    outcome = compare(backend.result(), reference.result(), "float32")
    assert reference.result().dtype == np.float64
    assert len(backend.result()) == min(batch, CHECKED)
    assert outcome["passed"], outcome["problem"]
    assert np.abs(reference.result()).max() > 1e-3


def test_a_wrong_weight_is_noticed() -> None:
    backend, reference = TorchCase("mlp", SMALL["mlp"], device="cpu"), Reference("mlp", SMALL["mlp"])
    reference.prepare(2)
    backend.prepare(2)
    right = backend.model.layers[-1][3].clone()
    backend.model.layers[-1][3] += 0.1
    backend.run()
    backend.model.layers[-1][3] = right
    assert not compare(backend.result(), reference.result(), "float32")["passed"]


@pytest.mark.parametrize("kind, sizes", [*CASES, ("resnet50", {})])
def test_flops_are_those_that_pytorch_counts(kind: str, sizes: dict) -> None:
    if kind == "pool":
        pytest.skip("FlopCounterMode counts no pooling")
    network = NETWORKS[kind](NUMBERS, **sizes)
    batch = 1 if kind == "resnet50" else 3
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        network(network.inputs(NUMBERS, batch))
    assert Work("", "", kind, sizes, ()).flops(batch) == counter.get_total_flops()


def test_numbers_differ_by_seed_and_recur_by_machine() -> None:
    first, second = NUMBERS.take(1, 8, 64), NUMBERS.take(2, 8, 64)
    assert torch.equal(first, Numbers().take(1, 8, 64))
    assert not torch.equal(first, second)
    assert torch.equal(NUMBERS.take(1, 2, 64), first[:2])  # the reference computes only the first items
    long = NUMBERS.take(3, 1025, 1024)
    assert abs(float(long.mean())) < 0.01
    assert not torch.equal(long[0], long[1024])


def test_graphs_without_a_gpu_are_refused_with_the_reason() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has an NVIDIA GPU")
    with pytest.raises(Fault, match="NVIDIA"):
        TorchCase("mlp", SMALL["mlp"], device="cpu", variant="graph")


def test_device_facts() -> None:
    facts = device_facts("cpu")
    assert facts["device"] == "cpu"
    assert facts["memory_bytes"] > 1e8
    assert facts["cache_bytes"] is None or 1e5 < facts["cache_bytes"] < 1e10
