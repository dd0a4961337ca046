"""Train DepthwiseMNIST; writes output/best_model.pth, its JSON account, curves and conclusions/training.md.

    python scr/train_mnist.py                    # default recipe, 7 epochs: about 6 minutes on 2 CPU cores
    python scr/train_mnist.py --recipe best      # augmented and averaged; meant for a GPU
    python scr/train_mnist.py --resume           # continue a training that was stopped
    python scr/train_mnist.py --study --seeds 5  # several seeds of every recipe; keeps the best checkpoint
    python scr/train_mnist.py --search --seeds 2 # compare candidates for the best recipe by validation
    python scr/train_mnist.py --speed            # images per second and time to 99 % on this device
    python scr/train_mnist.py --half             # half-precision accuracy of the checkpoint, PyTorch and MLX
    python scr/train_mnist.py --redraw           # pictures and tables again, from the stored JSON

The last line names test accuracy and files: 99.0 to 99.3 % for the default recipe on the full MNIST, 99.6 to
99.7 % for `best` (conclusions/training.md). The epoch is chosen by a fixed validation split of the training
images; the test set is used once, at the end.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

import mnist_data
import training
import training_report
from harness.cli import Fault, parse_settings, run_command
from harness.paths import CONCLUSIONS, DATA, OUTPUT, shown, write_atomic
from harness.present import present
from torch_model import save_checkpoint


@dataclass(frozen=True)
class Settings:
    """The options of the command, with their defaults."""

    recipe: str = field(
        default="default",
        metadata={"help": "what to train", "choices": (*training.RECIPES, *training.CANDIDATES)},
    )
    epochs: int | None = field(default=None, metadata={"help": "instead of the recipe's"})
    batch_size: int | None = field(default=None, metadata={"help": "instead of the recipe's"})
    seed: int = field(default=42, metadata={"help": "of initial weights, order and augmentation"})
    device: str = field(default="auto", metadata={"help": "auto, cpu, cuda or mps"})
    channels_last: bool = field(
        default=True, metadata={"help": "lay activations out as NHWC (faster on CPU and GPU)"}
    )
    autocast: bool = field(default=False, metadata={"help": "multiply in bfloat16"})
    data_dir: Path = field(default=DATA, metadata={"help": "holds MNIST/raw; downloaded into if empty"})
    download: bool = field(default=True, metadata={"help": "download MNIST where it is missing"})
    output: Path = field(default=OUTPUT, metadata={"help": "folder of the results"})
    resume: bool = field(default=False, metadata={"help": "continue a stopped training or study"})
    study: bool = field(default=False, metadata={"help": "train several seeds of every recipe"})
    seeds: int = field(default=5, metadata={"help": "number of seeds per recipe in a study"})
    jobs: int = field(default=1, metadata={"help": "trainings at a time in a study"})
    search: bool = field(default=False, metadata={"help": "compare candidates by validation only"})
    test: bool = field(default=True, metadata={"help": "use the test set at the end of a training"})
    speed: bool = field(default=False, metadata={"help": "measure training speed; keeps no weights"})
    speed_limit: float = field(default=240.0, metadata={"help": "seconds per recipe for reaching 99 %"})
    half: bool = field(default=False, metadata={"help": "evaluate the checkpoint in half precision"})
    redraw: bool = field(default=False, metadata={"help": "draw and write from stored results only"})


def main() -> None:
    """Read the command line and do what it asks for."""
    settings = parse_settings(Settings, __doc__)
    chosen = [name for name in ("study", "search", "speed", "half", "redraw") if getattr(settings, name)]
    if len(chosen) > 1:
        raise Fault(f"--{chosen[0]} and --{chosen[1]} exclude each other; give one.")
    for name in ("epochs", "batch_size", "seeds", "jobs"):
        if getattr(settings, name) is not None and getattr(settings, name) < 1:
            raise Fault(f"--{name.replace('_', '-')} must be at least 1.")
    if not 0 <= settings.seed < 2**63:
        raise Fault("--seed must be a whole number from 0 to 2^63 - 1.")
    try:
        settings.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Fault(
            f"{shown(settings.output)} is no folder to write to ({error.strerror}); name another --output."
        ) from error
    commands = {"study": study, "search": search, "speed": speed, "half": half, "redraw": redraw}
    commands.get("".join(chosen), train)(settings)


def train(settings: Settings) -> None:
    """One training and everything that is written about it."""
    device = training.pick_device(settings.device)
    digits = load(settings)
    recipe = adjusted((training.RECIPES | training.CANDIDATES)[settings.recipe], settings)
    options = training.Options(
        settings.seed, device.type, settings.channels_last, settings.autocast, settings.test
    )
    state_path = settings.output / "training_state.pth"
    if state_path.exists() and not settings.resume:
        print(f"{shown(state_path)} holds an unfinished training, which this one replaces (see --resume).")
    print(f"training on {training.device_name(device)}: {digits.source}\n{recipe}")
    bar: tqdm | None = None
    shown_at = 0.0

    def begin(done: int, total: int) -> None:
        nonlocal bar
        bar = tqdm(total=total, initial=done, unit="step", disable=None)

    def tick(read_loss: Callable[[], float]) -> None:
        nonlocal shown_at
        assert bar is not None, "begin comes first"
        bar.update()
        now = time.monotonic()
        if not bar.disable and now - shown_at > 0.5:  # reading the loss waits for the device
            bar.set_postfix(loss=f"{read_loss():.4f}", refresh=False)
            shown_at = now

    try:
        run = training.train(recipe, digits, options, state_path, settings.resume, tick, begin)
    except KeyboardInterrupt:
        if state_path.exists():
            print(f"\nstopped; --resume continues from {shown(state_path)}", file=sys.stderr)
        raise
    finally:
        if bar is not None:
            bar.close()
    write_run(run, digits, settings)
    state_path.unlink(missing_ok=True)
    loud(digits)
    if not settings.test:
        print(f"validation accuracy {run.summary['validation_accuracy']:.2%}; the test set was not used")
        return
    print(
        f"test accuracy {run.summary['test_accuracy']:.2%} (epoch {run.summary['best_epoch']} of "
        f"{recipe.epochs}, validation {run.summary['validation_accuracy']:.2%}); wrote "
        f"{shown(settings.output / 'best_model.pth')}, best_model.json, {shown(report_path(settings))}"
    )


def write_run(run: training.Run, digits: mnist_data.Digits, settings: Settings) -> None:
    """Checkpoint, JSON, pictures and report of a run, in this order; the JSON names the checkpoint's hash."""
    checkpoint = settings.output / "best_model.pth"
    save_checkpoint(run.state, checkpoint)
    summary = {
        "checkpoint_sha256": hashlib.sha256(checkpoint.read_bytes()).hexdigest(),
        "data_is_subset": digits.is_subset,
        **run.summary,
        "settings": stored(settings),
        "versions": versions(),
    }
    training_report.write_json(settings.output / "best_model.json", summary)
    if settings.test:
        redraw(settings)


