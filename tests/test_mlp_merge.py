"""The fx pass that merges Linear layers: what it merges, what it leaves alone, and that results stay."""

import pytest
import torch
from torch import nn

from harness.cli import Fault
from mlp import models, study
from mlp.merge import merge_linears


def check(module: nn.Module, width: int, merges: list[str]) -> nn.Module:
    """Merge `module`, compare with the unmerged one on random rows, return the merged one."""
    torch.manual_seed(3)
    module = module.double().eval()
    merged, done = merge_linears(module)
    assert done == merges
    for rows in (1, 7, 33):
        x = torch.randn(rows, width, dtype=torch.float64)
        torch.testing.assert_close(merged(x), module(x), rtol=1e-12, atol=1e-12)
    return merged


def layers(module: nn.Module) -> list[nn.Linear]:
    return [part for part in module.modules() if isinstance(part, nn.Linear)]


def test_gate_and_up_become_one_product():
    merged = check(models.Geglu(48, 100), 48, ["shared input: gate, up"])
    assert sorted((layer.in_features, layer.out_features) for layer in layers(merged)) == [
        (48, 200),
        (100, 48),
    ]


def test_projections_with_bias_become_one_product():
    merged = check(models.Qkv(31), 31, ["shared input: q, k, v"])
    assert len(layers(merged)) == 1 and layers(merged)[0].bias is not None


@pytest.mark.parametrize("biases", [(True, True), (True, False), (False, True), (False, False)])
def test_layers_with_nothing_between_multiply(biases):
    first, second = nn.Linear(24, 32, bias=biases[0]), nn.Linear(32, 16, bias=biases[1])
    merged = check(nn.Sequential(first, nn.Dropout(0.5), second), 24, ["product: 0, 2"])
    assert len(layers(merged)) == 1


def test_three_layers_with_nothing_between_become_one():
    check(
        nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))), 16, ["product: 0, 1", "product: merged_0_1, 2"]
    )


def test_an_activation_between_layers_is_respected():
    check(models.relu_mlp(16, 3), 16, [])


def test_a_narrow_middle_is_left_alone_because_its_product_would_be_more_work():
    check(nn.Sequential(nn.Linear(64, 4), nn.Linear(4, 64)), 64, [])


class Twice(nn.Module):
    """One layer called on two inputs, and another that shares one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.shared(x) + self.other(x) + self.shared(x * 2)


class Reused(nn.Module):
    """The result between two layers is needed elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.a(x)
        return self.b(y) + y


class Overwritten(nn.Module):
    """The input changes in place between two layers that read it."""

    def __init__(self, alias: bool) -> None:
        super().__init__()
        self.a, self.b, self.alias = nn.Linear(8, 8), nn.Linear(8, 8), alias

    def forward(self, x):
        x = x + 0
        y = self.a(x)
        (x.view(-1) if self.alias else x).mul_(2)
        return y + self.b(x)


class InPlaceElsewhere(nn.Module):
    """An in-place activation of another layer's output changes nothing that is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.relu = nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.a(x)) * self.b(x)


class Heads(nn.Module):
    """Projections that are viewed as heads, which a strided piece would refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.q(x).view(-1) * self.k(x).view(-1)


@pytest.mark.parametrize("module", [Twice(), Reused(), Overwritten(False), Overwritten(True)])
def test_what_would_change_the_result_is_left_alone(module):
    check(module, 8, [])


@pytest.mark.parametrize(("module", "names"), [(InPlaceElsewhere(), "a, b"), (Heads(), "q, k")])
def test_what_changes_nothing_is_merged(module, names):
    assert len(layers(check(module, 8, [f"shared input: {names}"]))) == 1


def test_a_layer_with_a_hook_is_left_alone():
    module = models.Qkv(8)
    module.k.register_forward_hook(lambda *_: None)
    check(module, 8, ["shared input: q, v"])


def test_training_mode_and_untraceable_modules_are_refused():
    with pytest.raises(Fault, match=r"call \.eval\(\)"):
        merge_linears(models.Qkv(8).train())

    class Branches(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(Fault, match="cannot trace Branches"):
        merge_linears(Branches().eval())


def test_the_counterexample_is_no_rounding_error():
    rows = torch.randn(16, 32).numpy()
    found = study.counterexample(32, rows)
    assert not found["legal"]
    assert found["error"] > 0.1 and found["error_concatenated"] > 0.1
