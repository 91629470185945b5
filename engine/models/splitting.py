"""What tensor parallelism asks of a model's sizes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kiln.engine.errors import ConfigError
from kiln.engine.kv.shape import AttentionShape
from kiln.engine.models.hf_config import HFConfig
from kiln.engine.models.split import Split


def check_split(config: HFConfig, world: int) -> None:
    """Raise ConfigError, with the sizes of config.json, if ``world`` ranks cannot share a model."""
    sizes = {"num_attention_heads": config.num_heads}
    experts = config.traits.experts
    if experts is None or not all(experts.layers):
        sizes["intermediate_size"] = config.intermediate_size
    if experts is not None:
        sizes["the experts' intermediate size"] = experts.intermediate_size
        if experts.shared_size:
            sizes["the shared expert's intermediate size"] = experts.shared_size
    kv_heads = config.num_kv_heads
    fine = [n for n in range(1, config.num_heads + 1) if _fits(n, sizes.values(), kv_heads)]
    if world in fine:
        return
    told = ", ".join(f"{name} is {size}" for name, size in sizes.items())
    raise ConfigError(
        f"tensor_parallel_size={world}: {told}, num_key_value_heads is {kv_heads}; this model can "
        f"be split over {', '.join(map(str, fine))}"
    )


def _fits(world: int, sizes: Iterable[int], kv_heads: int) -> bool:
    shares_heads = kv_heads % world == 0 or world % kv_heads == 0
    return shares_heads and not any(size % world for size in sizes)


def rank_attention(shape: AttentionShape, split: Split) -> AttentionShape:
    """Return the heads of one rank; with more ranks than KV heads, each has one."""
    return replace(
        shape,
        num_heads=shape.num_heads // split.world,
        num_kv_heads=max(1, shape.num_kv_heads // split.world),
    )
