"""The study's formulas against figures worked out by hand or published."""

import math

import pytest

from batch.roofline import (
    Layer,
    Limits,
    affine,
    cache_bytes,
    convolution,
    convolution_weights,
    elementwise,
    linear,
    predict,
    published,
    ridge_batch,
    ridge_batch_convolution,
    ridge_batch_experts,
    ridge_batch_with_activations,
    ridge_batch_with_launch,
    tokens_per_expert,
)

T4_TENSOR = ridge_batch(65e12, 300e9, 2)
H200_SINGLE = ridge_batch(51e12, 4.24e12, 4)


def test_ridge_batches_of_the_t4_and_the_h200() -> None:
    assert pytest.approx(216.7, abs=0.05) == T4_TENSOR
    assert ridge_batch(8.1e12, 300e9, 4) == pytest.approx(54.0)
    assert round(H200_SINGLE) == 24
    assert round(ridge_batch(989e12, 4.8e12, 2)) == 206


def test_ridge_batches_with_activations() -> None:
    assert round(ridge_batch_with_activations(T4_TENSOR, 1024, 1024)) == 376
    assert round(ridge_batch_with_activations(T4_TENSOR, 4096, 4096)) == 242
    assert ridge_batch_with_activations(T4_TENSOR, 256, 256) == math.inf
    assert round(ridge_batch_with_activations(H200_SINGLE, 1024, 1024)) == 25


def test_ridge_with_activations_is_where_bytes_and_flops_take_as_long() -> None:
    rate, bandwidth = 51e12, 4.24e12
    batch = ridge_batch_with_activations(ridge_batch(rate, bandwidth, 4), 512, 2048)
    layer = linear(batch, 512, 2048, 4)
    assert layer.bytes / bandwidth == pytest.approx(layer.flops / rate)


def test_launch_floor_moves_only_the_ridge_of_narrow_layers() -> None:
    # 1 µs at 51 TFLOP/s is 51 MFLOP: 24.3 rows of 1024 × 1024, 1556 of 128 × 128.
    assert ridge_batch_with_launch(25.2, 1024, 1024, 51e12, 1e-6) == pytest.approx(25.2)
    assert ridge_batch_with_launch(38.5, 128, 128, 51e12, 1e-6) == pytest.approx(1556.4, abs=0.1)


def test_convolution_reaches_the_ridge_by_pixels() -> None:
    assert ridge_batch_convolution(24.0, 2, 3) == 4.0
    bandwidth, rate = 1e12, 24e12 / 2  # B* = 4 · 12e12 / 2e12 = 24
    layer = convolution(6, 2, 512, 512, 3, 4)
    assert layer.flops / rate == pytest.approx(layer.weight_bytes / bandwidth)


def test_convolution_costs() -> None:
    assert convolution_weights(3, 64, 128) == 73_728
    assert convolution_weights(3, 192, 192, groups=192) == 1_728
    layer = convolution(2, 28, 48, 96, 3, 4, stride=2)
    assert layer.flops == 2 * 2 * 14 * 14 * 9 * 48 * 96
    assert layer.weight_bytes == 4 * 9 * 48 * 96
    assert layer.activation_bytes == 4 * 2 * (28 * 28 * 48 + 14 * 14 * 96)
    assert elementwise(2, 10, 4, reads=2).bytes == 4 * 2 * 10 * 3


def test_experts_and_cache() -> None:
    assert tokens_per_expert(64, 2, 8) == 16
    assert ridge_batch_experts(24, 2, 8) == 96
    # Two tensors × 32 layers × 4 sequences × 2048 positions × 4096 values × 2 bytes.
    assert cache_bytes(4, 2048, 4096, 2, layers=32) == 4_294_967_296


def test_prediction_takes_the_longest_time_of_each_layer() -> None:
    limits = Limits(1e12, ((1e3, 4e11), (1e9, 1e11)), call_s=1e-6, launch_s=2e-6)
    layers = [Layer(1e3, 4, 4), Layer(1e3, 1e6, 0), Layer(1e8, 0, 1e3)]
    found = predict(layers, limits)
    bandwidth = limits.bandwidth_at(1e6 + 1e3 + 8)
    assert 1e11 < bandwidth < 4e11
    assert found.total_s == pytest.approx(1e-6 + 2e-6 + 1e6 / bandwidth + 1e-4)
    assert found.launch_s == pytest.approx(7e-6)
    assert found.bound == "compute"


def test_bandwidth_between_and_beyond_the_measured_sizes() -> None:
    limits = Limits(1e12, ((1e4, 4e11), (1e8, 1e11)))
    assert limits.bandwidth_at(1) == pytest.approx(4e11)
    assert limits.bandwidth_at(1e6) == pytest.approx(2e11)
    assert limits.bandwidth_at(1e12) == pytest.approx(1e11)


def test_affine_recovers_call_and_launch_and_never_goes_below_zero() -> None:
    call, launch = affine([3, 15, 63], [5e-6 + n * 2e-6 for n in (3, 15, 63)])
    assert (call, launch) == (pytest.approx(5e-6), pytest.approx(2e-6))
    call, launch = affine([3, 15], [1e-6, 20e-6])
    assert call == 0
    assert launch > 0


def test_published_rows_are_recomputed() -> None:
    rows = {row.statement: row for row in published()}
    assert rows["ridge batch of a T4"].recomputed == "216.7"
    assert rows["the same in fp32"].recomputed == "54.0"
    activations = rows["activations left out (fp16 T4)"].recomputed
    assert activations == "width 256: never, width 1024: 376, width 4096: 242"
    assert "24.1; 25.2" in rows["H200, fp32, 51 TFLOP/s and 4.24 TB/s"].recomputed
