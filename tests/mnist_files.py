"""Small stand-ins for the MNIST files and for a trained checkpoint, shared by tests."""

from pathlib import Path

import numpy as np
import torch

import torch_model

NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def idx_bytes(array: np.ndarray) -> bytes:
    """An IDX file: magic number, sizes, elements."""
    return (
        (0x0800 + array.ndim).to_bytes(4, "big")
        + b"".join(size.to_bytes(4, "big") for size in array.shape)
        + array.tobytes()
    )


def blobs(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images (count, 28, 28) uint8 that can be told apart, a bright square per class, and labels (count,)."""
    random = np.random.RandomState(seed)
    labels = (np.arange(count) % 10).astype(np.uint8)
    images = random.randint(0, 40, (count, 28, 28)).astype(np.uint8)
    for image, label in zip(images, labels, strict=True):
        row, column = divmod(int(label), 4)
        image[4 + 7 * row : 10 + 7 * row, 2 + 6 * column : 7 + 6 * column] += 200
    return images, labels


def write_mnist(data_dir: Path, train: int = 60, test: int = 20) -> Path:
    """Write four small IDX files in torchvision's layout; returns the raw folder."""
    raw = data_dir / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, array in zip(NAMES, (*blobs(train, 1), *blobs(test, 2)), strict=True):
        (raw / name).write_bytes(idx_bytes(array))
    return raw


def random_model(seed: int = 3) -> torch_model.DepthwiseMNIST:
    """A network in eval mode whose BatchNorm statistics are far from 0 and 1."""
    torch.manual_seed(seed)
    model = torch_model.DepthwiseMNIST()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.uniform_(-0.8, 0.8)
            module.running_var.uniform_(0.2, 4.0)
            module.weight.data.uniform_(0.4, 1.8)
            module.bias.data.uniform_(-0.6, 0.6)
    return model.eval()
