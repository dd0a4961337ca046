"""Arithmetic of the predictions of the MLP study, against numbers worked out by hand."""

import pytest

from mlp import predictions
from mlp.predictions import Kernel, Prediction


def test_a_product_moves_each_matrix_once():
    kernel = predictions.gemm(8192, 768, 3072, 2)
    assert kernel.flops == 2 * 8192 * 768 * 3072
    assert kernel.bytes == 2 * (8192 * 768 + 768 * 3072 + 8192 * 3072)
    assert kernel.bias == 0


def test_a_bias_adds_one_operation_per_output_and_its_own_bytes():
    plain, biased = (predictions.gemm(5, 7, 11, 4, bias=bias) for bias in (False, True))
    assert biased.flops - plain.flops == 5 * 11
    assert biased.bytes - plain.bytes == 4 * 11
    assert biased.bias == 11


def test_the_floor_takes_each_kernel_at_its_own_limit():
    prediction = Prediction((Kernel("gemm", 1000, 1), Kernel("pointwise", 1, 1000)), "")
    # 1000 operations at 100/s, then 1000 bytes at 50/s: 10 s + 20 s, although the sums would need only 20.
    assert prediction.floor_ms(100, 50) == pytest.approx(30e3)


@pytest.mark.parametrize(
    ("form", "counts"),
    [
        ("eager", {"gemm": 3, "pointwise": 2}),
        ("fused", {"gemm": 3, "fused": 1}),
        ("merged", {"gemm": 2, "pointwise": 2}),
        ("merged fused", {"gemm": 2, "fused": 1}),
    ],
)
def test_geglu_has_the_published_kernels(form, counts):
    assert predictions.geglu(8192, 768, 3072, 2, form).counts == counts


def test_merging_changes_no_operations_and_saves_one_reading_of_the_input():
    apart, together = (predictions.geglu(8192, 768, 3072, 2, form) for form in ("eager", "merged"))
    assert apart.flops == together.flops
    assert apart.bytes - together.bytes == 2 * 8192 * 768


def test_fusing_saves_the_activation_written_and_read():
    eager, fused = (predictions.geglu(100, 8, 32, 4, form) for form in ("eager", "fused"))
    assert eager.bytes - fused.bytes == 4 * 2 * 100 * 32


def test_the_backward_of_three_layers_is_eleven_kernels():
    backward = predictions.mlp_backward(128, 1024, 3, 4, compiled=False)
    assert backward.counts == {"gemm": 5, "pointwise": 3, "reduction": 3}
    forward = predictions.mlp_forward(128, 1024, 3, 4, compiled=False)
    assert (forward.launches, backward.launches) == (6, 11)


@pytest.mark.parametrize(("width", "times"), [(64, 1), (256, 1), (257, 2), (1024, 4), (4096, 16)])
def test_the_fused_two_layers_compute_the_hidden_layer_once_per_tile_of_columns(width, times):
    prediction = predictions.two_layers(128, width, 2, "fused")
    assert prediction.launches == 1
    assert prediction.flops == 2 * 128 * width * width * (times + 1)


def test_the_tile_that_is_predicted_is_the_kernels():
    kernels = pytest.importorskip("mlp.triton_kernels", reason="triton is not installed")
    assert kernels.two_layers_tile(4096)[1] == predictions.TILE_COLUMNS


def test_a_cpu_copies_every_bias_first():
    plain = predictions.linear(1024, 32, 64, 4)
    with_copy = predictions.with_bias_copies(plain, 1024, 4)
    assert with_copy.counts == {"gemm": 1, "copy": 1}
    assert with_copy.bytes - plain.bytes == 4 * 1024 * 64
    unbiased = predictions.geglu(4, 8, 32, 4, "eager")
    assert predictions.with_bias_copies(unbiased, 4, 4) is unbiased


@pytest.mark.parametrize(
    ("seen", "verdict", "difference"),
    [
        ({"gemm": 3, "pointwise": 2}, "confirmed", ""),
        ({"gemm": 3, "pointwise": 2, "memset": 4, "memcpy": 1}, "confirmed", ""),
        ({"gemm": 3, "fused": 1}, "refuted", "1 fused more, 2 pointwise fewer"),
        ({"gemm": 3, "pointwise": 2, "gemm helper": 1}, "refuted", "1 gemm helper more"),
        ({}, "refuted", "3 gemm fewer, 2 pointwise fewer"),
    ],
)
def test_a_prediction_is_held_against_what_was_seen(seen, verdict, difference):
    prediction = predictions.geglu(8, 8, 32, 4, "eager").describe()
    assert predictions.compare(prediction, seen) == (verdict, difference)
