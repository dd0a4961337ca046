"""Fixtures for tests of any module."""

import os

import pytest


@pytest.fixture(scope="module")
def one_thread():
    """One thread for PyTorch, here and in child processes: more only wait for each other on small sizes."""
    import torch

    before, variable = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    yield
    torch.set_num_threads(before)
    if variable is None:
        del os.environ["OMP_NUM_THREADS"]
    else:
        os.environ["OMP_NUM_THREADS"] = variable


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A file of random weights whose BatchNorm statistics are far from 0 and 1."""
    import torch

    import torch_model

    torch.manual_seed(3)
    model = torch_model.DepthwiseMNIST()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.weight, 0.5, 2.0)
            torch.nn.init.normal_(module.bias, 0.3)
            torch.nn.init.normal_(module.running_mean, 0.5)
            torch.nn.init.uniform_(module.running_var, 0.2, 3.0)
    path = tmp_path_factory.mktemp("weights") / "random.pth"
    torch_model.save_checkpoint(model.state_dict(), path)
    return path
