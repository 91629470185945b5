"""A configuration from keywords or flags, and as text for another process."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from types import MappingProxyType
from typing import Any, TypedDict, get_type_hints

from kiln.engine.config import (
    SPECULATIVE_METHODS,
    DTypeName,
    EngineConfig,
    KVCacheDType,
    LoadFormat,
    LoRAModule,
    SchedulingPolicy,
    SpeculativeConfig,
    Task,
)
from kiln.engine.errors import ConfigError


class Settings(TypedDict, total=False):
    """The settings of ``LLM``, by vLLM's names; those that are not given keep their defaults.

    ``lora_modules`` maps the names of adapters to their folders. ``hf_overrides`` is merged into
    config.json. ``dtype`` may be a torch.dtype too.
    """

    device: str
    dtype: DTypeName
    load_format: LoadFormat
    quantization: str | None
    max_model_len: int | None
    seed: int | None
    task: Task
    revision: str | None
    tokenizer: str | None
    tokenizer_revision: str | None
    hf_overrides: Mapping[str, Any] | str | None
    block_size: int
    num_kv_blocks: int | None
    gpu_memory_utilization: float | None
    kv_memory_gib: float | None
    kv_cache_dtype: KVCacheDType
    enable_prefix_caching: bool
    kv_offload_gib: float
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_chunk_tokens: int | None
    scheduling_policy: SchedulingPolicy
    disable_overlap_schedule: bool
    disable_cuda_graph: bool
    cuda_graph_max_bs: int | None
    cuda_graph_bs: Sequence[int] | None
    enable_cudagraph_gc: bool
    lora_modules: Mapping[str, str] | None
    max_loras: int | None
    max_lora_rank: int | None
    lora_memory_gib: float | None
    speculative_config: Mapping[str, Any] | None
    tensor_parallel_size: int


_FIELDS = MappingProxyType(  # of settings with other names than their fields
    {
        "num_kv_blocks": "num_blocks",
        "disable_overlap_schedule": "overlap",
        "disable_cuda_graph": "enabled",
        "cuda_graph_max_bs": "max_bs",
        "cuda_graph_bs": "bs",
        "enable_cudagraph_gc": "garbage_collection",
        "lora_modules": "modules",
        "lora_memory_gib": "memory_gib",
    }
)


def offline_config(model: str, settings: Settings) -> EngineConfig:
    """Return the configuration of an ``LLM``, whose queue holds batches of any size.

    Raises ConfigError on a bad value, TypeError on an unknown setting.
    """
    kinds = get_type_hints(EngineConfig)
    group_of = {one.name: group for group, kind in kinds.items() for one in fields(kind)}
    groups: dict[str, dict[str, Any]] = {name: {} for name in kinds}
    groups["model"]["model"], groups["scheduler"]["max_waiting"] = model, sys.maxsize
    for name, value in settings.items():
        if name not in Settings.__annotations__:
            known = ", ".join(Settings.__annotations__)
            raise TypeError(f"LLM has no setting {name!r}: there are {known}")
        if name == "speculative_config":
            continue
        own = _FIELDS.get(name, name)
        groups[group_of[own]][own] = not value if name.startswith("disable_") else value
    groups["speculative"] = checked_speculative(settings.get("speculative_config") or {})
    groups["model"]["hf_overrides"] = _as_text(settings.get("hf_overrides"))
    modules, sizes = settings.get("lora_modules") or {}, settings.get("cuda_graph_bs")
    groups["lora"]["modules"] = tuple(LoRAModule(*each) for each in modules.items())
    groups["graphs"]["bs"] = None if sizes is None else tuple(sizes)
    return config_of(groups)


def _as_text(overrides: Mapping[str, Any] | str | None) -> str | None:
    """Return ``hf_overrides`` as JSON. Raises ConfigError."""
    if overrides is None or isinstance(overrides, str):
        return overrides
    try:
        return json.dumps(dict(overrides))
    except (TypeError, ValueError) as error:
        shown = repr(overrides)[:80]
        raise ConfigError(f"hf_overrides={shown}: cannot be written as JSON: {error}") from error


def checked_speculative(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a SpeculativeConfig that vLLM's ``speculative_config`` gives.

    Raises ConfigError naming a field that does not exist, or that is missing.
    """
    known = [one.name for one in fields(SpeculativeConfig)]
    if unknown := [name for name in given if name not in known]:
        raise ConfigError(
            f"speculative_config: {unknown[0]!r}: is not supported; there are {', '.join(known)}"
        )
    if given and given.get("method") is None:
        raise ConfigError(
            f"speculative_config: method: is missing: give one of {', '.join(SPECULATIVE_METHODS)}"
        )
    return dict(given)


def config_of(groups: Mapping[str, Mapping[str, Any]]) -> EngineConfig:
    """Return a configuration from the fields of each group, by the group's name.

    Raises ConfigError on a bad value, TypeError on a field that does not exist.
    """
    kinds = get_type_hints(EngineConfig)
    return EngineConfig(**{name: kinds[name](**given) for name, given in groups.items()})


def config_text(config: EngineConfig) -> str:
    """Return a configuration as JSON, for another process."""
    return json.dumps(asdict(config))


def read_config_text(text: str) -> EngineConfig:
    """Return the configuration that ``config_text`` wrote. Raises ConfigError and TypeError."""
    groups = json.loads(text)
    graphs, lora = groups["graphs"], groups["lora"]
    graphs["bs"] = None if graphs["bs"] is None else tuple(graphs["bs"])
    lora["modules"] = tuple(LoRAModule(**module) for module in lora["modules"])
    return config_of(groups)
