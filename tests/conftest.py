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
