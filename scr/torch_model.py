"""DepthwiseMNIST in PyTorch, and the reading and writing of its checkpoints.

Layout in this file is PyTorch's: images (N, C, H, W), convolution weights (out, in / groups, kH, kW).

    import torch_model
    model = torch_model.load_model("output/best_model.pth")   # eval mode, CPU, float32
    logits = model(images)                                    # (N, 1, 28, 28) -> (N, 10)
"""

import copy
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from harness.cli import Fault
from harness.paths import replace_atomic, shown

STEM_CHANNELS = 48
CLASSES = 10
BLOCKS = ((48, 96, 2), (96, 96, 1), (96, 192, 2), (192, 192, 1))  # (channels in, channels out, stride)

WRAPPERS = ("model", "state_dict", "model_state_dict", "net", "module")
WRAPPER_PREFIXES = ("module.", "_orig_mod.")  # left by DataParallel and by torch.compile


class DepthwiseSeparableConv(nn.Module):
    """Depthwise 3×3 + BatchNorm + ReLU, pointwise 1×1 + BatchNorm, plus the skip, ReLU.

    (N, channels_in, H, W) -> (N, channels_out, ceil(H / stride), ceil(W / stride)). The skip is the identity
    where the shape stays, else a 1×1 convolution with the block's stride + BatchNorm.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int):
        super().__init__()
        self.dw = nn.Conv2d(channels_in, channels_in, 3, stride, padding=1, groups=channels_in, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_in)
        self.pw = nn.Conv2d(channels_in, channels_out, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        if stride == 1 and channels_in == channels_out:
            self.skip: nn.Module = nn.Identity()
        else:
            self.skip = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (N, channels_in, H, W) -> (N, channels_out, ceil(H / stride), ceil(W / stride))."""
        y = torch.relu(self.bn1(self.dw(x)))
        return torch.relu(self.bn2(self.pw(y)) + self.skip(x))


class DepthwiseMNIST(nn.Module):
    """The article's network: 101,098 trainable parameters; images (N, 1, 28, 28) -> logits (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(
            nn.Conv2d(1, STEM_CHANNELS, 3, padding=1, bias=False), nn.BatchNorm2d(STEM_CHANNELS), nn.ReLU()
        )
        self.stages = nn.Sequential(*(DepthwiseSeparableConv(*block) for block in BLOCKS))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(BLOCKS[-1][1], CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (N, 1, 28, 28) normalised images -> (N, 10) logits."""
        x = self.conv1(x)  # (N, 48, 28, 28)
        x = self.stages(x)  # (N, 192, 7, 7)
        return self.fc(self.avgpool(x).flatten(1))


def count_params(model: nn.Module) -> dict[str, int]:
    """Elements by the three conventions in use: trainable, with BatchNorm statistics, whole state_dict."""
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    state = model.state_dict()
    counters = sum(v.numel() for k, v in state.items() if k.endswith("num_batches_tracked"))
    elements = sum(v.numel() for v in state.values())
    return {
        "trainable": trainable,
        "with_batchnorm_statistics": elements - counters,
        "state_dict": elements,
    }


def save_checkpoint(state: Mapping[str, torch.Tensor], path: Path | str) -> None:
    """Write `state` as a plain state_dict of contiguous CPU tensors; an older file is replaced atomically."""
    plain = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
    with replace_atomic(path) as temporary:
        torch.save(plain, temporary)


def read_state(path: Path | str) -> dict[str, torch.Tensor]:
    """Read a checkpoint of any network and clean it: CPU float32 tensors by their bare names.

    Unwraps {"model": …} and the like, ignoring optimizer state beside it; strips `module.` and `_orig_mod.`
    from the start of keys, in any nesting; drops `num_batches_tracked`; widens or narrows floats to float32.
    Pickled objects are refused, never executed. Raises Fault, one sentence naming the file and the entry.
    """
    path = Path(path)
    name = shown(path)
    state = _unwrap(_load_pickle(path, name), name)
    cleaned: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        bare = _bare_name(key)
        if bare == "num_batches_tracked" or bare.endswith(".num_batches_tracked"):
            continue  # a training counter that no forward pass uses
        if bare in cleaned:
            raise Fault(
                f"{name} holds {bare} twice, once with a wrapper's prefix; save one network per file."
            )
        cleaned[bare] = _float32(value, bare, name)
    return cleaned


def read_checkpoint(path: Path | str) -> dict[str, torch.Tensor]:
    """Read a checkpoint of DepthwiseMNIST: as `read_state`, and every key present, known and rightly shaped.

    Returns 57 tensors: weights and BatchNorm statistics without `num_batches_tracked`. Raises Fault.
    """
    state = read_state(path)
    check_shapes(state, expected_shapes(), shown(path))
    return state


def expected_shapes() -> dict[str, tuple[int, ...]]:
    """Name to shape of every tensor that a DepthwiseMNIST checkpoint must hold."""
    with torch.device("meta"):
        model = DepthwiseMNIST()
    return {
        name: tuple(value.shape)
        for name, value in model.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }


