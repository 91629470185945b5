"""What every result records: the machine, and the versions of its software."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import kiln

_PACKAGES = (
    "torch", "transformers", "triton", "cuda-bindings", "nvidia-cuda-nvrtc", "cupy-cuda13x",
)  # fmt: skip


def hardware() -> dict[str, Any]:
    """Return the CPU's name, the cores that this process may use, and the GPU's name or "none"."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"cpu": _cpu_name(), "cores": len(os.sched_getaffinity(0)), "gpu": gpu}


def versions() -> dict[str, str]:
    """Return the versions of Kiln, Python, and the installed packages that Kiln uses."""
    found = {"kiln": kiln.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.machine()
