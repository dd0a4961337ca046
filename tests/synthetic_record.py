"""Records that look like a run's, for tests of reports and plots: no framework, no clock."""

import numpy as np
import pandas as pd

from harness import costs
from harness.measure import spread
from harness.record import Record, rows_from

BATCH_SIZES = (1, 16, 128, 512)

# backend: (target, ms that a forward costs at least, ms per image)
BACKENDS = {
    "torch": ("cpu", 1.6, 0.95),
    "torch-compile": ("cpu", 0.6, 0.55),
    "onnxruntime": ("cpu", 0.12, 0.21),
    "mlx": ("cpu", 2.6, 14.0),
    "mlx-compile": ("cpu", 1.2, 13.6),
    "mlx-folded": ("cpu", 0.7, 13.0),
    "mlx-fused": ("cpu", 1.9, 9.0),
    "torch-graph": ("cuda", 0.1, 0.9),
    "mlx-block": ("host", 0.08, 0.155),
    "mlx-block-32kb": ("cuda", 0.08, 0.155),
    "mlx-network": ("host", 0.13, 0.11),
}

CPU_BACKENDS = tuple(name for name, (target, *_) in BACKENDS.items() if target != "cuda")

CEILINGS = [
    {"name": "launch_wait", "framework": "torch", "target": "cpu", "unit": "ms", "value": 0.002},
    {"name": "launch_chain", "framework": "torch", "target": "cpu", "unit": "ms", "value": 0.0015},
    {"name": "launch_wait", "framework": "mlx", "target": "cpu", "unit": "ms", "value": 0.03},
    {"name": "launch_chain", "framework": "mlx", "target": "cpu", "unit": "ms", "value": 0.004},
    {"name": "launch_wait", "framework": "host", "target": "host", "unit": "ms", "value": 0.02},
    {"name": "launch_chain", "framework": "host", "target": "host", "unit": "ms", "value": 0.006},
    *(
        {"name": "copy", "framework": "torch", "target": "cpu", "unit": "GB/s", "bytes": n, "value": v}
        for n, v in ((2**15, 90.0), (2**19, 60.0), (2**23, 28.0), (2**27, 14.0))
    ),
    {
        "name": "fma",
        "framework": "host",
        "target": "host",
        "unit": "GFLOP/s",
        "dtype": "float32",
        "source": "compiled loop, 256-bit vectors, 2 threads",
        "value": 180.0,
    },
    {"name": "fma", "framework": "host", "target": "host", "dtype": "float16", "reason": "no _Float16"},
]

# A GPU's, with the times of GPU_MS.
GPU_CEILINGS = [
    *(
        {"name": name, "framework": framework, "target": "cuda", "unit": "ms", "value": value}
        for framework in ("torch", "mlx")
        for name, value in (("launch_wait", 0.02), ("launch_chain", 0.004))
    ),
    *(
        {"name": "copy", "framework": "mlx", "target": "cuda", "unit": "GB/s", "bytes": n, "value": v}
        for n, v in ((2**16, 300.0), (2**24, 5000.0), (2**30, 4200.0))
    ),
    {"name": "fma", "framework": "torch", "target": "cuda", "unit": "GFLOP/s", "dtype": "float32"}
    | {"source": "matmul 8192", "value": 51000.0},
]

# backend: (wall ms beyond device time, device ms at least, device ms per image)
GPU_MS = {
    "torch": (0.25, 0.5, 0.0024),
    "torch-graph": (0.02, 0.08, 0.0024),
    "mlx": (0.5, 0.6, 0.0048),
    "mlx-folded": (0.2, 0.3, 0.003),
    "mlx-fused": (0.4, 0.5, 0.0025),
    "mlx-block": (0.06, 0.024, 0.0005),
    "mlx-block-32kb": (0.06, 0.027, 0.00058),
    "mlx-network": (0.05, 0.06, 0.00049),
}

ENVIRONMENT = {
    "chip": "Example CPU",
    "cores": 2,
    "performance_cores": None,
    "memory_gb": 8.0,
    "gpu": None,
    "os": "Linux 6.1",
    "architecture": "x86_64",
    "python": "3.12.1",
    "versions": {"torch": "2.14.1", "mlx": "0.32.4", "numpy": "2.4.6"},
    "power": {"source": None, "low_power_mode": None},
    "load_average": [0.1, 0.2, 0.3],
    "threads": 2,
    "datasheet": None,
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "dirty": False,
    "kernel_hashes": {"dw_bn_relu.metal": "0123456789ab"},
    "command": "python benchmark.py",
    "started": "2026-01-02 03:04 UTC",
    "warnings": ["Other work was running: the load average was 1.9 on 2 cores at the start."],
    "inputs": "MNIST test set",
    "complete": True,
    "workers": {
        "torch": {"import_s": 1.9, "peak_memory_mb": 610.0},
        "mlx": {"import_s": 0.4, "peak_memory_mb": 420.0},
    },
    "ceilings": CEILINGS,
    "seconds": 345.6,
}


def expected_ms(backend, batch_size):
    """The median that trials of a backend scatter around."""
    _, least, per_image = BACKENDS[backend]
    return least + per_image * batch_size


