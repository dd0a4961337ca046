"""Build a benchmark's report from its record alone: plots and a Markdown file with relative links.

    from harness.report import build

    build(record, OUTPUT / "plots", CONCLUSIONS / "benchmark_result.md")

Knows neither PyTorch nor MLX: a record from any machine can be read on any other. The same record gives the
same Markdown everywhere, and within one environment the same PNGs, byte for byte. Further records of the same
machine are taken into account where they are stored; see `Companions`.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import pandas as pd

from harness import plots, published, sections
from harness.analysis import Group, check_record, groups, machine_name
from harness.backends import DIRECT_CASES
from harness.compare import pause_verdict
from harness.figures import FIGURES
from harness.paths import write_atomic
from harness.record import Record, load
from harness.tables import DASH
from harness.verdicts import five_sentences


@dataclass(frozen=True)
class Companions:
    """Further runs that a report quotes, beside the run it is about.

    A run in output/ is accompanied by output/aa, output/paused and output/second, that of output/TAG by
    output/TAG-aa and so on, else by output/aa and so on: what `benchmark.py --tag` writes. aa.npz beside
    per_trial.npz will also do.
    Runs of another machine, such as those that came with the repository, do not count.
    """

    aa: Record | None = None  # the same backends under two names (--again)
    paused: Record | None = None  # with pauses between bursts (--pause)
    second: Record | None = None  # the same once more

    @classmethod
    def find(cls, output: Path, record: Record) -> "Companions":
        """The companions of `record`, the run in the folder `output`."""
        found = {}
        for field in fields(cls):
            places = [
                output / f"{field.name}.npz",
                output / field.name / "per_trial.npz",
                output.with_name(f"{output.name}-{field.name}") / "per_trial.npz",
                output.with_name(field.name) / "per_trial.npz",
            ]
            own = output / "per_trial.npz"  # no run is its own second one
            runs = (load(path) for path in places if path.is_file() and path != own)
            same = (run for run in runs if machine_name(run) == machine_name(record))
            found[field.name] = next(same, None)
        return cls(**found)


NOBODY = Companions()


def build(record: Record, plots_dir: Path, markdown_path: Path) -> None:
    """Write the plots into `plots_dir`, which is emptied of other PNGs, and the report to `markdown_path`.

    Raises Fault for a record that lacks what every report needs.
    """
    check_record(record)
    found = groups(record)
    images = draw_all(main_groups(found), plots_dir)
    links = {name: os.path.relpath(path, markdown_path.parent) for name, path in images.items()}
    source = os.path.relpath(plots_dir.parent / "per_trial.npz", markdown_path.parent)
    write_atomic(markdown_path, text(record, found, links, source, Companions.find(plots_dir.parent, record)))


def screen_table(record: Record) -> str:
    """The main results in few columns, for a terminal."""
    group = main_groups(groups(record))[0]
    columns = ["batch", "backend", "P50 ms", "P95 ms", f"× {sections.comparison_baselines(group)[0]}"]
    return pd.DataFrame(sections.result_rows(group))[columns].fillna(DASH).to_string(index=False)


def main_groups(found: list[Group]) -> list[Group]:
    """The network's groups, one per dtype; where there are none, the first group."""
    return [group for group in found if group.is_network] or found[:1]


def draw_all(main: list[Group], plots_dir: Path) -> dict[str, Path]:
    """Draw every figure of the main groups; figure name (with -DTYPE after the first group) -> file."""
    images: dict[str, Path] = {}
    for i, group in enumerate(main):
        for name, (draw, _) in FIGURES.items():
            with plots.style():
                figure = draw(group)
            if figure is None:
                continue
            key = name if i == 0 else f"{name}-{group.dtype}"
            images[key] = plots_dir / f"{key}.png"
            plots.save(figure, images[key])
    for path in plots_dir.glob("*.png"):
        if path not in images.values():
            path.unlink()
    return images


