"""How DepthwiseMNIST is trained: recipes, the loop on the device, resuming, and what is measured on the way.

    import training
    run = training.train(training.RECIPES["default"], digits, training.Options(seed=42), state_path)
    run.state      # the best epoch's weights, CPU tensors
    run.summary    # JSON-able: history, accuracies, speed

The set lies on the device as uint8 and is gathered, augmented and normalised there; no loader processes. All
random numbers come from one CPU generator, so a run repeats exactly on a CPU, and a stopped run continues to
the same weights. Layout is PyTorch's, (N, C, H, W).
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from harness import machine
from harness.cli import Fault
from harness.paths import replace_atomic, shown
from mnist_data import CLASSES, MEAN, SIDE, STD, Digits, validation_split
from torch_model import DepthwiseMNIST, count_params

STATE_VERSION = 1
EVALUATION_BATCH = 1000
TIME_TO = 0.99  # the accuracy of "time to 99 %"


@dataclass(frozen=True)
class Recipe:
    """What decides the weights, besides data and seed."""

    name: str
    epochs: int
    batch_size: int
    optimizer: (
        str  # adam: L2 on every parameter; adamw, sgd: decay of the convolution and linear weights only
    )
    learning_rate: float  # at its peak
    weight_decay: float
    warmup: float = 0.0  # fraction of the steps in which the rate rises to its peak; then a cosine to 0
    label_smoothing: float = 0.0
    rotation_deg: float = 0.0  # augmentation: each is the half-width of a uniform distribution
    scale: float = 0.0
    shear: float = 0.0
    shift_px: float = 0.0
    average_decay: float = 0.0  # of the exponential moving average of the weights, per step; 0: no average


_AUGMENTED = Recipe(
    "augmented",
    epochs=40,
    batch_size=512,
    optimizer="adamw",
    learning_rate=5e-3,
    weight_decay=0.05,
    warmup=0.1,
    rotation_deg=10,
    scale=0.1,
    shear=0.1,
    shift_px=2,
    average_decay=0.998,
)
# What `--search` compares by validation, and the one that the comparison chose.
CANDIDATES = {
    recipe.name: recipe
    for recipe in (
        _AUGMENTED,
        replace(_AUGMENTED, name="smoothed", label_smoothing=0.1),
        replace(_AUGMENTED, name="moved-more", rotation_deg=15, scale=0.15, shear=0.2, shift_px=2.5),
        replace(_AUGMENTED, name="decayed-more", weight_decay=0.2),
        replace(_AUGMENTED, name="faster", learning_rate=1e-2),
        replace(_AUGMENTED, name="sgd", optimizer="sgd", learning_rate=0.3, weight_decay=5e-4),
        replace(_AUGMENTED, name="longer", epochs=60),
    )
}
CHOSEN = "smoothed"
RECIPES = {
    "default": Recipe("default", 7, 128, "adam", 1e-3, 1e-4),
    "best": replace(CANDIDATES[CHOSEN], name="best"),
}


@dataclass(frozen=True)
class Options:
    """Where and how exactly a recipe is run."""

    seed: int = 42
    device: str = "cpu"
    channels_last: bool = True
    autocast: bool = False  # bfloat16 matrix products and convolutions, weights in float32
    test: bool = True  # False leaves the test set alone, for comparisons that precede the choice of a recipe


@dataclass(frozen=True)
class Run:
    """The weights of the best epoch by validation, and the JSON-able account of how they came about."""

    state: dict[str, torch.Tensor]
    summary: dict[str, Any]


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA, else MPS, else the CPU. Raises Fault for a device that is not there."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, there in available.items() if there)
    if not available.get(name, False):
        raise Fault(
            f"--device {name} is not available here; use one of {', '.join(_there(available))}, auto."
        )
    return torch.device(name)


def device_name(device: torch.device) -> str:
    """What a reader of the results needs to know about the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "mps":
        return "Apple GPU (MPS)"
    return f"{machine.chip_name()}, {torch.get_num_threads()} threads"


