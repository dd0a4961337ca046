"""Where NVIDIA's Python packages have put their libraries and headers."""

import importlib.util
from pathlib import Path


def packages() -> list[Path]:
    """The packages' folders (…/nvidia/cu13), each with `lib` or `include`; none where none is installed."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    return [path for root in roots for path in sorted(Path(root).iterdir()) if path.is_dir()]


def libraries(name: str) -> list[Path]:
    """The packages' libraries NAME.so.VERSION."""
    return [path for folder in packages() for path in sorted(folder.glob(f"lib/{name}.so.*"))]
