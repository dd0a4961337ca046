"""What half precision does to the network's answers, in PyTorch and MLX.

BatchNorm is folded in float32, weights and activations are stored in the type (at MLX's level `network` only
images and logits are: what lies between never leaves its launch), products accumulate in float32. Logits are
compared with PyTorch's in float32 on the CPU, BatchNorm as written. Layout: PyTorch's (N, C, H, W), and MLX's
(N, H, W, C) where MLX is called.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

import training
from harness import machine
from harness.cli import Fault
from mnist_data import Digits, normalise
from torch_model import fold_batchnorm, load_model

DTYPES = ("float32", "float16", "bfloat16")
BATCH = 500


def evaluate(checkpoint: Path, digits: Digits, device: torch.device) -> dict[str, Any]:
    """Accuracy and largest logit difference on the whole test set, per framework and type; JSON-able.

    Raises Fault naming framework, type and layer where a value is not finite.
    """
    images = normalise(digits.test_images)  # (N, 1, 28, 28)
    model = load_model(checkpoint)
    wanted = in_batches(images, lambda batch: torch_logits(model, batch, torch.float32, torch.device("cpu")))
    folded = fold_batchnorm(model)
    entries = []
    for dtype in DTYPES:
        kind = getattr(torch, dtype)
        network = fold_batchnorm(model).to(device, kind) if dtype != "float32" else folded.to(device)
        logits = in_batches(images, partial(torch_logits, network, dtype=kind, device=device))
        name = training.device_name(device)
        entries.append(compare("PyTorch, folded", name, dtype, logits, wanted, digits.test_labels))
    return {"entries": entries + mlx_entries(checkpoint, images, wanted, digits.test_labels)}


def mlx_entries(
    checkpoint: Path, images: np.ndarray, wanted: np.ndarray, labels: np.ndarray
) -> list[dict[str, Any]]:
    """The entries of MLX, at level `folded` or, on a CPU and in types that it takes, `network`."""
    os.environ.setdefault("MLX_ENABLE_TF32", "0")  # read when MLX is imported; PyTorch's is off here too
    try:
        import mlx.core as mx

        import kernels
        import mlx_model
    except ImportError:
        return []
    on_cpu = mx.default_device() == mx.cpu
    entries = []
    batches = np.ascontiguousarray(images.transpose(0, 2, 3, 1))  # NCHW -> NHWC
    for dtype in DTYPES:
        level = "folded"
        if on_cpu and dtype != "bfloat16" and kernels.unavailable(kernels.default_target()) is None:
            level = "network"  # MLX's own convolutions take 40 times as long on a CPU
        model = mlx_model.get_model(level, checkpoint, getattr(mx, dtype))
        logits = in_batches(batches, partial(mlx_logits, model))
        device = machine.chip_name() if on_cpu else str(mx.device_info()["device_name"])
        entries.append(compare(f"MLX, level {level}", device, dtype, logits, wanted, labels))
    return entries


def in_batches(images: np.ndarray, forward: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Logits (N, 10) of all images, `BATCH` at a time, with a progress bar."""
    starts = tqdm(range(0, len(images), BATCH), unit="batch", leave=False, disable=None)
    return np.concatenate([forward(images[i : i + BATCH]) for i in starts])


@torch.no_grad()
def torch_logits(
    model: torch.nn.Module, images: np.ndarray, dtype: torch.dtype, device: torch.device
) -> np.ndarray:
    """Logits (N, 10) float32 of images (N, 1, 28, 28); Fault naming the layer where one is not finite."""
    batch = torch.from_numpy(images).to(device, dtype)
    with training.full_precision():
        logits = model(batch).float()
    if not logits.isfinite().all():
        layer = training.first_nonfinite_layer(model, batch)
        raise Fault(f"PyTorch in {str(dtype)[6:]}: a value that is not finite left layer {layer}.")
    return logits.cpu().numpy()


def mlx_logits(model: Any, images: np.ndarray) -> np.ndarray:
    """Logits (N, 10) float32 of images (N, 28, 28, 1); Fault naming the layer where one is not finite."""
    import mlx.core as mx

    batch = mx.array(images)
    logits = model(batch).astype(mx.float32)
    if not mx.all(mx.isfinite(logits)).item():
        layer = first_nonfinite_mlx_layer(model, batch)
        raise Fault(
            f"MLX in {str(model.dtype).split('.')[-1]}: a value that is not finite left layer {layer}."
        )
    return np.array(logits)


def first_nonfinite_mlx_layer(model: Any, batch: Any) -> str:
    """Name of the first part, in order of execution, whose output on `batch` is not finite.

    batch: (N, 28, 28, 1). A level that runs as a few launches has no parts to look into: the folded level
    stands in for it.
    """
    import mlx.core as mx

    import mlx_model

    if model.level in mlx_model.LAUNCH_LEVELS:
        inner = mlx_model.DepthwiseMNIST("folded", model.dtype)
        inner.load_weights(list(mlx_model.flat(model).items()))
        inner.eval()
        model = inner.fold()

    def bad(array: Any) -> bool:
        return not mx.all(mx.isfinite(array)).item()

    x = model.stem(batch.astype(model.dtype))
    if bad(x):
        return "conv1"
    for number, block in enumerate(model.stages.layers):
        y = block.depthwise(x)
        if bad(y):
            return f"stages.{number}.dw"
        for part, array in (("pw", block.pointwise(y)), ("skip", block.skip(x))):
            if bad(array):
                return f"stages.{number}.{part}"
        x = block(x)
        if bad(x):
            return f"stages.{number}"
    return "fc"


def compare(
    framework: str, device: str, dtype: str, logits: np.ndarray, wanted: np.ndarray, labels: np.ndarray
) -> dict[str, Any]:
    """One row of the table: accuracy, largest logit difference, and how many answers changed."""
    return {
        "framework": framework,
        "device": device,
        "dtype": dtype,
        "images": len(labels),
        "accuracy": float((logits.argmax(1) == labels).mean()),
        "largest_logit_difference": float(np.abs(logits - wanted).max()),
        "changed_answers": int((logits.argmax(1) != wanted.argmax(1)).sum()),
    }