def check_shapes(
    state: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[int, ...]], name: str
) -> None:
    """Raise Fault listing every missing, unexpected and wrongly shaped entry of `state`."""
    missing = [key for key in expected if key not in state]
    unexpected = [key for key in state if key not in expected]
    shaped = [
        f"{key} is {tuple(state[key].shape)} instead of {shape}"
        for key, shape in expected.items()
        if key in state and tuple(state[key].shape) != shape
    ]
    parts = [
        f"{label}: {', '.join(keys)}"
        for label, keys in (("missing", missing), ("unexpected", unexpected), ("wrong shape", shaped))
        if keys
    ]
    if parts:
        raise Fault(
            f"{name} is no checkpoint of this network ({'; '.join(parts)}); train one or name another."
        )


def load_model(path: Path | str) -> DepthwiseMNIST:
    """The network with the weights of checkpoint `path`, in eval mode, float32, on the CPU. Raises Fault."""
    return model_from(read_checkpoint(path))


def model_from(state: Mapping[str, torch.Tensor]) -> DepthwiseMNIST:
    """The network with the weights `state` (as `read_checkpoint` returns them), in eval mode."""
    model = DepthwiseMNIST()
    # Only the counters, dropped on reading, may be absent: read_checkpoint has compared everything else.
    model.load_state_dict(dict(state), strict=False)
    return model.eval()


def fold_batchnorm(model: DepthwiseMNIST) -> DepthwiseMNIST:
    """A copy of `model` (eval mode, float32) with every BatchNorm folded into its convolution.

    The folded convolutions have a bias; the BatchNorm places hold the identity, so names stay as they were.
    """
    folded = copy.deepcopy(model).eval()
    folded.conv1[0] = _fused(folded.conv1[0], folded.conv1[1])
    folded.conv1[1] = nn.Identity()
    for block in folded.stages:
        block.dw, block.bn1 = _fused(block.dw, block.bn1), nn.Identity()
        block.pw, block.bn2 = _fused(block.pw, block.bn2), nn.Identity()
        if isinstance(block.skip, nn.Sequential):
            block.skip = _fused(block.skip[0], block.skip[1])
    return folded


def _fused(conv: torch.Tensor | nn.Module, norm: torch.Tensor | nn.Module) -> nn.Conv2d:
    """A convolution and the BatchNorm behind it as one convolution."""
    assert isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d)
    return fuse_conv_bn_eval(conv, norm)


def _load_pickle(path: Path, name: str) -> object:
    """The object that torch.save wrote to `path`, of tensors and plain containers only."""
    if not path.is_file():
        raise Fault(f"{name} does not exist; `python scr/train_mnist.py` writes a checkpoint.")
    if path.stat().st_size == 0:
        raise Fault(f"{name} is empty; train again or restore it from version control.")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes can make the unpickler raise nearly anything
        blocked = re.search(r"GLOBAL (\S+)", str(error))  # torch's name for what a pickle asks to import
        if blocked:
            raise Fault(
                f"{name} holds a pickled {blocked[1]}, which is never executed; save only the state_dict."
            ) from error
        if isinstance(error, PermissionError):
            raise Fault(f"{name} cannot be read (permission denied); change its permissions.") from error
        raise Fault(
            f"{name} is damaged or no PyTorch checkpoint ({type(error).__name__}); train again or restore it."
        ) from error


def _unwrap(content: object, name: str) -> Mapping[str, torch.Tensor]:
    """The mapping of names to tensors inside `content`, which may be wrapped and lie beside other state."""
    while isinstance(content, Mapping):
        if content and all(isinstance(value, torch.Tensor) for value in content.values()):
            keys = [key for key in content if not isinstance(key, str)]
            if keys:
                raise Fault(f"{name} has the entry {keys[0]!r}, whose name is no text; save a state_dict.")
            return content
        inner = [key for key in WRAPPERS if isinstance(content.get(key), Mapping)]
        if not inner:
            odd = [key for key, value in content.items() if not isinstance(value, torch.Tensor)]
            found = f"the entry {odd[0]!r} is a {type(content[odd[0]]).__name__}" if odd else "it is empty"
            raise Fault(f"{name} holds no state_dict ({found}); save model.state_dict().")
        content = content[inner[0]]
    raise Fault(f"{name} holds a {type(content).__name__}, not a state_dict; save model.state_dict().")


def _bare_name(key: str) -> str:
    """`key` without the prefixes that wrappers put at its start."""
    while key.startswith(WRAPPER_PREFIXES):
        key = key.split(".", 1)[1]
    return key


def _float32(value: torch.Tensor, key: str, name: str) -> torch.Tensor:
    """`value` as a dense, contiguous float32 CPU tensor that shares no memory; Fault where it can't be."""
    if not value.is_floating_point() or value.layout != torch.strided or value.is_quantized:
        raise Fault(f"{name}: {key} is {value.dtype} ({value.layout}), not plain floating-point numbers.")
    value = value.detach().to("cpu", torch.float32).contiguous().clone()
    if not value.isfinite().all():
        raise Fault(f"{name}: {key} holds a value that is not finite; train again.")
    if key.endswith("running_var") and (value < 0).any():
        raise Fault(f"{name}: {key} holds a negative variance; train again.")
    return value
