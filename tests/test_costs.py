"""Every figure of the network, computed from the layers, against published and hand-computed values."""

import pytest

from harness import costs
from harness.costs import LAYERS, activation_bytes, intensity, launches


def test_parameters_by_three_conventions():
    counts = costs.parameters()
    assert (counts["convolution"], counts["batchnorm"], counts["linear"]) == (96_480, 2_688, 1_930)
    assert counts["trainable"] == 101_098
    assert counts["with_batchnorm_statistics"] == 103_786
    assert counts["state_dict"] == 103_797


def test_parameters_agree_with_torch():
    torch_model = pytest.importorskip("torch_model")
    counts = torch_model.count_params(torch_model.DepthwiseMNIST())
    assert counts == {name: costs.parameters()[name] for name in counts}


def test_flops():
    assert costs.MACS == 7_946_976
    assert costs.FLOPS == 15_893_952
    parts = costs.article_flops()
    assert (parts["batchnorm"], parts["relu"], parts["addition"]) == (823_200, 136_416, 56_448)
    assert parts["total"] == 16_910_016


def test_flops_agree_with_torch():
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    from torch_model import DepthwiseMNIST

    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        DepthwiseMNIST().eval()(torch.zeros(3, 1, 28, 28))
    assert counter.get_total_flops() == 3 * costs.FLOPS


def test_shares_of_multiply_accumulates():
    shares = costs.mac_shares()
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["depthwise"] == pytest.approx(0.048, abs=5e-4)
    assert shares["pointwise"] == pytest.approx(0.68, abs=5e-3)
    assert shares["pointwise"] + shares["skip"] == pytest.approx(0.91, abs=5e-3)


def test_spatial_sizes():
    sides = [layer.side_out for layer in LAYERS if layer.kind in ("stem", "depthwise")]
    assert sides == [28, 14, 14, 7, 7]


@pytest.mark.parametrize(
    ("block", "convolution", "unfused", "fused", "folded"),
    [
        ("block 0", 0.892, 0.66, 1.18, 1.04),
        ("block 1", 2.200, 0.99, 2.90, 2.55),
        ("block 2", 0.868, 0.65, 1.14, 1.00),
        ("block 3", 2.061, 0.96, 2.65, 2.36),
    ],
)
def test_depthwise_intensities(block, convolution, unfused, fused, folded):
    found = costs.depthwise_intensity(block)
    assert found["convolution"] == pytest.approx(convolution, abs=5e-4)
    assert found["unfused"] == pytest.approx(unfused, abs=5e-3)
    assert found["fused"] == pytest.approx(fused, abs=5e-3)
    assert found["folded"] == pytest.approx(folded, abs=5e-3)
    assert 0.43 <= round(found["saved"], 2) <= 0.66


@pytest.mark.parametrize(
    ("rung", "count"),
    [
        ("torch", 37),
        ("mlx", 93),
        ("mlx-compile", 23),
        ("mlx-folded-eager", 38),
        ("mlx-folded", 23),
        ("mlx-fused", 65),
        ("mlx-fused-compile", 19),
        ("mlx-six", 6),
        ("mlx-block", 5),
        ("mlx-network", 1),
    ],
)
def test_launches(rung, count):
    assert len(launches(rung)) == count


@pytest.mark.parametrize(
    ("rung", "megabytes"),
    [("mlx", 8.30), ("torch", 4.35), ("mlx-compile", 2.6), ("mlx-six", 0.756), ("mlx-block", 0.455)],
)
def test_activation_traffic(rung, megabytes):
    digits = len(str(megabytes).split(".")[1])
    assert activation_bytes(rung) / 1e6 == pytest.approx(megabytes, abs=0.5001 * 10**-digits)


def test_weights_once_per_batch():
    assert costs.weight_bytes() / 1e6 == pytest.approx(0.415, abs=5e-4)
    assert costs.weight_bytes("float16") * 2 == costs.weight_bytes()


@pytest.mark.parametrize(
    ("rung", "published"), [("mlx", 1.9), ("torch", 3.5), ("mlx-six", 14.4), ("mlx-block", 19.4)]
)
def test_whole_network_intensity(rung, published):
    flops = costs.article_flops()["total"]
    assert intensity(rung, 1, flops) == pytest.approx(published, abs=0.0501)
    assert intensity("mlx-block", 10**6, flops) == pytest.approx(37, abs=0.5)


