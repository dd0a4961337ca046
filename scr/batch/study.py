"""From the study's cases to a record: what is measured by whom, and what is stored beside it."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from batch.cases import MLP_DEPTH, Work, all_works
from harness import machine
from harness.cli import Fault
from harness.measure import Candidate, Case, MeasureSettings, Probe, run_study
from harness.paths import shown
from harness.record import Record, load
from harness.worker import Worker

STUDY = "batching"
FAMILIES = ("mlp", "resnet", "layers", "decoder", "experts", "device")


@dataclass(frozen=True)
class Settings(MeasureSettings):
    """What to time and where to write it."""

    trials: int = field(default=40, metadata={"help": "timed forwards per cell"})
    warmup: int = field(default=5, metadata={"help": "warm-up forwards per cell, more until it is steady"})
    budget: float = field(default=0.4, metadata={"help": "seconds per cell; slow cells get fewer trials"})
    rounds: int = field(default=8, metadata={"help": "rounds per batch size, over which trials are spread"})
    device: str = field(
        default="auto", metadata={"help": "where the cases run", "choices": ("auto", "cpu", "mps", "cuda")}
    )
    families: tuple[str, ...] = field(default=FAMILIES, metadata={"help": "sections of the study"})
    tag: str | None = field(
        default=None, metadata={"help": "write a reference run to output/TAG and conclusions/TAG"}
    )
    quick: bool = field(default=False, metadata={"help": "small sizes and few trials: half a minute"})
    rebuild: bool = field(default=False, metadata={"help": "measure nothing: report from the stored record"})


def measure(settings: Settings, network_record: Path) -> Record:
    """Run the study. Raises Fault where the device is missing, Interrupted after Ctrl-C."""
    begin = time.perf_counter()
    threads = settings.threads or machine.default_threads()
    place = find_device(settings.device)
    works = all_works(place["device"], place["memory_bytes"], settings.quick)
    widths = sorted({work.sizes["width"] for work in works if work.family == "mlp" and work.batches})
    works = [work for work in works if work.family in (*settings.families, "floor")]
    cases = [case_of(work, place["device"], threads) for work in works if work.batches]
    if place["device"] != "cpu" and "device" in settings.families:
        cases += [both_devices(width, place["device"], threads) for width in widths]
    environment = machine.describe(threads=threads)
    del environment["kernel_hashes"]  # none of our kernels runs in this study
    environment |= {
        "place": place,
        "works": {work.name + " " + work.dtype: work.describe() for work in works},
        "network": network_medians(network_record),
    }
    record = run_study(cases, settings, environment, probes(place["device"], threads), begin=begin)
    # Inputs are made in the worker and stay there, so this study has no transfers.
    record.rows = record.rows[record.rows["kind"] != "transfer"].reset_index(drop=True)
    return record


def probes(device: str, threads: int) -> list[Probe]:
    """The machine's limits on the device, as every study measures them; on CUDA also copies in a graph."""
    found = [Probe("torch", "harness.ceilings:torch_ceilings", {"device": device, "threads": threads})]
    if device == "cuda":
        found.append(Probe("torch", "batch.networks:graph_copies"))
    return found


def find_device(device: str) -> dict[str, Any]:
    """The device's name, memory and caches, asked of PyTorch in a process of its own."""
    worker = Worker("torch", {})
    try:
        worker.ask("import_module", module="torch")
        return worker.ask("call", function="batch.networks:device_facts", arguments={"device": device})
    finally:
        worker.close()


def case_of(work: Work, device: str, threads: int) -> Case:
    """A work as the harness takes it: eager, and replayed as a CUDA graph where there is CUDA."""
    variants = ("torch", "graph") if device == "cuda" else ("torch",)
    return Case(
        study=STUDY,
        name=work.name,
        batch_sizes=work.batches,
        inputs=int,
        dtype=work.dtype,
        tolerance=work.tolerance,
        candidates=tuple(candidate(work, device, threads, variant) for variant in variants),
        reference=reference(work, threads),
    )


def both_devices(width: int, device: str, threads: int) -> Case:
    """An MLP at batch 1 on the device and on the CPU beside it, in the same rounds."""
    work = Work("", "device", "mlp", {"width": width, "depth": MLP_DEPTH}, (1,))
    variants = ("torch", "graph") if device == "cuda" else ("torch",)
    return Case(
        study=STUDY,
        name=device_case(width),
        batch_sizes=(1,),
        inputs=int,
        candidates=(
            *(candidate(work, device, threads, variant) for variant in variants),
            candidate(work, "cpu", threads, "torch", name="torch-cpu"),
        ),
        reference=reference(work, threads),
    )


def device_case(width: int) -> str:
    """The name of the comparison of devices at a width."""
    return f"CPU or GPU, MLP {MLP_DEPTH}×{width}"


def candidate(work: Work, device: str, threads: int, variant: str, name: str = "") -> Candidate:
    """The backend `variant` of a work."""
    arguments: dict[str, Any] = {"kind": work.kind, "sizes": work.sizes, "dtype": work.dtype}
    arguments |= {"device": device, "threads": threads, "variant": variant}
    name = name or ("torch" if variant == "torch" else f"torch-{variant}")
    # The MLPs, on which the answer rests, are not lost with a crash in another case.
    worker = "torch" if work.kind == "mlp" else "torch, others"
    return Candidate(name, worker, "batch.networks:TorchCase", arguments, module="torch")


def reference(work: Work, threads: int) -> Candidate:
    """The float64 answer to a work."""
    arguments: dict[str, Any] = {"kind": work.kind, "sizes": work.sizes, "threads": threads}
    return Candidate("reference", "reference", "batch.networks:Reference", arguments, module="torch")


def network_medians(path: Path) -> dict[str, Any]:
    """P50 of our MNIST network by backend and batch size, out of its own record; a reason where there is
    none.
    """
    try:
        rows = load(path).rows
    except Fault as fault:
        return {"source": shown(path), "reason": str(fault), "cells": []}
    rows = rows[(rows["study"] == "mnist") & (rows["kind"] == "latency")]
    keys = ["case", "backend", "dtype", "batch_size"]
    medians: pd.DataFrame = rows.groupby(keys)["latency_ms"].agg(["median", "size"]).reset_index()
    cells = medians.rename(columns={"median": "p50_ms", "size": "trials"}).to_dict("records")
    return {"source": shown(path), "cells": cells}


def add_network(record: Record, path: Path) -> bool:
    """Take our network's medians into a record that was made before the benchmark ran; whether it was so."""
    if record.environment.get("network", {}).get("cells"):
        return False
    record.environment["network"] = network_medians(path)
    return bool(record.environment["network"]["cells"])
