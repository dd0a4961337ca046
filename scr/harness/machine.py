"""The machine and the state it is in: what a result cannot be read without. Imports no framework."""

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness.paths import ROOT, shown

# The kernels name no math mode: on Metal that is MLX's default, elsewhere the compilers' without fast-math.
MATH_MODE = "safe"
PACKAGES = ("torch", "mlx", "onnxruntime", "numpy")

# Datasheet-class figures, ±10 %: chip -> (GPU cores of the full chip, fp32 TFLOP/s, GB/s). Cores and GB/s are
# Apple's; TFLOP/s are GPU cores × 128 lanes × 2 × clock, and for the M1 the article's figure.
APPLE_CHIPS = {
    "M1": (8, 2.66, 68.0),
    "M1 Pro": (16, 5.3, 200.0),
    "M1 Max": (32, 10.6, 400.0),
    "M1 Ultra": (64, 21.2, 800.0),
    "M2": (10, 3.6, 100.0),
    "M2 Pro": (19, 6.8, 200.0),
    "M2 Max": (38, 13.6, 400.0),
    "M2 Ultra": (76, 27.2, 800.0),
    "M3": (10, 3.6, 100.0),
    "M3 Pro": (18, 6.4, 150.0),
    "M3 Max": (40, 14.3, 400.0),
    "M3 Ultra": (80, 28.6, 819.0),
    "M4": (10, 3.8, 120.0),
    "M4 Pro": (20, 8.0, 273.0),
    "M4 Max": (40, 16.5, 546.0),
    "M5": (10, 4.1, 153.0),
    "M5 Pro": (20, 8.3, 307.0),
    "M5 Max": (40, 16.6, 614.0),
}


def describe(arguments: list[str] | None = None, threads: int = 0) -> dict[str, Any]:
    """Everything JSON-able that a report's head says about machine, software and state.

    `arguments` is the command line (sys.argv); paths in it are stored as `shown` prints them.
    """
    chip = chip_name()
    power = _power()
    load = [round(value, 2) for value in os.getloadavg()]
    facts = {
        "chip": chip,
        "cores": cores(),
        "performance_cores": _sysctl_int("hw.perflevel0.physicalcpu"),
        "memory_gb": _memory_gb(),
        "gpu": _gpu(),
        "os": f"{platform.system()} {platform.release()}"
        if platform.system() != "Darwin"
        else f"macOS {platform.mac_ver()[0]}",
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "versions": _versions(),
        "power": power,
        "load_average": load,
        "threads": threads or cores(),
        "datasheet": datasheet(chip),
        "math_mode": MATH_MODE,
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--", "scr")),
        "kernel_hashes": kernel_hashes(),
        "command": command_line(sys.argv if arguments is None else arguments),
        "started": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }
    return facts | {"warnings": warnings(power, load, cores())}


def warnings(power: dict[str, Any], load: list[float], core_count: int) -> list[str]:
    """What about the machine's state makes its numbers doubtful, one sentence each."""
    found = []
    if power.get("source") == "battery":
        found.append("The machine ran on battery, where clocks may be lower.")
    if power.get("low_power_mode"):
        found.append("Low-power mode was on, which lowers clocks.")
    if load[0] > max(0.5, 0.25 * core_count):
        found.append(
            f"Other work was running: the load average was {load[0]:.1f} on {core_count} cores at the start."
        )
    return found


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_threads() -> int:
    """Threads for every framework: the performance cores of a Mac, else every core this process may use."""
    return _sysctl_int("hw.perflevel0.physicalcpu") or cores()


def datasheet(chip: str) -> dict[str, float] | None:
    """Datasheet-class GPU figures of an Apple chip named by its brand string; None for any other chip."""
    match = re.search(r"\bM\d+(?: (?:Pro|Max|Ultra))?\b", chip) if "Apple" in chip else None
    if match is None or match.group() not in APPLE_CHIPS:
        return None
    gpu_cores, tflops, bandwidth = APPLE_CHIPS[match.group()]
    return {
        "gpu_cores": gpu_cores,
        "fp32_tflop_s": tflops,
        "gb_s": bandwidth,
        "ridge_flop_per_byte": 1e3 * tflops / bandwidth,
    }


def kernel_hashes() -> dict[str, str]:
    """The first 12 hex digits of the SHA-256 of every kernel text and prelude."""
    folder = ROOT / "scr" / "kernels"
    files = sorted(path for path in folder.glob("*") if path.suffix in (".metal", ".h", ".cpp"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in files}


def command_line(arguments: list[str]) -> str:
    """The command as typed, without folders that exist on this machine only."""
    words = [shown(word) if Path(word).is_absolute() else word for word in arguments]
    return " ".join(["python", *words])


def chip_name() -> str:
    """The processor's name."""
    if platform.system() == "Darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor()
    info = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*: (.*)", info.read_text(), re.M) if info.exists() else None
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def _gpu() -> dict[str, Any] | None:
    """Name and cores of a Mac's GPU; name, memory, driver and power limit of an NVIDIA one; None without."""
    if platform.system() == "Darwin":
        return parse_displays(_output("system_profiler", "SPDisplaysDataType", "-json"))
    names = ("name", "memory.total", "driver_version", "power.limit", "clocks.max.sm")
    text = _output("nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader")
    if not text:
        return None
    values = [value.strip() for value in text.splitlines()[0].split(",")]
    return dict(zip((name.replace(".", "_") for name in names), values, strict=False))


def parse_displays(text: str) -> dict[str, Any] | None:
    """GPU name and cores from `system_profiler SPDisplaysDataType -json`."""
    try:
        first = json.loads(text)["SPDisplaysDataType"][0]
    except (ValueError, KeyError, IndexError):
        return None
    core_count = str(first.get("sppci_cores", ""))
    return {"name": first.get("sppci_model"), "cores": int(core_count) if core_count.isdigit() else None}


def _memory_gb() -> float:
    """Physical memory in GB (10⁹ bytes)."""
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)


def _power() -> dict[str, Any]:
    """Power source ("mains", "battery" or None where unknown) and low-power mode (None where unknown)."""
    if platform.system() == "Darwin":
        return parse_pmset(_output("pmset", "-g", "batt"), _output("pmset", "-g"))
    supplies = Path("/sys/class/power_supply")
    online = [path.read_text().strip() for path in supplies.glob("A*/online")] if supplies.exists() else []
    source = None if not online else "mains" if "1" in online else "battery"
    return {"source": source, "low_power_mode": None}


def parse_pmset(battery: str, settings: str) -> dict[str, Any]:
    """Power facts from the output of `pmset -g batt` and `pmset -g`."""
    source = "battery" if "Battery Power" in battery else "mains" if "AC Power" in battery else None
    match = re.search(r"\b(?:lowpowermode|powermode)\s+(\d)", settings)
    return {"source": source, "low_power_mode": match.group(1) == "1" if match else None}


def _versions() -> dict[str, str]:
    """Installed versions of the packages that are timed, without importing them."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _sysctl_int(name: str) -> int | None:
    """An integer that macOS's sysctl knows; None elsewhere."""
    text = _output("sysctl", "-n", name) if platform.system() == "Darwin" else ""
    return int(text) if text.isdigit() else None


def _git(*arguments: str) -> str:
    """Output of a git command in the repository; empty where there is none."""
    return _output("git", "-C", str(ROOT), *arguments)


def _output(*command: str) -> str:
    """A command's standard output, stripped; empty if it is missing, fails or hangs."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