def test_fusing_never_adds_traffic_or_launches():
    ladder = ("mlx", "mlx-fused", "mlx-compile", "mlx-fused-compile", "mlx-six", "mlx-block", "mlx-network")
    traffic = [activation_bytes(rung) for rung in ladder]
    assert traffic == sorted(traffic, reverse=True)
    assert [len(launches(rung)) for rung in ladder] == [93, 65, 23, 19, 6, 5, 1]


LIMITS = [
    {"name": "fma", "framework": "torch", "target": "cpu", "dtype": "float32", "value": 200.0},
    {"name": "fma", "framework": "torch", "target": "cpu", "dtype": "float16", "value": 3.0},
    {"name": "copy", "framework": "torch", "target": "cpu", "bytes": 10**6, "value": 100.0},
    {"name": "copy", "framework": "torch", "target": "cpu", "bytes": 10**9, "value": 10.0},
    {"name": "launch_wait", "framework": "mlx", "target": "cpu", "value": 0.03},
    {"name": "launch_chain", "framework": "mlx", "target": "cpu", "value": 0.01},
    {"name": "launch_wait", "framework": "host", "target": "host", "value": 0.05},
    {"name": "launch_chain", "framework": "host", "target": "host", "value": 0.002},
]


def test_prediction_by_hand():
    cost = costs.predict("mlx", "cpu", 16, "float32", LIMITS)
    assert cost["arithmetic_ms"] == pytest.approx(16 * 15_893_952 / 200e9 * 1e3)
    assert cost["bytes"] == 16 * activation_bytes("mlx") + 415_144
    assert cost["bytes_ms"] == pytest.approx(cost["bytes"] / 100e9 * 1e3)  # 1.4 MB per launch: nearest 1 MB
    assert cost["launch_ms"] == pytest.approx(0.03 + 92 * 0.01)
    assert cost["floor_ms"] == pytest.approx(max(cost["arithmetic_ms"], cost["bytes_ms"]) + cost["launch_ms"])


def test_prediction_on_the_host_target():
    block = costs.predict("mlx-block", "host", 1, "float32", LIMITS)
    assert block["launch_ms"] == pytest.approx(0.05 + 4 * 0.002)
    fused = costs.predict("mlx-fused", "host", 1, "float32", LIMITS)
    assert fused["launch_ms"] == pytest.approx(0.03 + 60 * 0.01 + 4 * 0.05)


def test_half_precision_halves_bytes_and_may_accumulate_in_single():
    single, half = (costs.predict("mlx", "cpu", 64, dtype, LIMITS) for dtype in ("float32", "float16"))
    assert half["bytes"] * 2 == single["bytes"]
    assert half["arithmetic_ms"] == single["arithmetic_ms"]


def test_without_ceilings_there_is_no_floor():
    cost = costs.predict("mlx", "cpu", 1, "float32", [])
    assert cost["floor_ms"] is None and cost["launch_ms"] is None and cost["launches"] == 93
    assert costs.predict("gelu", "cpu", 1, "float32", LIMITS) is None


def test_the_head_in_the_last_blocks_launch_saves_a_launch_and_its_input_twice():
    apart, inside = (launches(rung) for rung in ("mlx-block", "mlx-block, head inside"))
    assert len(inside) == 4 and inside[:3] == apart[:3]
    saved = activation_bytes("mlx-block") - activation_bytes("mlx-block, head inside")
    assert saved == 4 * 2 * 192 * 49, "block 3's output is neither written nor read"


def test_a_cell_is_costed_as_what_it_launched():
    cell = {"backend": "mlx-block-again", "head_inside": False}
    assert costs.rung_of(cell) == "mlx-block"
    assert costs.rung_of(cell | {"head_inside": True}) == "mlx-block, head inside"
    assert costs.rung_of({"backend": "mlx"}) == "mlx"


def test_the_launchers_own_price_counts():
    direct = [
        {"name": name, "framework": "mlx-direct", "target": "cuda", "value": value}
        for name, value in (("launch_wait", 0.5), ("launch_chain", 0.25))
    ]
    cost = costs.predict("mlx-block", "cuda", 1, "float32", [*LIMITS, *direct], "mlx-direct")
    assert cost["launch_ms"] == pytest.approx(0.5 + 4 * 0.25)