def make_record(
    backends=CPU_BACKENDS,
    batch_sizes=BATCH_SIZES,
    trials=200,
    rounds=20,
    dtype="float32",
    seed=0,
    scale=None,
    noise=0.02,
    pause=0.0,
    slowdown_after=None,
    study="mnist",
    case="network",
    kinds=("latency", "throughput", "python", "transfer", "cold"),
):
    """A complete record. `scale`: name -> factor on its times; `slowdown_after`: share of the run, +20 %.

    A name such as "torch-again" is that backend once more.
    """
    random = np.random.default_rng(seed)
    rows, cells, checks = [], [], []
    bases = {name: name.removesuffix("-again") for name in backends}
    clock = 0.0
    for batch_size in batch_sizes:
        for backend in backends:
            base = bases[backend]
            target = BACKENDS[base][0]
            label = {"study": study, "case": case, "backend": backend, "target": target}
            label |= {"batch_size": batch_size, "dtype": dtype}
            median = expected_ms(base, batch_size) * (scale or {}).get(backend, 1.0)
            count = min(trials, max(3, int(7000 / median)))
            taking_part = min(rounds, count)
            numbers = sorted(spread(rounds)[:taking_part])  # nested subsets, as in a run
            trial = 0
            for place, number in enumerate(numbers):
                burst = count // taking_part + (place < count % taking_part)
                common = np.random.default_rng([seed, batch_size, number]).normal(0, 0.01)
                for _ in range(burst):
                    value = median * np.exp(common + noise * random.standard_normal())
                    value *= 1 + 0.3 * (random.random() < 0.03)
                    if slowdown_after is not None and number >= slowdown_after * rounds:
                        value *= 1.2
                    start = number * 15.0 + 0.001 * trial
                    rows.append(label | {"kind": "latency", "round": number, "trial": trial})
                    rows[-1] |= {"start_s": start, "latency_ms": value}
                    trial += 1
                extra = {
                    "throughput": 0.93 * median,
                    "python": 0.3 if base.startswith("mlx") else 0.99 * median,
                    "transfer": 0.004 + 0.0002 * batch_size,
                }
                for kind, value in extra.items():
                    if kind in kinds:
                        value *= np.exp(noise * random.standard_normal())
                        rows.append(label | {"kind": kind, "round": number, "trial": place})
                        rows[-1] |= {"start_s": clock, "latency_ms": value}
            if "cold" in kinds:
                for number, value in enumerate((1500.0, 9 * median, 1.2 * median)):
                    rows.append(label | {"kind": "cold", "round": 0, "trial": number})
                    rows[-1] |= {"start_s": 0.0, "latency_ms": value}
            state = "few" if count < 20 else "drifting" if slowdown_after is not None else "steady"
            cells.append(
                label
                | {"state": state, "reason": "", "trials": count, "rounds": taking_part}
                | {"drift_percent": 20.0 if slowdown_after is not None else 0.4, "left_out": {}}
                | {"warmup_trials": 30, "warmup_steady": True, "peak_memory_mb": 100.0 + batch_size}
                | {"cost": costs.predict(base, target, batch_size, dtype, CEILINGS), "build_s": 0.2}
            )
            checks += [
                label
                | {"when": when, "passed": True, "relative_error": 4e-7, "tolerance": 1e-4, "problem": None}
                for when in ("warm-up", "last trial")
            ]
    rows.sort(key=lambda row: row["start_s"])
    for sequence, row in enumerate(rows):
        row["sequence"] = sequence
    settings = {"trials": trials, "warmup": 30, "budget": 7.0, "rounds": rounds, "pause": pause, "seed": 42}
    return Record(
        rows=rows_from(rows),
        environment=dict(ENVIRONMENT),
        settings=settings | {"backends": list(backends), "dtype": dtype, "batch_sizes": list(batch_sizes)},
        checks=checks,
        cells=cells,
    )


def make_gpu_record(batch_sizes=(1, 16, 128, 512, 4096)):
    """As an NVIDIA GPU's: device clock, joules, launches counted."""
    record = make_record(backends=tuple(GPU_MS), batch_sizes=batch_sizes, kinds=("latency", "python"))
    rows = record.rows
    device = rows[rows["kind"] == "latency"].groupby(["backend", "batch_size", "round"]).head(1).copy()
    for frame, extra in ((rows, 1.0), (device, 0.0)):
        for backend, (beyond, least, per_image) in GPU_MS.items():
            for size in batch_sizes:
                here = (frame["backend"] == backend) & (frame["batch_size"] == size)
                wall = here & (frame["kind"] == "latency")
                noise = frame.loc[wall, "latency_ms"] / expected_ms(backend, size)
                frame.loc[wall, "latency_ms"] = noise * (extra * beyond + least + per_image * size)
                frame.loc[here & (frame["kind"] == "python"), "latency_ms"] = 0.8 * beyond
    device["kind"] = "device"
    record.rows = pd.concat([rows, device], ignore_index=True)
    record.rows["target"] = "cuda"
    record.environment |= {"ceilings": GPU_CEILINGS}
    record.environment |= {"gpu": {"name": "Example GPU", "memory_total": "80 GiB", "driver_version": "1.2"}}
    for cell in record.cells:
        cell |= {"target": "cuda", "joules_per_image": 0.002 / cell["batch_size"] + 1e-4}
        cost = costs.predict(cell["backend"], "cuda", cell["batch_size"], "float32", GPU_CEILINGS)
        cell |= {"cost": cost, "launches_counted": cost["launches"]}
    return record


def unavailable_cells(backend, reason, batch_sizes=BATCH_SIZES, state="unavailable", dtype="float32"):
    """Cells of a backend that could not be measured."""
    return [
        {"study": "mnist", "case": "network", "backend": backend, "target": "", "batch_size": size}
        | {"dtype": dtype, "state": state, "reason": reason, "trials": 0, "rounds": 0}
        | {"drift_percent": None, "left_out": {}}
        for size in batch_sizes
    ]