def text(
    record: Record,
    found: list[Group],
    links: dict[str, str],
    source: str,
    companions: Companions = NOBODY,
) -> str:
    """The report as Markdown. `links`: figure name -> path as seen from the report."""
    main = main_groups(found)
    first = main[0]
    others = [g for g in found if g not in main and g.case not in DIRECT_CASES]  # TF32 among them
    parts = [head(record, source)]

    def add(title: str, body: str, *figures: str) -> None:
        """A section, unless it would be empty."""
        images = [image(name, links) for name in figures if name in links]
        if body or images:
            parts.append("\n\n".join([f"## {title}", *([body] if body else []), *images]))

    add("The machine", sections.machine_table(record))
    add("Warnings", sections.warnings(record, found) or "None.")
    add("Not measured", sections.absent(record))
    for i, group in enumerate(main):
        suffix = "" if i == 0 else f"-{group.dtype}"
        title = "Results" + (f", {group.dtype}" if len(main) > 1 else "")
        body = [sections.results_note(group)] if i == 0 else []
        body += [sections.results(group)]
        body += [sections.honest_baseline(group)] if group.is_network else []
        add(title, "\n\n".join(body), *(f"{name}{suffix}" for name in ("p50_bars", "speedup", "scaling")))
    add("Other precisions against float32", sections.precision(found))
    add("Other cases", sections.other_cases(others))
    add("How far to trust this", sections.reliability(record, companions.aa, companions.second))
    if companions.paused is not None:
        add("Pauses against heat", pause_verdict(record, companions.paused))
    _add_ladder(add, first, found)
    prediction = sections.prediction(first)
    add("Prediction and measurement", prediction, "roofline")
    add("The machine's limits", sections.ceilings_table(record))
    add(
        "Clocks",
        _paragraphs(sections.clocks(first), sections.device_speedups(first), sections.metal_default(first)),
    )
    add("How MLX launches and waits", sections.launching(found))
    add("The lazy-evaluation trap", sections.lazy_trap(first))
    add("Cold start and memory", sections.cold_start(first))
    add("Correctness", sections.correctness(record))
    add("Distributions", "", "timeline", "cdf", "violins")
    if first.is_network:
        add("Apple's chips, predicted", sections.apple_prediction())
    closing = "\n".join(f"{i}. {sentence}" for i, sentence in enumerate(five_sentences(first), start=1))
    add(f"What pays on this machine ({machine_name(record)})", closing)
    return "\n\n".join(parts) + "\n"


def head(record: Record, source: str) -> str:
    """Title, and which machine the numbers are from."""
    chip, name = record.environment["chip"], machine_name(record)
    on = name if name == chip else f"{name}, in a machine with {chip}"
    state = "" if record.environment.get("complete", True) else " The run was interrupted."
    return (
        f"# Benchmark result: {name}\n\nEvery number below was measured on **{on}** in one run, and is "
        f"computed from [{Path(source).name}]({source}) by `python scr/report.py`, except where it is "
        f"marked as *published* (the article's, on an {published.MACHINE}) or as a *prediction*, or said to "
        f"come from the cost model, a datasheet, synthetic latencies or another run.{state}"
    )


def image(name: str, links: dict[str, str]) -> str:
    """A figure as Markdown, with what it shows as its alternative text."""
    base = next(known for known in FIGURES if name == known or name.startswith(f"{known}-"))
    return f"![{FIGURES[base][1]}]({links[name]})"


def _add_ladder(add: Callable[..., None], first: Group, found: list[Group]) -> None:
    """The ladder, launches, time by layer type, and the fused kernel's parts where that kernel ran."""
    steps = sections.ladder_steps(first)
    add("The ladder: what each step buys", steps, "ladder")
    if steps:
        add("Which rung wins at which batch", sections.winners(first))
        add("How much faster is possible", sections.headroom(first))
    add("Launches", sections.launches(first))
    add("What each rung moves", sections.architecture() if first.is_network else "")
    shares = sections.layer_shares(found)
    add("Time by layer type", shares or "Layers were not timed apart in this run.", "layers")
    parts = sections.ablation(found)
    if parts or "mlx-fused" in first.backends:
        add("Is BatchNorm free, is ReLU?", parts or "The kernel's parts were not timed apart in this run.")


def _paragraphs(*texts: str) -> str:
    """The texts that are not empty, apart."""
    return "\n\n".join(text for text in texts if text)
