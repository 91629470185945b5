"""Measured plans on disk: a JSON file for each kind of hardware, in the folder of the kernel cache.

A table is used only where everything that it was measured on is the same. Times of virtual ranks,
which share one GPU, tell nothing about links between GPUs: such a table is refused.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kiln.cache.disk.publish import publish
from kiln.cache.disk.root import cache_root, trust_of
from kiln.cache.disk.trust import Untrusted, make_folder, open_trusted, read_all
from kiln.cache.keys import content_key
from kiln.engine.distributed.all_reduce_plan import Plan
from kiln.engine.distributed.cuda_driver import driver_call
from kiln.engine.distributed.peer_conditions import HOST, NVLINK, PCIE
from kiln.engine.errors import ConfigError
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.ops.all_reduce.modes import ModeConfig
from kiln.jit_kernels.ops.all_reduce.spec import SPECS
from kiln.jit_kernels.toolchains.template import render

_FABRICS = (NVLINK, PCIE, HOST)  # on which times are those of real groups
_FOLDER = "all_reduce"

logger = logging.getLogger(__name__)


@cache
def source_hash() -> str:
    """Return a hash of the kernels' sources."""
    texts = []
    for spec in SPECS:
        unit = render(spec, next(iter(spec.variants())))
        texts += [(spec.name, unit.text), *unit.headers.items()]
    return content_key((name, text.encode()) for name, text in texts)[:16]


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
    path = _path(key)
    if path is None:
        raise ConfigError(
            "there is no folder for the all-reduce table: set KILN_KERNEL_CACHE_DIR or HOME"
        )
    table = {"key": dict(key), "plan": plan.fields(), "rows": rows}
    try:
        make_folder(path.parents[1], trust_of(settings()))
        make_folder(path.parent, trust_of(settings()))
        publish(path, json.dumps(table, indent=1).encode(), replace=True)
    except (OSError, Untrusted) as error:
        raise ConfigError(f"the all-reduce table cannot be written: {error}") from error
    return path


def load(key: Mapping[str, Any]) -> Plan | None:
    """Return the plan that was measured on this hardware; None if there is none."""
    path = _path(key)
    descriptor = None if path is None else open_trusted(path, trust_of(settings()))
    if descriptor is None:
        return None
    try:
        table = json.loads(read_all(descriptor, os.fstat(descriptor).st_size))
        if table["key"] != dict(key) or key["fabric"] not in _FABRICS:
            raise ValueError(f"it was measured on {table['key']}, and this is {dict(key)}")
        return plan_of(table["plan"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("the all-reduce table %s is not used: %s", path, error)
        return None
    finally:
        os.close(descriptor)


def plan_of(fields: Mapping[str, Any]) -> Plan:
    """Return the plan that ``Plan.fields`` describes. Raises ValueError, TypeError and KeyError."""
    own = dict(fields)
    names = ("one_shot_push_threshold", "two_shot_push_threshold", "one_shot_pull_threshold")
    modes = ModeConfig(**{name: int(own.pop(name)) for name in names}, measured=own.pop("measured"))
    return Plan(modes, **own)


def _path(key: Mapping[str, Any]) -> Path | None:
    root = cache_root(settings())
    if root is None:
        return None
    name = content_key((label, str(value).encode()) for label, value in key.items())
    return root / _FOLDER / f"{name[:32]}.json"