def redraw(settings: Settings) -> None:
    """Pictures and report from the stored JSON."""
    summary = training_report.read_json(settings.output / "best_model.json")
    if summary is not None:
        training_report.draw_all(summary, settings.output)
    training_report.write_report(settings.output, report_path(settings))
    if settings.redraw:
        print(f"wrote {shown(report_path(settings))}")


def study(settings: Settings) -> None:
    """Train seeds 0, 1, … of every recipe in processes of their own; keep the best checkpoint by validation.

    Each finished run is stored at once; with --resume, runs that are stored are not repeated.
    """
    digits = load(settings)
    recipes = {name: adjusted(recipe, settings) for name, recipe in training.RECIPES.items()}
    content: dict[str, Any] = {"recipes": {name: asdict(recipe) for name, recipe in recipes.items()}}
    content |= circumstances(digits, settings)
    path, scratch = settings.output / "training_seeds.json", settings.output / "study"
    if settings.resume:
        content["runs"] = stored_runs(training_report.read_json(path), content, scratch)
    else:
        shutil.rmtree(scratch, ignore_errors=True)
    for key, summary in trainings(recipes, content["runs"], scratch, settings):
        content["runs"].append(row(key, summary))
        content["runs"].sort(key=lambda run: (run["recipe"], run["seed"]))
        training_report.write_json(path, content)
    keep_best(content, scratch, settings)
    shutil.rmtree(scratch)
    loud(digits)
    print(f"wrote {shown(path)}, {shown(settings.output / 'best_model.pth')}, {shown(report_path(settings))}")


def search(settings: Settings) -> None:
    """Train seeds 0, 1, … of every candidate, without the test set, and compare them by validation."""
    digits = load(settings)
    candidates = {name: adjusted(recipe, settings) for name, recipe in training.CANDIDATES.items()}
    content: dict[str, Any] = {"candidates": {name: asdict(recipe) for name, recipe in candidates.items()}}
    content |= circumstances(digits, settings)
    path, scratch = settings.output / "training_search.json", settings.output / "search"
    shutil.rmtree(scratch, ignore_errors=True)
    settings = replace(settings, test=False)
    for (name, seed), summary in trainings(candidates, [], scratch, settings):
        late = summary["history"][-5:]
        content["validation_images"] = summary["validation_images"]
        content["runs"].append(
            {
                "recipe": name,
                "seed": seed,
                "late_validation_accuracy": float(np.mean([epoch["validation_accuracy"] for epoch in late])),
                "late_validation_loss": float(np.mean([epoch["validation_loss"] for epoch in late])),
                "seconds": summary["speed"]["total_s"],
            }
        )
        training_report.write_json(path, content)
    shutil.rmtree(scratch)
    training_report.write_report(settings.output, report_path(settings))
    best = next(iter(training_report.search_scores(content)))
    loud(digits)
    print(f"best by validation: {best}; wrote {shown(path)}, {shown(report_path(settings))}")


