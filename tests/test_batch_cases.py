"""The cases: what they cost, how they are trimmed, and where tokens are routed."""

import numpy as np
import pytest

from batch.cases import (
    EXPERTS,
    MEMORY_SHARE,
    MOST_FLOPS,
    ROUTINGS,
    Work,
    all_works,
    doubling,
    routes,
)

BY_NAME = {work.name: work for work in all_works("cuda", 140e9) if work.dtype == "float32"}


def test_doubling_ends_at_the_last() -> None:
    assert doubling(512) == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    assert doubling(1) == (1,)


def test_mlp_costs() -> None:
    work = BY_NAME["MLP 8×1024"]
    assert work.flops(3) == 3 * 8 * 2 * 1024**2
    assert sum(layer.weight_bytes for layer in work.layers(3)) == 8 * 4 * 1024**2
    # Eight products and seven ReLUs, each reading and writing 1024 numbers per row.
    assert sum(layer.activation_bytes for layer in work.layers(3)) == 15 * 2 * 4 * 3 * 1024
    assert sum(layer.launches for layer in work.layers(3)) == 15


def test_resnet_has_its_known_size() -> None:
    work = BY_NAME["ResNet-50"]
    layers = work.layers(1)
    convolutions = [layer for layer in layers if layer.weight_bytes]
    assert len(convolutions) == 54  # 53 convolutions and the linear layer
    # torchvision: 25,557,032 parameters, of which 53,120 belong to BatchNorm and 1,000 are the bias.
    assert sum(layer.weight_bytes for layer in layers) == 4 * (25_557_032 - 53_120 - 1_000)
    assert work.flops(1) == pytest.approx(2 * 4.09e9, rel=0.005)  # the published 4.09 G multiply-accumulates


def test_decoder_reads_the_cache_of_every_sequence() -> None:
    with_cache, without = BY_NAME["decoder, context 1024"], BY_NAME["decoder without attention"]
    extra = with_cache.bytes(5) - without.bytes(5)
    cache = 2 * 5 * 1024 * 1024 * 4
    assert cache < extra < 1.1 * cache
    assert without.flops(5) == 5 * 2 * 12 * 1024**2


def test_idle_experts_cost_nothing() -> None:
    work = BY_NAME["experts, balanced"]
    expert = 2 * 4 * 1024 * 2048
    weights = [sum(layer.weight_bytes for layer in work.layers(batch)) for batch in (1, 2, 4, 64)]
    assert weights == [2 * expert, 4 * expert, 8 * expert, 8 * expert]
    assert work.flops(64) == BY_NAME["experts, skewed"].flops(64) == 64 * 2 * 2 * expert // 4


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("batch", [1, 3, 8, 100])
def test_routes(routing: str, batch: int) -> None:
    found = routes(routing, batch, EXPERTS, 2)
    again = routes(routing, batch, EXPERTS, 2)
    assert len(found) == EXPERTS
    for tokens, same in zip(found, again, strict=True):
        assert np.array_equal(tokens, same)
        assert np.array_equal(tokens, np.unique(tokens))
        assert not len(tokens) or (tokens[0] >= 0 and tokens[-1] < batch)
    loads = np.array([len(tokens) for tokens in found])
    if routing == "expert-choice":
        assert set(loads) == {max(1, round(batch * 2 / EXPERTS))}
    else:
        assert loads.sum() == 2 * batch
        assert np.array_equal(np.bincount(np.concatenate(found), minlength=batch), np.full(batch, 2))
    if routing == "balanced":
        assert loads.max() - loads.min() <= 1
    if routing == "skewed" and batch == 100:
        assert loads.max() > 2 * 25


def test_unknown_routing_is_refused() -> None:
    with pytest.raises(ValueError, match="random"):
        routes("random", 4, EXPERTS, 2)


@pytest.mark.parametrize("device, memory", [("cpu", 8e9), ("mps", 8e9), ("cuda", 140e9)])
def test_large_batches_are_trimmed_and_named(device: str, memory: float) -> None:
    works = all_works(device, memory)
    for work in works:
        assert sorted(work.batches + work.trimmed) == sorted({*work.batches, *work.trimmed})
        for batch in work.batches:
            assert batch == 1 or work.flops(batch) <= MOST_FLOPS[device]
            assert work.resident(batch) <= MEMORY_SHARE * memory
        for batch in work.trimmed:
            too_slow = work.flops(batch) > MOST_FLOPS[device]
            assert too_slow or work.resident(batch) > MEMORY_SHARE * memory
    widest = next(work for work in works if work.name == "MLP 8×8192")
    assert bool(widest.batches) == (memory > 20e9)  # 2.1 GB of weights are more than an eighth of 8 GB


def test_a_work_survives_the_record() -> None:
    for work in all_works("cpu", 16e9):
        assert Work.restore(work.describe()) == work
