"""What a result must carry: the machine, and the versions of what ran on it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

import kiln


def hardware() -> dict[str, Any]:
    """Return the CPU's name, the cores that this process may use, and the GPU's name or "none"."""
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    return {"cpu": _cpu_name(), "cores": len(os.sched_getaffinity(0)), "gpu": gpu}


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Kiln, Python and some packages; "absent" where one is not there."""
    found = {"kiln": kiln.__version__, "python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.machine()
