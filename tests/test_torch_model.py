"""The PyTorch network: shapes, names, counts, and BatchNorm folding."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import mnist_files
import torch_model

pytestmark = pytest.mark.usefixtures("one_thread")


def test_parameter_counts_by_each_convention():
    assert torch_model.count_params(torch_model.DepthwiseMNIST()) == {
        "trainable": 101_098,
        "with_batchnorm_statistics": 103_786,
        "state_dict": 103_797,
    }


def test_flops_per_image():
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        torch_model.DepthwiseMNIST().eval()(torch.zeros(1, 1, 28, 28))
    assert counter.get_total_flops() == 15_893_952


def test_names_are_those_of_published_checkpoints():
    names = set(torch_model.DepthwiseMNIST().state_dict())
    assert {
        "conv1.0.weight",
        "conv1.1.running_var",
        "stages.0.dw.weight",
        "stages.0.bn1.weight",
        "stages.0.pw.weight",
        "stages.0.bn2.bias",
        "stages.0.skip.0.weight",
        "stages.2.skip.1.running_mean",
        "fc.bias",
    } <= names
    assert not any(name.startswith(("stages.1.skip", "stages.3.skip", "avgpool")) for name in names)


@pytest.mark.parametrize("batch", [1, 3])
def test_shapes_on_the_way(batch):
    model = torch_model.DepthwiseMNIST().eval()
    x = model.conv1(torch.zeros(batch, 1, 28, 28))
    assert x.shape == (batch, 48, 28, 28)
    for block, shape in zip(
        model.stages, ((96, 14, 14), (96, 14, 14), (192, 7, 7), (192, 7, 7)), strict=True
    ):
        x = block(x)
        assert x.shape == (batch, *shape)
    assert model(torch.zeros(batch, 1, 28, 28)).shape == (batch, 10)


def test_odd_sizes_round_up():
    block = torch_model.DepthwiseSeparableConv(4, 7, 2).eval()
    assert block(torch.zeros(1, 4, 7, 9)).shape == (1, 7, 4, 5)


@torch.no_grad()
def test_folding_batchnorm_keeps_the_answers():
    model = mnist_files.random_model().double()
    images = torch.randn(3, 1, 28, 28, dtype=torch.float64)
    folded = torch_model.fold_batchnorm(model)
    wanted = model(images)
    assert (folded(images) - wanted).abs().max() / wanted.abs().max() < 1e-12
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in folded.modules())
    assert any(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules()), "folded in place"
