"""Measured plans on disk: a JSON file for each kind of hardware, in the folder of the kernel cache.

A table is used only where everything that it was measured on is the same. Times of virtual ranks,
which share one GPU, tell nothing about links between GPUs: such a table is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kiln.engine.distributed import tune_files
from kiln.engine.distributed.all_reduce_plan import Plan
from kiln.engine.distributed.cuda_driver import driver_call
from kiln.engine.distributed.peer_conditions import HOST, NVLINK, PCIE
from kiln.engine.errors import ConfigError
from kiln.jit_kernels.ops.all_reduce.modes import ModeConfig
from kiln.jit_kernels.ops.all_reduce.spec import SPECS

_FABRICS = (NVLINK, PCIE, HOST)  # on which times are those of real groups
_FOLDER, _WHAT = "all_reduce", "the all-reduce table"


@cache
def source_hash() -> str:
    """Return a hash of the kernels' sources."""
    return tune_files.source_hash(SPECS)


def key_of(world: int, device: torch.device, fabric: str) -> dict[str, str | int]:
    """Return the hardware and software that a measurement belongs to."""
    gpu, driver = "no GPU: kernels on a CPU, by the host toolchain", "none"
    if device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
        driver = str(driver_call("cuDriverGetVersion"))
    return {
        "gpu": gpu, "world": world, "fabric": fabric, "driver": driver, "source": source_hash(),
    }  # fmt: skip


def store(key: Mapping[str, Any], plan: Plan, rows: list[dict[str, Any]]) -> Path:
    """Write a plan, and the measurements behind it; return the file.

    Raises ConfigError if it was not measured on a real group, or if there is no folder.
    """
    if key["fabric"] not in _FABRICS:
        raise ConfigError(
            f"an all-reduce table measured on {key['fabric']!r} says nothing about real groups: "
            "measure with one GPU for each rank"
        )
    return tune_files.write(_path(key), _WHAT, key, {"plan": plan.fields(), "rows": rows})


def load(key: Mapping[str, Any]) -> Plan | None:
    """Return the plan that was measured on this hardware; None if there is none."""

    def parse(table: Any) -> Plan:
        if key["fabric"] not in _FABRICS:
            raise ValueError(f"times on {key['fabric']!r} say nothing about real groups")
        return plan_of(table["plan"])

    return tune_files.read(_path(key), _WHAT, key, parse)


def plan_of(fields: Mapping[str, Any]) -> Plan:
    """Return the plan that ``Plan.fields`` describes. Raises ValueError, TypeError and KeyError."""
    own = dict(fields)
    names = ("one_shot_push_threshold", "two_shot_push_threshold", "one_shot_pull_threshold")
    modes = ModeConfig(**{name: int(own.pop(name)) for name in names}, measured=own.pop("measured"))
    return Plan(modes, **own)


def _path(key: Mapping[str, Any]) -> Path | None:
    return tune_files.path_of(_FOLDER, key)
