"""The head of a benchmark's result: what it was measured on, and with which versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "cuda-bindings", "nvidia-cuda-nvrtc")


def machine(packages: tuple[str, ...] = PACKAGES) -> dict[str, Any]:
    """Return processor, cores, Python and the versions of some packages and of nvcc."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "processor": next(names, platform.processor()),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in packages},
        "nvcc": _nvcc(),
    }


def describe(machine: dict[str, Any]) -> str:
    """Return processor, cores, Python and packages in a line, for the head of a table."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    cores, python = machine["cores"], machine["python"]
    return f"{machine['processor']}, {cores} cores, Python {python}, {versions}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _nvcc() -> str:
    if shutil.which("nvcc") is None:
        return "absent"
    lines = subprocess.check_output(["nvcc", "--version"], text=True).splitlines()
    return next((line for line in lines if "release" in line), lines[-1]).strip()
