"""The MLX port: same logits as PyTorch at every level, the right parameters, strict loading."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
import torch

import kernels
import mlx_model
import torch_model
from harness.cli import Fault
from harness.tolerances import compare
from mnist_files import random_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A network whose BatchNorm statistics are far from 0 and 1, with its float64 logits on odd images."""
    model = random_model()
    path = tmp_path_factory.mktemp("checkpoint") / "model.pth"
    torch_model.save_checkpoint(model.state_dict(), path)
    images = np.random.default_rng(4).normal(size=(3, 28, 28, 1)).astype(np.float32)
    with torch.inference_mode():
        logits = model.double()(torch.from_numpy(images).double().permute(0, 3, 1, 2)).numpy()
    return path, images, logits


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("level", mlx_model.LEVELS)
def test_logits_equal_pytorch(checkpoint, level, dtype):
    path, images, expected = checkpoint
    model = mlx_model.get_model(level, path, getattr(mx, dtype))
    if level in mlx_model.LAUNCH_LEVELS and dtype == "bfloat16":
        with pytest.raises(ValueError, match="float32 or float16"):
            model(mx.array(images))
        return
    for batch in (1, 3):
        logits = np.array(model(mx.array(images[:batch])).astype(mx.float32))
        check = compare(logits, expected[:batch], dtype)
        assert check["passed"], f"{level} {dtype} batch {batch}: {check['problem']}"


@pytest.mark.parametrize("level", mlx_model.LEVELS)
def test_every_level_has_the_published_parameter_count(checkpoint, level):
    assert mlx_model.count_params(mlx_model.get_model(level, checkpoint[0])) == 103_786


def test_model_is_in_eval_mode_with_mlx_names(checkpoint):
    model = mlx_model.get_model("layers", checkpoint[0])
    assert not model.training
    names = {name for name, _ in mlx_model.tree_flatten(model.parameters())}
    assert {"conv1.weight", "bn1.running_var", "stages.layers.0.skip_conv.weight", "fc.bias"} <= names
    assert not any(
        "skip" in name for name in names if name.startswith(("stages.layers.1", "stages.layers.3"))
    )


def test_perm_conv_moves_input_channels_last():
    weight = np.arange(2 * 3 * 5 * 7).reshape(2, 3, 5, 7)  # (out, in, kH, kW), all sizes different
    moved = mlx_model.perm_conv(weight)
    assert moved.shape == (2, 5, 7, 3)
    assert moved[1, 4, 6, 2] == weight[1, 2, 4, 6]


def test_missing_unexpected_and_misshapen_keys_are_all_listed(checkpoint, tmp_path):
    state = torch.load(checkpoint[0], weights_only=True)
    del state["fc.bias"]
    state["fc.extra"] = torch.zeros(1)
    state["conv1.0.weight"] = torch.zeros(48, 1, 5, 5)
    torch.save(state, tmp_path / "bad.pth")
    with pytest.raises(Fault) as fault:
        mlx_model.get_model("layers", tmp_path / "bad.pth")
    for key in ("fc.bias", "fc.extra", "conv1.0.weight"):
        assert key in str(fault.value)


@pytest.mark.parametrize("level", mlx_model.LAUNCH_LEVELS)
@pytest.mark.parametrize("shape", [(0, 28, 28, 1), (2, 1, 28, 28), (2, 27, 28, 1), (28, 28, 1)])
def test_launches_refuse_images_of_another_shape(checkpoint, level, shape):
    with pytest.raises(ValueError, match=r"x must be \(N, 28, 28, 1\) with N ≥ 1"):
        mlx_model.get_model(level, checkpoint[0])(mx.zeros(shape))


def test_what_is_prepared_per_batch_size_does_not_grow_without_end(checkpoint, monkeypatch):
    monkeypatch.setattr(mlx_model.FusedNetwork, "MAX_PLANS", 2)
    model = mlx_model.get_model("network", checkpoint[0])
    for batch in (1, 2, 3):
        mx.eval(model(mx.zeros((batch, 28, 28, 1))))
    assert [size for size, _ in model._launches.plans] == [2, 3]


def test_a_chunk_of_a_batch_runs_on_what_was_found_for_the_batch(checkpoint):
    block = mlx_model.SHAPE.blocks[0]
    found = {
        batch: dataclasses.replace(kernels.tilings.default_tiling(block, batch, "host"), pixels=pixels)
        for batch, pixels in ((16, 3), (64, 4))
    }
    tunings = kernels.Tunings({("block", n): (t, None, None, None) for n, t in found.items()})
    launches = mlx_model.get_model("block", checkpoint[0], target="host", tunings=tunings)._launches
    pixels = [dict(launches.calls(16, mx.float32, n)[0].template)["TP"] for n in (None, 16, 64)]
    assert pixels == [3, 3, 4]
    chunks = []
    calls = launches.calls

    def recorded(*arguments):
        chunks.append(calls(*arguments)[0].template)
        return calls(*arguments)

    launches.calls = recorded
    mx.eval(launches(mx.zeros((64, 28, 28, 1))))
    assert {dict(template)["TP"] for template in chunks} == {4}


def test_unknown_level_is_refused():
    with pytest.raises(ValueError, match="unknown fusion level"):
        mlx_model.DepthwiseMNIST("everything")


def test_host_kernels_refuse_to_run_inside_compile(checkpoint):
    import kernels

    model = mlx_model.get_model("fused", checkpoint[0], target="host")
    with pytest.raises(kernels.Unavailable, match=r"mx\.compile"):
        mx.compile(model)(mx.zeros((1, 28, 28, 1)))


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize(("channels", "stride", "bias"), [(1, 1, False), (7, 2, True), (48, 2, False)])
def test_fused_from_torch_equals_the_torch_layers(channels, stride, bias, relu):
    torch.manual_seed(channels)
    conv = torch.nn.Conv2d(channels, channels, 3, stride, padding=1, groups=channels, bias=bias)
    bn = torch.nn.BatchNorm2d(channels).eval()
    bn.running_mean.uniform_(-1, 1)
    bn.running_var.uniform_(0.2, 3)
    bn.weight.data.uniform_(0.3, 2)
    bn.bias.data.uniform_(-1, 1)
    x = torch.randn(3, channels, 9, 11)
    layer = mlx_model.fused_from_torch(conv, bn, relu)
    with torch.inference_mode():
        expected = bn.double()(conv.double()(x.double()))
        expected = (expected.relu() if relu else expected).permute(0, 2, 3, 1).numpy()
    result = np.array(layer(mx.array(x.permute(0, 2, 3, 1).contiguous().numpy())))
    check = compare(result, expected, "float32")
    assert check["passed"], check["problem"]


def test_fused_from_torch_says_what_does_not_fit():
    conv = torch.nn.Conv2d(8, 8, 5, padding=2, groups=4)
    with pytest.raises(ValueError, match=r"kernel_size is \(5, 5\).*groups is 4.*BatchNorm has 4"):
        mlx_model.fused_from_torch(conv, torch.nn.BatchNorm2d(4))
