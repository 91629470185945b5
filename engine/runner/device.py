"""Choose the device and the dtypes of a model."""

from __future__ import annotations

import torch

from kiln.engine.config import DType, KVCacheDType
from kiln.engine.errors import ConfigError
from kiln.engine.models.hf_config import DTYPES, HFConfig


def resolve_device(name: str) -> torch.device:
    """Return the device for a flag; "auto" is CUDA if available, else the CPU.

    Raises ConfigError if the device does not exist.
    """
    there = torch.cuda.device_count() if name != "cpu" and torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if there else "cpu"
    kind, _, index = name.partition(":")
    if kind == "cpu":
        return torch.device("cpu")
    if not there:
        raise ConfigError(
            f"device={name!r}: torch {torch.__version__} sees no CUDA device; "
            f"use device cpu, or install a driver and a CUDA build of torch"
        )
    number = int(index) if index.isdigit() else 0
    if (index and not index.isdigit()) or number >= there:
        raise ConfigError(f"device={name!r}: {there} CUDA devices found, numbered from 0")
    return torch.device("cuda", number)


def resolve_rank_device(name: str, local_rank: int, local_world: int) -> torch.device:
    """Return the device of one of several ranks on this machine: each has a GPU of its own.

    Raises ConfigError if there are too few, or if the flag names one.
    """
    first = resolve_device(name)
    if first.type == "cpu":
        return first
    if ":" in name:
        raise ConfigError(
            f"device={name!r}: with tensor parallelism each rank takes the GPU of its own number; "
            "use device cuda, and CUDA_VISIBLE_DEVICES to choose GPUs"
        )
    there = torch.cuda.device_count()
    if local_world > there:
        raise ConfigError(
            f"tensor parallelism needs {local_world} GPUs on this machine, and torch sees {there}: "
            f"lower tensor_parallel_size to {there} or less"
        )
    return torch.device("cuda", local_rank)


def resolve_dtype(name: DType, model: HFConfig, device: torch.device) -> torch.dtype:
    """Return the dtype for a flag; "auto" is the checkpoint's on a GPU, float32 on a CPU.

    CPUs compute faster in float32 than in 16-bit dtypes. Raises ConfigError if the model's numbers
    do not fit the dtype.
    """
    if name != "auto":
        dtype = DTYPES[name]
    else:
        dtype = torch.float32 if device.type == "cpu" else model.dtype
    if dtype == torch.float16 and model.traits.overflows_float16:
        auto = "" if name != "auto" else ", which is float16 for this checkpoint"
        raise ConfigError(
            f"dtype={name!r}{auto}: in this family of models the residual stream exceeds 65,504, "
            "the largest float16, and outputs become NaN: use dtype bfloat16, or float32"
        )
    return dtype


def resolve_kv_dtype(name: KVCacheDType, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the KV pool for a model of ``dtype``."""
    return dtype if name == "auto" else torch.float8_e4m3fn