def synchronize(device: torch.device) -> None:
    """Wait until everything queued on `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


class Preparation:
    """Images (N, 28, 28) uint8 on a device -> augmented, normalised batches (B, 1, 28, 28) float32."""

    def __init__(self, images: torch.Tensor, recipe: Recipe | None, channels_last: bool):
        self.images = images
        self.recipe = recipe
        # With one channel both layouts are the same bytes; the strides tell convolutions which one is meant.
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        centres = (2 * torch.arange(SIDE, dtype=torch.float32) + 1) / SIDE - 1
        y, x = torch.meshgrid(centres, centres, indexing="ij")
        grid = torch.stack((x, y, torch.ones_like(x)), dim=-1).reshape(SIDE * SIDE, 3)
        self.grid = grid.to(images.device)  # homogeneous pixel centres, both axes in [-1, 1]

    @property
    def augments(self) -> bool:
        """False where a batch is only gathered and normalised."""
        recipe = self.recipe
        return recipe is not None and any((recipe.rotation_deg, recipe.scale, recipe.shear, recipe.shift_px))

    def draw(self, count: int, generator: torch.Generator) -> torch.Tensor | None:
        """Affine maps of `count` images, (count, 3, 2), output to input positions; None: no augmentation.

        Drawn for a whole epoch at once: one transfer to the device instead of one per batch.
        """
        if self.recipe is None or not self.augments:
            return None
        uniform = 2 * torch.rand((count, 6), generator=generator) - 1
        return affine(uniform, self.recipe).to(self.images.device)

    def __call__(self, indices: torch.Tensor, maps: torch.Tensor | None = None) -> torch.Tensor:
        """The batch of images `indices` (B,), moved by `maps` (B, 3, 2): (B, 1, 28, 28)."""
        batch = self.images[indices].float()[:, None]  # (B, 28, 28) -> (B, 1, 28, 28)
        if maps is not None:
            positions = (self.grid @ maps).view(-1, SIDE, SIDE, 2)
            # Before normalising, so that what comes in from outside is the background, 0.
            batch = functional.grid_sample(batch, positions, align_corners=False)
        batch = batch.mul_(1 / (255 * STD)).sub_(MEAN / STD)
        return batch.contiguous(memory_format=self.format)


def affine(uniform: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Numbers in [-1, 1], (N, 6), -> maps (N, 3, 2): (x, y, 1) of the output @ map = (x, y) of the input."""
    angle = uniform[:, 0] * math.radians(recipe.rotation_deg)
    wide, high = 1 + recipe.scale * uniform[:, 1], 1 + recipe.scale * uniform[:, 2]
    shear = recipe.shear * uniform[:, 3]
    shift = uniform[:, 4:] * (2 * recipe.shift_px / SIDE)
    cos, sin = angle.cos(), angle.sin()
    to_x = torch.stack((wide * cos, wide * (shear * cos - sin), shift[:, 0]), dim=1)
    to_y = torch.stack((high * sin, high * (shear * sin + cos), shift[:, 1]), dim=1)
    return torch.stack((to_x, to_y), dim=2)


