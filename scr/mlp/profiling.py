"""Profile a prepared backend with torch.profiler: wait 1, warm-up 1, active 3, and store the trace small."""

import tempfile
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, schedule

from harness.worker import Backend
from mlp import traces

WAIT, WARMUP, ACTIVE = 1, 1, 3


def profile_backend(backend: Backend, path: Path) -> traces.Summary:
    """Profile five calls, each ended by a synchronise, and write the last three to `path` (.json.gz).

    Only activities that the device supports are asked for: CPU always, CUDA on a GPU. MPS has none, so there
    a trace shows operators and no kernels.
    """
    activities = [ProfilerActivity.CPU]
    if backend.target == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(
        activities=activities,
        schedule=schedule(wait=WAIT, warmup=WARMUP, active=ACTIVE, repeat=1),
        record_shapes=True,
        acc_events=True,
    ) as profiler:
        for _ in range(WAIT + WARMUP + ACTIVE):
            backend.run()
            backend.synchronize()
            profiler.step()
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(exported))
        traces.store(exported, path)
    return traces.summarize(traces.read(path))
