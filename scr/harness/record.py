"""The record of a run: one row per timed thing, in plain arrays, and what is needed to read them.

    import numpy as np, pandas as pd
    rows = pd.DataFrame({k: v for k, v in np.load("output/per_trial.npz").items() if v.ndim == 1})

Nothing in the file is pickled, and no absolute path is stored. Every table, plot and sentence of a report
is computed from it.
"""

import json
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from harness.cli import Fault
from harness.paths import replace_atomic, shown

SCHEMA_VERSION = 1

COLUMNS = {
    "study": str,  # mnist, shapes, mlp_fusion, batching
    "case": str,  # what is run: network, mobilenet 14×14×512 s1, …
    "backend": str,
    "target": str,  # cpu, mps, cuda for frameworks; host, metal, cuda for our kernels
    "batch_size": np.int64,
    "dtype": str,  # float32, float16, bfloat16: storage
    "kind": str,  # one of KINDS
    "round": np.int64,  # one round times every backend once, in random order
    "trial": np.int64,  # within the cell (case, backend, batch size, dtype, kind)
    "sequence": np.int64,  # global order of measurement
    "start_s": np.float64,  # seconds since the run began
    "latency_ms": np.float64,  # milliseconds per forward
}

KINDS = {
    "latency": "wall time of one forward, Python, launch and device, ended by a synchronise",
    "device": "time the device needs per forward, without Python and launches where it overlaps them",
    "throughput": "wall time per forward in steady flow: several in flight, one synchronise at the end",
    "python": "time until the call returns, before anything is waited for or evaluated",
    "transfer": "copying and laying out one input batch; in no other figure",
    "cold": "first-time costs: trial 0 import, 1 first call, 2 second call",
    "ceiling": "a machine limit; its unit is in the environment's ceilings",
}

DOCUMENTS = ("environment", "settings", "checks", "cells")


@dataclass
class Record:
    """A run: `rows` has the columns of COLUMNS; the rest is JSON-able."""

    rows: pd.DataFrame
    environment: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)
    cells: list[dict[str, Any]] = field(default_factory=list)


def empty_rows() -> pd.DataFrame:
    """A table with the right columns and no rows."""
    return rows_from([])


def rows_from(dicts: list[dict[str, Any]]) -> pd.DataFrame:
    """A table of COLUMNS from one dict per row; a missing key is an error (KeyError)."""
    return pd.DataFrame(
        {
            name: np.array([row[name] for row in dicts], dtype=_array_type(kind))
            for name, kind in COLUMNS.items()
        }
    )


GPU_TRACE = "GPU trace"  # a cell's `device_clock` where its device times are the GPU's own
FALSE_CLOCK = "it came out longer than the forward that it is part of"


def without_false_device_times(record: Record, margin: float = 1.25) -> Record:
    """`record` without the device times of cells where their median exceeds that of the forward by `margin`.

    A device cannot take longer than the forward that waits for it, so there the clock is wrong (it is a slope
    between chains where a framework has no timer). The cell says so in `left_out`.
    """
    cell_of = ["study", "case", "dtype", "backend", "batch_size"]
    medians = record.rows.pivot_table("latency_ms", cell_of, "kind", "median")
    if not {"device", "latency"} <= set(medians.columns):
        return record
    false = set(medians.index[medians["device"] > margin * medians["latency"]])
    keys = record.rows[cell_of].apply(tuple, axis=1)
    rows = record.rows[~(keys.isin(false) & (record.rows["kind"] == "device"))].reset_index(drop=True)
    cells = [
        cell | {"left_out": (cell.get("left_out") or {}) | {"device": FALSE_CLOCK}}
        if tuple(cell[name] for name in cell_of) in false
        else cell
        for cell in record.cells
    ]
    return replace(record, rows=rows, cells=cells)


def save(record: Record, path: Path | str) -> None:
    """Write `record` to `path` (.npz), replacing an older file only by a complete one."""
    arrays: dict[str, Any] = {
        name: record.rows[name].to_numpy().astype(_array_type(kind)) for name, kind in COLUMNS.items()
    }
    texts: dict[str, Any] = {
        name: np.array(json.dumps(getattr(record, name), allow_nan=False)) for name in DOCUMENTS
    }
    with replace_atomic(path) as temporary:
        np.savez_compressed(temporary, schema_version=np.array(str(SCHEMA_VERSION)), **arrays, **texts)


def load(path: Path | str) -> Record:
    """Read a record. Raises Fault with one sentence for a missing, damaged, partial or foreign file."""
    path = Path(path)
    name = shown(path)
    if not path.is_file():
        raise Fault(f"{name} does not exist; a benchmark run writes it.")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        if "pickle" in str(error).lower():
            raise Fault(f"{name} holds pickled objects or is no .npz file; they are never loaded.") from error
        raise Fault(f"{name} is damaged or no .npz file ({error}); run the benchmark again.") from error
    version = str(arrays.get("schema_version", "none"))
    if version != str(SCHEMA_VERSION):
        raise Fault(f"{name} has schema version {version}, this program reads {SCHEMA_VERSION}.")
    missing = [key for key in (*COLUMNS, *DOCUMENTS) if key not in arrays]
    if missing:
        raise Fault(f"{name} lacks {', '.join(missing)}; it was not written by this program or is partial.")
    lengths = {arrays[key].shape for key in COLUMNS}
    if len(lengths) != 1 or len(next(iter(lengths))) != 1:
        raise Fault(f"{name} has columns of unequal length; it is damaged.")
    kinds = {key: "U" if kind is str else np.dtype(kind).kind for key, kind in COLUMNS.items()}
    wrong = [key for key, kind in kinds.items() if arrays[key].dtype.kind != kind]
    if wrong:
        raise Fault(f"{name} has columns of the wrong type ({', '.join(wrong)}); it is damaged.")
    if not np.isfinite(arrays["latency_ms"]).all() or (arrays["latency_ms"] < 0).any():
        raise Fault(f"{name} has a latency that is negative or not a number; it is damaged.")
    documents = {}
    for key in DOCUMENTS:
        try:
            documents[key] = json.loads(str(arrays[key]))
        except json.JSONDecodeError as error:
            raise Fault(f"{name}: the entry {key} is not JSON ({error}); it is damaged.") from error
    rows = pd.DataFrame({key: arrays[key] for key in COLUMNS})
    return Record(rows=rows, **documents)


def _array_type(kind: type) -> type:
    """The NumPy type of a column: text columns are fixed-width Unicode, never objects."""
    return np.str_ if kind is str else kind