def learning_rate(recipe: Recipe, step: int, steps: int) -> float:
    """The rate of `step` of `steps`: a linear rise over the warm-up, then half a cosine down to 0."""
    rising = recipe.warmup * steps
    if step < rising:
        return recipe.learning_rate * (step + 1) / (rising + 1)
    done = (step - rising) / max(1.0, steps - rising)
    return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def make_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """The recipe's optimizer over the parameters of `model`."""
    if recipe.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), recipe.learning_rate, weight_decay=recipe.weight_decay)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(groups, recipe.learning_rate)
    return torch.optim.SGD(groups, recipe.learning_rate, momentum=0.9, nesterov=True)


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute float32 convolutions without TF32, which cuDNN uses by default and training keeps."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@torch.no_grad()
def logits_of(model: nn.Module, prepare: Preparation, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits (count, 10) float32 of the first `count` images, computed in `dtype`."""
    device = prepare.images.device
    parts = []
    with full_precision():
        for start in range(0, count, EVALUATION_BATCH):
            indices = torch.arange(start, min(start + EVALUATION_BATCH, count), device=device)
            parts.append(model(prepare(indices).to(dtype)).float())
    return torch.cat(parts)


def evaluate(model: nn.Module, prepare: Preparation, labels: torch.Tensor) -> tuple[float, float]:
    """Mean cross entropy and accuracy of `model`, put into eval mode, on all images of `prepare`."""
    model.eval()
    logits = logits_of(model, prepare, len(labels), torch.float32)
    require_finite(logits, model, prepare)
    loss = functional.cross_entropy(logits, labels).item()
    return loss, (logits.argmax(1) == labels).float().mean().item()


def require_finite(
    logits: torch.Tensor, model: nn.Module, prepare: Preparation, dtype: torch.dtype = torch.float32
) -> None:
    """Raise Fault naming the first layer with a value that is not finite, where `logits` holds one."""
    bad = ~logits.isfinite().all(dim=1)
    if not bad.any():
        return
    first = int(bad.nonzero()[0, 0])
    image = prepare(torch.tensor([first], device=prepare.images.device)).to(dtype)
    where = first_nonfinite_layer(model, image)
    raise Fault(f"a value that is not finite left layer {where} on image {first} in {str(dtype)[6:]}.")


@torch.no_grad()
def first_nonfinite_layer(model: nn.Module, batch: torch.Tensor) -> str:
    """Name of the first layer, in the order of execution, whose output on `batch` holds inf or nan."""
    found: list[str] = []
    hooks = [
        module.register_forward_hook(
            lambda _module, _inputs, output, name=name: (
                found.append(name) if not output.isfinite().all() else None
            )
        )
        for name, module in model.named_modules()
        if not list(module.children())
    ]
    try:
        model(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else "none (it did not recur)"


class _Trainer:
    """One training: model, optimizer, average, random state, and the epochs so far."""

    def __init__(self, recipe: Recipe, digits: Digits, options: Options):
        self.recipe, self.options = recipe, options
        self.device = torch.device(options.device)
        torch.backends.cudnn.benchmark = True  # all batches but an epoch's last have one size
        training, validation = validation_split(len(digits.train_images))
        self.prepare = self.on_device(digits.train_images[training], recipe)
        self.labels = self._labels(digits.train_labels[training])
        self.prepare_validation = self.on_device(digits.train_images[validation], None)
        self.labels_validation = self._labels(digits.train_labels[validation])
        torch.manual_seed(options.seed)
        self.generator = torch.Generator().manual_seed(options.seed)
        model = DepthwiseMNIST().to(self.device)
        self.model = model.to(memory_format=self.prepare.format)
        self.optimizer = make_optimizer(recipe, self.model)
        self.average = None
        if recipe.average_decay:
            decay = get_ema_multi_avg_fn(recipe.average_decay)
            self.average = AveragedModel(self.model, multi_avg_fn=decay, use_buffers=True)
        self.steps_per_epoch = math.ceil(len(self.labels) / recipe.batch_size)
        self.history: list[dict[str, Any]] = []
        self.best: dict[str, torch.Tensor] = {}
        self.best_epoch = 0
        # What has to agree for a stopped training to be continued.
        self.identity = {
            "recipe": asdict(recipe),
            "options": asdict(options),
            "images": len(self.labels),
            "data": digits.provenance,
            "threads": torch.get_num_threads(),
        }

    def on_device(self, images: np.ndarray, recipe: Recipe | None) -> Preparation:
        """The preparation of `images` (N, 28, 28), augmented where a recipe is given."""
        return Preparation(torch.tensor(images, device=self.device), recipe, self.options.channels_last)

    def _labels(self, labels: np.ndarray) -> torch.Tensor:
        return torch.tensor(labels.astype(np.int64), device=self.device)

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Indices (B,) and maps (B, 3, 2) of each batch of one epoch, in a new order."""
        count = len(self.labels)
        order = torch.randperm(count, generator=self.generator).to(self.device)
        maps = self.prepare.draw(count, self.generator)
        for start in range(0, count, self.recipe.batch_size):
            part = slice(start, start + self.recipe.batch_size)
            yield order[part], None if maps is None else maps[part]

    def step(
        self, images: torch.Tensor, labels: torch.Tensor, rate: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One update; returns the batch's mean loss and its number of right answers, both on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.autocast):
            logits = self.model(images)
        logits = logits.float()
        loss = functional.cross_entropy(logits, labels, label_smoothing=self.recipe.label_smoothing)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.average is not None:
            self.average.update_parameters(self.model)
        return loss.detach(), (logits.detach().argmax(1) == labels).sum()

    def epoch(self, tick: Callable[[Callable[[], float]], None]) -> None:
        """Train one epoch, validate, and keep the weights if they are the best so far.

        `tick` is called after each step with a function that reads the loss, which waits for the device.
        """
        start = time.perf_counter()
        done = len(self.history) * self.steps_per_epoch
        total = self.recipe.epochs * self.steps_per_epoch
        loss_sum = torch.zeros((), device=self.device)
        right = torch.zeros((), dtype=torch.int64, device=self.device)
        rate = 0.0
        self.model.train()
        for number, (indices, maps) in enumerate(self.batches()):
            rate = learning_rate(self.recipe, done + number, total)
            loss, correct = self.step(self.prepare(indices, maps), self.labels[indices], rate)
            loss_sum += loss * len(indices)
            right += correct
            tick(loss.item)
        train_loss = loss_sum.item() / len(self.labels)
        trained = time.perf_counter()
        if not math.isfinite(train_loss):
            where = first_nonfinite_layer(self.model, self.prepare(torch.arange(1, device=self.device)))
            raise Fault(
                f"the loss of epoch {len(self.history) + 1} is not finite (first bad layer: {where}); "
                "lower the learning rate."
            )
        network = self.model if self.average is None else self.average.module
        validation_loss, validation_accuracy = evaluate(
            network, self.prepare_validation, self.labels_validation
        )
        self.history.append(
            {
                "epoch": len(self.history) + 1,
                "train_loss": train_loss,
                "train_accuracy": right.item() / len(self.labels),
                "validation_loss": validation_loss,
                "validation_accuracy": validation_accuracy,
                "learning_rate": rate,
                "seconds": trained - start,
                "validation_seconds": time.perf_counter() - trained,
            }
        )
        if self.best_epoch == 0 or _rank(self.history[-1]) > _rank(self.history[self.best_epoch - 1]):
            self.best_epoch = len(self.history)
            self.best = {name: value.detach().cpu().clone() for name, value in network.state_dict().items()}

    def save(self, path: Path) -> None:
        """Write everything that the rest of the training depends on, atomically."""
        state = {
            "version": STATE_VERSION,
            "identity": self.identity,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "generator": self.generator.get_state(),
            "torch_generator": torch.get_rng_state(),
            "history": self.history,
            "best": self.best,
            "best_epoch": self.best_epoch,
        }
        with replace_atomic(path) as temporary:
            torch.save(state, temporary)

    def load(self, path: Path) -> None:
        """Continue from what `save` wrote. Raises Fault for a missing, damaged or differing state."""
        name = shown(path)
        if not path.is_file():
            raise Fault(f"there is no unfinished training in {name}; start one without --resume.")
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            version, identity = state["version"], state["identity"]
        except Exception as error:  # damaged bytes can make the unpickler raise nearly anything
            raise Fault(f"{name} is damaged or no training state; start again without --resume.") from error
        if version != STATE_VERSION:
            raise Fault(
                f"{name} has version {version}, this program {STATE_VERSION}; start without --resume."
            )
        difference = _difference(identity, self.identity)
        if difference:
            raise Fault(
                f"{name} is of another training ({difference}); use its settings or start without --resume."
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self.generator.set_state(state["generator"])
        torch.set_rng_state(state["torch_generator"])
        self.history, self.best, self.best_epoch = state["history"], state["best"], state["best_epoch"]


def train(
    recipe: Recipe,
    digits: Digits,
    options: Options,
    state_path: Path,
    resume: bool = False,
    tick: Callable[[Callable[[], float]], None] = lambda read_loss: None,
    begin: Callable[[int, int], None] = lambda done, total: None,
) -> Run:
    """Train, choosing the epoch by validation, and test the chosen weights once.

    After each epoch the whole training state is written to `state_path`, which is removed at the end; with
    `resume` it is read first. `begin` learns the numbers of steps done and in all, `tick` of each step.
    """
    trainer = _Trainer(recipe, digits, options)
    if resume:
        trainer.load(state_path)
    begin(len(trainer.history) * trainer.steps_per_epoch, recipe.epochs * trainer.steps_per_epoch)
    while len(trainer.history) < recipe.epochs:
        trainer.epoch(tick)
        trainer.save(state_path)
    return _finish(trainer, digits)


def measure_speed(recipe: Recipe, digits: Digits, options: Options, limit_s: float) -> dict[str, Any]:
    """Images per second from a few steps; then, if `limit_s`, train until 99 % validation accuracy.

    Training stops at the first epoch that reaches it, or that ends after `limit_s` seconds.
    """
    trainer = _Trainer(recipe, digits, options)
    trainer.model.train()
    wanted = 6 if trainer.device.type == "cpu" else 60
    timed, start = 0, 0.0
    for number, (indices, maps) in zip(range(wanted + 2), trainer.batches(), strict=False):
        if number == 2:  # after the warm-up of libraries and allocators
            synchronize(trainer.device)
            start = time.perf_counter()
        trainer.step(trainer.prepare(indices, maps), trainer.labels[indices], 0.0)
        timed += number >= 2
    synchronize(trainer.device)
    if not timed:
        raise Fault("the training set has fewer than three batches, too few to time; lower --batch-size.")
    step_ms = 1e3 * (time.perf_counter() - start) / timed
    preparation_ms = _preparation_ms(trainer)
    found = {
        "device": device_name(trainer.device),
        "step_ms": step_ms,
        "images_per_s": 1e3 * recipe.batch_size / step_ms,
        "preparation_ms": preparation_ms,
        "preparation_share": preparation_ms / step_ms,
        "time_to_99_s": None,
        "epochs_to_99": None,
    }
    if limit_s:
        trainer = _Trainer(recipe, digits, options)
        start = time.perf_counter()
        while len(trainer.history) < recipe.epochs and time.perf_counter() - start < limit_s:
            trainer.epoch(lambda read_loss: None)
            if trainer.history[-1]["validation_accuracy"] >= TIME_TO:
                found["time_to_99_s"] = time.perf_counter() - start
                found["epochs_to_99"] = len(trainer.history)
                break
        found["images_per_s"] = speed(trainer)["images_per_s"]
    return found


def _finish(trainer: _Trainer, digits: Digits) -> Run:
    """The test, unless the options spare it, and the account of the run."""
    chosen = trainer.history[trainer.best_epoch - 1]
    summary = {
        "recipe": asdict(trainer.recipe),
        "options": asdict(trainer.options),
        "data_source": digits.source,
        "data_provenance": digits.provenance,
        "train_images": len(trainer.labels),
        "validation_images": len(trainer.labels_validation),
        "test_images": len(digits.test_images),
        "best_epoch": trainer.best_epoch,
        "validation_accuracy": chosen["validation_accuracy"],
        "validation_loss": chosen["validation_loss"],
        "parameters": count_params(trainer.model),
        "history": trainer.history,
        "speed": speed(trainer),
    }
    if trainer.options.test:
        model = DepthwiseMNIST().to(trainer.device).to(memory_format=trainer.prepare.format).eval()
        model.load_state_dict(trainer.best)
        prepare = trainer.on_device(digits.test_images, None)
        logits = logits_of(model, prepare, len(digits.test_images), torch.float32)
        require_finite(logits, model, prepare)
        summary |= account_of_test(logits.cpu().numpy(), digits.test_images, digits.test_labels)
    return Run(trainer.best, summary)


def account_of_test(logits: np.ndarray, images: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """Accuracy, confusion matrix [label][answer], and the most confident mistakes with their pixels as hex.

    logits: (N, 10) float32; images: (N, 28, 28) uint8; labels: (N,).
    """
    answers = logits.argmax(1)
    exponents = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    confidence = exponents.max(1) / exponents.sum(1)
    confusion = np.zeros((CLASSES, CLASSES), np.int64)
    np.add.at(confusion, (labels.astype(np.int64), answers), 1)
    wrong = np.flatnonzero(answers != labels)
    wrong = wrong[np.argsort(-confidence[wrong], kind="stable")][:16]
    return {
        "test_accuracy": float((answers == labels).mean()),
        "confusion": confusion.tolist(),
        "mistakes": [
            {
                "index": int(i),
                "label": int(labels[i]),
                "answer": int(answers[i]),
                "confidence": float(confidence[i]),
                "pixels": images[i].tobytes().hex(),
            }
            for i in wrong
        ],
    }


def speed(trainer: _Trainer) -> dict[str, Any]:
    """Images per second, seconds to 99 % validation accuracy, and the share of input preparation in a step.

    The first epoch, which holds the warm-up of libraries and allocators, is left out of the images per second
    where there are others. Time to 99 % counts everything from the first step, validation included.
    """
    history = trainer.history
    seconds = np.array([epoch["seconds"] for epoch in history])
    steady = seconds[1:] if len(seconds) > 1 else seconds
    elapsed = np.cumsum(seconds + [epoch["validation_seconds"] for epoch in history])
    reached = [i for i, epoch in enumerate(history) if epoch["validation_accuracy"] >= TIME_TO]
    step_ms = 1e3 * float(np.median(steady)) / trainer.steps_per_epoch
    preparation_ms = _preparation_ms(trainer)
    return {
        "device": device_name(trainer.device),
        "images_per_s": len(trainer.labels) / float(np.median(steady)),
        "time_to_99_s": float(elapsed[reached[0]]) if reached else None,
        "epochs_to_99": reached[0] + 1 if reached else None,
        "step_ms": step_ms,
        "preparation_ms": preparation_ms,
        "preparation_share": preparation_ms / step_ms,
        "total_s": float(elapsed[-1]),
    }


def _preparation_ms(trainer: _Trainer, repeats: int = 20) -> float:
    """Milliseconds that preparing one batch takes, from `repeats` in a row ended by a synchronise."""
    batches = [batch for batch, _ in zip(trainer.batches(), range(repeats + 2), strict=False)]
    for indices, maps in batches[:2]:
        trainer.prepare(indices, maps)
    synchronize(trainer.device)
    start = time.perf_counter()
    timed = batches[2:] or batches
    for indices, maps in timed:
        trainer.prepare(indices, maps)
    synchronize(trainer.device)
    return 1e3 * (time.perf_counter() - start) / len(timed)


def _rank(epoch: dict[str, Any]) -> tuple[float, float]:
    """Epochs are chosen by validation accuracy, and by lower loss where that is equal."""
    return epoch["validation_accuracy"], -epoch["validation_loss"]


def _difference(stored: Any, wanted: Any, where: str = "") -> str | None:
    """The first setting in which two nested dicts differ, in words; None if they agree."""
    if isinstance(stored, dict) and isinstance(wanted, dict):
        for key in sorted({*stored, *wanted}):
            difference = _difference(stored.get(key), wanted.get(key), f"{where} {key}".strip())
            if difference:
                return difference
        return None
    return None if stored == wanted else f"{where} was {stored}, now {wanted}"


def _there(available: dict[str, bool]) -> list[str]:
    return [kind for kind, there in available.items() if there]