def circumstances(digits: mnist_data.Digits, settings: Settings) -> dict[str, Any]:
    """What a study or search stores about where and on what it ran, and its empty list of runs."""
    return {
        "device": training.device_name(training.pick_device(settings.device)),
        "data_source": digits.source,
        "data_is_subset": digits.is_subset,
        "data_provenance": digits.provenance,
        "jobs": settings.jobs,
        "versions": versions(),
        "runs": [],
    }


def trainings(
    recipes: dict[str, training.Recipe], runs: list[dict[str, Any]], scratch: Path, settings: Settings
) -> Iterator[tuple[tuple[str, int], dict[str, Any]]]:
    """Train every recipe with every seed but for `runs`; yields ((recipe, seed), summary) as they finish.

    Each is this command again, in a process with a folder of its own under `scratch`; `jobs` run at a time.
    """
    done = {(run["recipe"], run["seed"]) for run in runs}
    # The long trainings first, so that none is left running alone at the end.
    names = sorted(recipes, key=lambda name: -recipes[name].epochs)
    waiting = [(n, s) for s in range(settings.seeds) for n in names if (n, s) not in done]
    running: dict[tuple[str, int], subprocess.Popen] = {}
    print(f"{len(waiting)} trainings, {settings.jobs} at a time")
    try:
        with tqdm(total=len(waiting), unit="training", disable=None) as bar:
            while waiting or running:
                while waiting and len(running) < settings.jobs:
                    key = waiting.pop(0)
                    running[key] = start_training(*key, scratch / f"{key[0]}-{key[1]}", settings)
                for key in [key for key, process in running.items() if process.poll() is not None]:
                    folder = scratch / f"{key[0]}-{key[1]}"
                    if running.pop(key).returncode != 0:
                        tail = (folder / "log").read_text(encoding="utf-8").strip().splitlines()[-1:]
                        raise Fault(
                            f"the training of recipe {key[0]}, seed {key[1]}, failed: {''.join(tail)}"
                        )
                    yield key, present(training_report.read_json(folder / "best_model.json"))
                    bar.update()
                time.sleep(0.1)
    finally:
        for process in running.values():
            process.terminate()
            process.wait()


def start_training(recipe: str, seed: int, folder: Path, settings: Settings) -> subprocess.Popen:
    """Start this command again, for one training, with its output in `folder`/log."""
    folder.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {
        "recipe": recipe,
        "seed": seed,
        "epochs": settings.epochs,
        "batch-size": settings.batch_size,
        "device": settings.device,
        "data-dir": settings.data_dir.resolve(),
        "output": folder.resolve(),
    }
    command = [sys.executable, str(Path(__file__).resolve()), "--no-download"]
    command += [
        word for key, value in options.items() if value is not None for word in (f"--{key}", str(value))
    ]
    command += ["--channels-last" if settings.channels_last else "--no-channels-last"]
    command += ["--autocast"] if settings.autocast else []
    command += [] if settings.test else ["--no-test"]
    environment = dict(os.environ)
    if settings.jobs > 1:
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // settings.jobs))
    with open(folder / "log", "w", encoding="utf-8") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def row(key: tuple[str, int], summary: dict[str, Any]) -> dict[str, Any]:
    """What a study keeps of one training."""
    keys = ("test_accuracy", "validation_accuracy", "validation_loss", "best_epoch")
    return {
        "recipe": key[0],
        "seed": key[1],
        **{name: summary[name] for name in keys},
        "seconds": summary["speed"]["total_s"],
    }


def stored_runs(
    earlier: dict[str, Any] | None, content: dict[str, Any], scratch: Path
) -> list[dict[str, Any]]:
    """The runs of an unfinished study with the same settings, as far as their checkpoints are still there."""
    if earlier is None or not scratch.is_dir():
        raise Fault("there is no unfinished study to continue; start one without --resume.")
    for key in ("recipes", "data_provenance", "device"):
        if earlier[key] != content[key]:
            raise Fault(f"the unfinished study has other {key.replace('_', ' ')}; start without --resume.")
    return [
        run
        for run in earlier["runs"]
        if (scratch / f"{run['recipe']}-{run['seed']}" / "best_model.json").is_file()
    ]


