"""Pictures and conclusions/training.md, from the JSON files that training writes; imports no framework.

output/best_model.json       the run behind output/best_model.pth; `train_mnist.py --half` adds to it
output/training_seeds.json   `train_mnist.py --study`: several seeds of each recipe
output/training_search.json  `train_mnist.py --search`: candidates for the best recipe, by validation
output/training_speed.json   `train_mnist.py --speed`: one entry per device, recipe and layout
output/export.json           `export.py`: cold starts from either file format
"""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from harness.cli import Fault
from harness.paths import replace_atomic, shown, write_atomic

SCHEMA_VERSION = 1
GOAL = 0.996  # mean test accuracy over seeds that the best recipe is meant to reach
SIDE = 28


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON file of this program; None where there is none. Raises Fault for a damaged or foreign one."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content["schema_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise Fault(
            f"{shown(path)} is damaged or was not written by training; delete it and train again."
        ) from error
    if version != SCHEMA_VERSION:
        raise Fault(f"{shown(path)} has schema version {version}, this program reads {SCHEMA_VERSION}.")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` with the schema's version, atomically."""
    text = json.dumps(
        {"schema_version": SCHEMA_VERSION, **content}, indent=1, allow_nan=False, ensure_ascii=False
    )
    write_atomic(path, text + "\n")


def draw_all(summary: dict[str, Any], folder: Path) -> list[Path]:
    """Draw the pictures of a run into `folder`, those of its test only if it has one; returns their paths."""
    pictures = {"training_curves.png": draw_curves}
    if "confusion" in summary:
        pictures |= {"confusion_matrix.png": draw_confusion, "mistakes.png": draw_mistakes}
    drawn = []
    for name, draw in pictures.items():
        figure = draw(summary)
        with replace_atomic(folder / name) as temporary:
            # Without a fixed Software entry the bytes would change with matplotlib's version alone.
            figure.savefig(temporary, dpi=110, metadata={"Software": None})
        plt.close(figure)
        drawn.append(folder / name)
    return drawn


def draw_curves(summary: dict[str, Any]) -> plt.Figure:
    """Loss, accuracy and learning rate over the epochs, with the chosen epoch marked."""
    history = summary["history"]
    epochs = [epoch["epoch"] for epoch in history]
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for key, style in (("train", "--"), ("validation", "-")):
        axes[0].plot(epochs, [epoch[f"{key}_loss"] for epoch in history], style, label=key)
        errors = [100 * (1 - epoch[f"{key}_accuracy"]) for epoch in history]
        axes[1].plot(epochs, errors, style, label=key)
    axes[2].plot(epochs, [epoch["learning_rate"] for epoch in history], color="black")
    axes[0].set(title="Cross entropy", yscale="log")
    axes[1].set(title="Error, %", yscale="log")
    axes[2].set(title="Learning rate at the epoch's end")
    for axis in axes:
        axis.set_xlabel("epoch")
        axis.axvline(summary["best_epoch"], color="grey", linewidth=0.8, linestyle=":")
        axis.grid(alpha=0.3)
    axes[0].legend()
    axes[1].legend()
    notes = ["training error is on augmented images"] if augments(summary["recipe"]) else []
    if summary["recipe"]["average_decay"]:
        notes.append("validation is of the averaged weights, which lag behind at first")
    note = "".join(f"; {note}" for note in notes)
    figure.suptitle(f"{summary['data_source']}, recipe {summary['recipe']['name']}{note}", fontsize=9)
    return figure


def draw_confusion(summary: dict[str, Any]) -> plt.Figure:
    """The test set's confusion matrix: rows are labels, columns answers; only mistakes are coloured."""
    confusion = np.array(summary["confusion"])
    figure, axis = plt.subplots(figsize=(5.6, 5.4), layout="constrained")
    mistakes = np.where(np.eye(len(confusion), dtype=bool), 0, confusion)
    axis.imshow(mistakes, cmap="Reds", vmin=0, vmax=max(1, mistakes.max()))
    for row, column in np.ndindex(confusion.shape):
        if confusion[row, column]:
            axis.text(column, row, str(confusion[row, column]), ha="center", va="center", fontsize=8)
    axis.set(
        xlabel="answer",
        ylabel="label",
        xticks=range(len(confusion)),
        yticks=range(len(confusion)),
        title=f"{mistakes.sum()} mistakes in {confusion.sum()} test images",
    )
    figure.suptitle(summary["data_source"], fontsize=8)
    return figure


def draw_mistakes(summary: dict[str, Any]) -> plt.Figure:
    """The most confident mistakes on the test set, with label, answer and confidence."""
    mistakes = summary["mistakes"]
    figure, axes = plt.subplots(2, 8, figsize=(12, 3.9), layout="constrained")
    for axis in axes.flat:
        axis.axis("off")
    for axis, mistake in zip(axes.flat, mistakes, strict=False):
        pixels = np.frombuffer(bytes.fromhex(mistake["pixels"]), np.uint8).reshape(SIDE, SIDE)
        axis.imshow(pixels, cmap="gray_r")
        axis.set_title(
            f"#{mistake['index']}\n{mistake['label']} taken for {mistake['answer']}\n"
            f"{mistake['confidence']:.1%}",
            fontsize=8,
        )
    figure.suptitle(f"Most confident mistakes; {summary['data_source']}", fontsize=9)
    return figure


def augments(recipe: dict[str, Any]) -> bool:
    """Whether a stored recipe moves its training images."""
    return any(recipe[key] for key in ("rotation_deg", "scale", "shear", "shift_px"))


def write_report(output: Path, path: Path) -> Path:
    """Write training.md to `path` from the JSON files in `output`. Raises Fault where there is none."""
    summary = read_json(output / "best_model.json")
    study = read_json(output / "training_seeds.json")
    exported = read_json(output / "export.json")
    search = read_json(output / "training_search.json")
    speeds = read_json(output / "training_speed.json")
    if not (summary or study or search or speeds):
        raise Fault(f"{shown(output)} holds no training results; run `python scr/train_mnist.py` first.")
    parts = ["# Training"]
    try:
        if summary:
            parts += _checkpoint_part(summary)
        if study:
            parts += _study_part(study)
        if search:
            parts += _search_part(search)
        if speeds:
            parts += _speed_part(speeds)
        if summary and summary.get("half_precision"):
            parts += _half_part(summary["half_precision"])
        if exported:
            parts += _export_part(exported)
    except (KeyError, TypeError) as error:
        raise Fault(f"a result in {shown(output)} is partial or foreign ({error}); make it again.") from error
    parts.append(
        "Every number, table and picture here is made from `output/*.json` by "
        "`python scr/train_mnist.py --redraw`."
    )
    write_atomic(path, "\n\n".join(parts) + "\n")
    return path


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2f} %"


def _checkpoint_part(summary: dict[str, Any]) -> list[str]:
    recipe = summary["recipe"]
    test = "The test set was not used."
    if "confusion" in summary:
        mistakes = summary["test_images"] - np.trace(summary["confusion"])
        test = (
            f"The test set, used once, gives **{_percent(summary['test_accuracy'])}**: {mistakes} mistakes "
            f"in {summary['test_images']:,}."
        )
    provenance = "; ".join(f"`{name}`: {what}" for name, what in summary["data_provenance"].items())
    warning = [f"**{summary['data_source']}.**"] if summary["data_is_subset"] else []
    return [
        "## The checkpoint",
        *warning,
        f"`output/best_model.pth`: recipe `{recipe['name']}`, seed {summary['options']['seed']}, trained on "
        f"{summary['speed']['device']} with {summary['train_images']:,} images; epoch "
        f"{summary['best_epoch']} of {recipe['epochs']} was chosen by {summary['validation_images']:,} "
        f"validation images ({_percent(summary['validation_accuracy'])}). {test}",
        f"Data: {summary['data_source']}. {provenance}.",
        f"Recipe: {_recipe_words(recipe)}.",
    ]


def _recipe_words(recipe: dict[str, Any]) -> str:
    words = [
        f"{recipe['epochs']} epochs of batches of {recipe['batch_size']}",
        f"{recipe['optimizer']}, peak rate {recipe['learning_rate']:g}, "
        f"weight decay {recipe['weight_decay']:g}",
        (f"warm-up over {recipe['warmup']:.0%} of the steps, then " if recipe["warmup"] else "")
        + "cosine to 0",
    ]
    if recipe["label_smoothing"]:
        words.append(f"label smoothing {recipe['label_smoothing']:g}")
    if augments(recipe):
        words.append(
            f"images moved by one affine sample: ±{recipe['rotation_deg']:g}°, scale ±{recipe['scale']:.0%}, "
            f"shear ±{recipe['shear']:g}, shift ±{recipe['shift_px']:g} px"
        )
    if recipe["average_decay"]:
        words.append(f"weights averaged with decay {recipe['average_decay']:g} per step")
    return "; ".join(words)


def seed_statistics(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean, sample standard deviation (None for one run), minimum and maximum test accuracy of runs."""
    values = np.array([run["test_accuracy"] for run in runs])
    return {
        "runs": len(values),
        "mean": float(values.mean()),
        "sd": float(values.std(ddof=1)) if len(values) > 1 else None,
        "min": float(values.min()),
        "max": float(values.max()),
        "validation_mean": float(np.mean([run["validation_accuracy"] for run in runs])),
    }


def _study_part(study: dict[str, Any]) -> list[str]:
    rows, sentences = [], []
    for name, recipe in study["recipes"].items():
        runs = [run for run in study["runs"] if run["recipe"] == name]
        if not runs:
            continue
        found = seed_statistics(runs)
        spread = "–" if found["sd"] is None else f"{100 * found['sd']:.3f}"
        rows.append(
            [
                f"`{name}`",
                str(found["runs"]),
                f"**{100 * found['mean']:.3f}**",
                spread,
                f"{100 * found['min']:.2f}",
                f"{100 * found['max']:.2f}",
                f"{100 * found['validation_mean']:.3f}",
            ]
        )
        if name == "best":
            verdict = "reached" if found["mean"] >= GOAL else "missed"
            sentences.append(
                f"The goal of a mean of {100 * GOAL:g} % for `best` is **{verdict}**: "
                f"{100 * found['mean']:.3f} % over {found['runs']} seeds."
            )
        sentences.append(f"`{name}`: {_recipe_words(recipe)}.")
    each = [
        [
            f"`{run['recipe']}`",
            str(run["seed"]),
            _percent(run["test_accuracy"]),
            _percent(run["validation_accuracy"]),
            str(run["best_epoch"]),
            f"{run['seconds']:.0f}",
        ]
        for run in study["runs"]
    ]
    warning = [f"**{study['data_source']}.**"] if study["data_is_subset"] else []
    return [
        "## Seeds",
        *warning,
        f"On {study['device']}, PyTorch {study['versions']['torch']}; the epoch of each run is chosen by "
        "validation, the test set used once per run. Test accuracy in %, sd over seeds:",
        _table(["recipe", "seeds", "mean", "sd", "min", "max", "validation mean"], rows),
        *sentences,
        _table(["recipe", "seed", "test", "validation", "epoch", "seconds"], each),
        f"Seconds are with {study['jobs']} at a time on the device.",
    ]


def search_scores(search: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Candidate to its number of seeds, mean validation accuracy and loss, best candidate first.

    The accuracy is the mean of each run's last five epochs: less noisy than the best of all epochs.
    """
    scores = {}
    for name in search["candidates"]:
        runs = [run for run in search["runs"] if run["recipe"] == name]
        if runs:
            accuracies = [run["late_validation_accuracy"] for run in runs]
            losses = [run["late_validation_loss"] for run in runs]
            scores[name] = {
                "runs": len(runs),
                "accuracy": float(np.mean(accuracies)),
                "loss": float(np.mean(losses)),
            }
    return dict(sorted(scores.items(), key=lambda item: -item[1]["accuracy"]))


def _search_part(search: dict[str, Any]) -> list[str]:
    rows = [
        [
            f"`{name}`",
            str(score["runs"]),
            f"{100 * score['accuracy']:.3f}",
            f"{score['loss']:.4f}",
            _recipe_words(search["candidates"][name]),
        ]
        for name, score in search_scores(search).items()
    ]
    missing = [f"`{name}`" for name in search["candidates"] if name not in search_scores(search)]
    return [
        "## Candidates for the recipe",
        "Compared by the validation split alone, without the test set: accuracy in % and cross entropy, "
        f"means of the last five epochs over the seeds. On {search['device']}. With "
        f"{search['validation_images']:,} images one image is worth "
        f"{100 / search['validation_images']:.2f} %, so small differences between candidates mean nothing.",
        _table(["candidate", "seeds", "validation", "loss", "recipe"], rows),
        *([f"Stopped before these were done: {', '.join(missing)}."] if missing else []),
    ]


def _speed_part(speeds: dict[str, Any]) -> list[str]:
    rows = []
    for entry in speeds["entries"]:
        reached = entry["time_to_99_s"]
        rows.append(
            [
                entry["device"],
                f"`{entry['recipe']}`",
                "channels_last" if entry["channels_last"] else "contiguous",
                "bfloat16 autocast" if entry["autocast"] else "float32",
                f"{entry['images_per_s']:,.0f}",
                "–" if reached is None else f"{reached:.1f} s ({entry['epochs_to_99']} epochs)",
                f"{100 * entry['preparation_share']:.1f} %",
            ]
        )
    head = [
        "device",
        "recipe",
        "layout",
        "arithmetic",
        "images/s",
        "time to 99 % validation",
        "input preparation",
    ]
    return [
        "## Speed",
        _table(head, rows),
        "Images per second of training alone. Time to 99 % counts training and validation from the first "
        "step (libraries' warm-up included) to the end of the first epoch with ≥ 99 % validation accuracy; "
        "a dash: not tried or not reached in the time given. Input preparation: gathering, augmenting and "
        "normalising a batch, timed apart, as a share of a training step. A recipe that averages weights "
        "validates the average, which lags behind: its time to 99 % is later than that of the live weights.",
    ]


def _export_part(exported: dict[str, Any]) -> list[str]:
    rows = []
    for suffix, starts in exported["cold_start_ms"].items():
        steps = [np.median([start[step] for start in starts]) for step in ("import", "load", "first_forward")]
        torch = "yes" if any(start["imports_torch"] for start in starts) else "no"
        rows.append([f"`.{suffix}`", str(len(starts)), torch, *(f"{ms:.0f}" for ms in (*steps, sum(steps)))])
    head = ["file", "starts", "imports PyTorch", "import, ms", "load, ms", "first forward, ms", "sum, ms"]
    return [
        "## Cold start of the MLX network",
        f"In new processes on the {exported['device']}, MLX {exported['mlx']}, level `folded`, batch 1; "
        "medians. The start of Python itself is not counted. Loading a `.pth` includes importing PyTorch.",
        _table(head, rows),
    ]


def _half_part(half: dict[str, Any]) -> list[str]:
    rows = [
        [
            entry["framework"],
            entry["device"],
            entry["dtype"],
            _percent(entry["accuracy"]),
            f"{entry['images']:,}",
            f"{entry['largest_logit_difference']:.2g}",
            str(entry["changed_answers"]),
        ]
        for entry in half["entries"]
    ]
    head = [
        "framework",
        "device",
        "dtype",
        "test accuracy",
        "images",
        "largest logit difference",
        "changed answers",
    ]
    return [
        "## Half precision",
        "BatchNorm folded in float32, weights and activations stored in the type named, products accumulated "
        "in float32. Differences are against PyTorch in float32 on the CPU with BatchNorm as written:",
        _table(head, rows),
    ]