def keep_best(content: dict[str, Any], scratch: Path, settings: Settings) -> None:
    """Make the best run by validation, of the recipe `best`, the checkpoint in the output folder."""
    runs = [run for run in content["runs"] if run["recipe"] == "best"]
    best = max(runs, key=lambda run: (run["validation_accuracy"], -run["validation_loss"]))
    folder = scratch / f"best-{best['seed']}"
    for name in ("best_model.pth", "best_model.json"):
        write_atomic(settings.output / name, (folder / name).read_bytes())
    redraw(settings)


def speed(settings: Settings) -> None:
    """Images per second in both layouts, then time to 99 % in the layout asked for, for every recipe.

    An entry replaces the older one of its device, recipe and layout in training_speed.json; others stay.
    """
    device = training.pick_device(settings.device)
    digits = load(settings)
    path = settings.output / "training_speed.json"
    stored_before = training_report.read_json(path)
    entries = stored_before["entries"] if stored_before else []
    for recipe in training.RECIPES.values():
        recipe = adjusted(recipe, settings)
        for channels_last in (False, True):
            options = training.Options(settings.seed, device.type, channels_last, settings.autocast)
            limit = settings.speed_limit if channels_last == settings.channels_last else 0.0
            found = training.measure_speed(recipe, digits, options, limit)
            case = {"recipe": recipe.name, "channels_last": channels_last, "autocast": options.autocast}
            case["device"] = found["device"]
            entries = [entry for entry in entries if any(entry[key] != case[key] for key in case)]
            entries.append({**case, **found, "versions": versions(), "data_source": digits.source})
            entries.sort(key=lambda entry: [str(entry[key]) for key in ("device", "recipe", "channels_last")])
            training_report.write_json(path, {"entries": entries})
            layout = "channels_last" if channels_last else "contiguous"
            print(f"{recipe.name}, {layout}: {found['images_per_s']:,.0f} images/s")
    loud(digits)
    training_report.write_report(settings.output, report_path(settings))
    print(f"wrote {shown(path)}, {shown(report_path(settings))}")


def half(settings: Settings) -> None:
    """Accuracy and logits of the checkpoint in half precision, added to best_model.json.

    Entries of this device replace older ones; those of other devices stay, if of the same checkpoint.
    """
    import half_precision

    path, checkpoint = settings.output / "best_model.json", settings.output / "best_model.pth"
    summary = training_report.read_json(path)
    if summary is None or not checkpoint.is_file():
        raise Fault(f"{shown(path)} or {shown(checkpoint)} does not exist; train first.")
    if summary["checkpoint_sha256"] != hashlib.sha256(checkpoint.read_bytes()).hexdigest():
        raise Fault(f"{shown(path)} is of another checkpoint than {shown(checkpoint)}; train again.")
    found = half_precision.evaluate(checkpoint, load(settings), training.pick_device(settings.device))
    devices = {entry["device"] for entry in found["entries"]}
    earlier = summary.get("half_precision", {"entries": []})["entries"]
    kept = [entry for entry in earlier if entry["device"] not in devices]
    summary["half_precision"] = {"entries": kept + found["entries"]}
    training_report.write_json(
        path, {key: value for key, value in summary.items() if key != "schema_version"}
    )
    training_report.write_report(settings.output, report_path(settings))
    print(f"wrote {shown(path)}, {shown(report_path(settings))}")


def load(settings: Settings) -> mnist_data.Digits:
    """The digits, announced when they are not the full MNIST."""
    digits = mnist_data.load_digits(settings.data_dir, settings.download)
    loud(digits)
    return digits


def loud(digits: mnist_data.Digits) -> None:
    """Say on the screen, before and after the work, that the digits are not the full MNIST."""
    if digits.is_subset:
        print(f"*** {digits.source} ***", file=sys.stderr)


def adjusted(recipe: training.Recipe, settings: Settings) -> training.Recipe:
    """`recipe` with the epochs and batch size of the command line, where given."""
    changes = {
        name: getattr(settings, name)
        for name in ("epochs", "batch_size")
        if getattr(settings, name) is not None
    }
    return replace(recipe, **changes)


def report_path(settings: Settings) -> Path:
    """conclusions/training.md for the default output folder, else beside the results."""
    default = settings.output.resolve() == OUTPUT.resolve()
    return (CONCLUSIONS if default else settings.output) / "training.md"


def stored(settings: Settings) -> dict[str, Any]:
    """The settings without machine paths."""
    return {
        key: shown(value) if isinstance(value, Path) else value for key, value in asdict(settings).items()
    }


def versions() -> dict[str, str | None]:
    """What the numbers may depend on besides the settings."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
    }


if __name__ == "__main__":
    run_command(main)
