"""Estimate whether a model fits this machine: its weights, and the tokens in the KV pool."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kiln.engine.config import EngineConfig, KVConfig, ModelConfig
from kiln.engine.graphs.counts import GraphCounts
from kiln.engine.kv.pool import KVShape
from kiln.engine.models.costs import stored_bytes
from kiln.engine.models.hf_config import HFConfig
from kiln.engine.models.loader import Progress
from kiln.engine.models.registry import read_model
from kiln.engine.models.split import Split
from kiln.engine.models.splitting import rank_attention
from kiln.engine.runner.device import resolve_device, resolve_dtype, resolve_kv_dtype

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes of weights and KV pool in bytes, and the pool's capacity in tokens.

    A measured plan also has the temporary memory of the largest step and of the CUDA graphs.
    """

    device: str
    weight_bytes: int
    pool_bytes: int
    pool_tokens: int
    context: int  # longest context of the model, in tokens
    step_bytes: int = 0
    step_tokens: int = 0  # of the largest step
    graphs: GraphCounts | None = None  # of a measured plan

    @property
    def fits(self) -> bool:
        """Whether the pool holds one request of the full context."""
        return self.pool_tokens >= self.context

    def sentence(self) -> str:
        """Return the plan as text."""
        parts = [f"{self.weight_bytes / _GIB:.3g} GiB of weights"]
        if self.step_bytes:
            step = f"the largest step, of {self.step_tokens:,} tokens"
            parts.append(f"{self.step_bytes / _GIB:.3g} GiB for {step}")
        if self.graphs is not None and self.graphs.captured:
            parts.append(
                f"{self.graphs.num_bytes / _GIB:.3g} GiB for {self.graphs.captured} CUDA graphs "
                f"({self.graphs.seconds:.1f} s)"
            )
        pool = f"a KV pool of {self.pool_bytes / _GIB:.3g} GiB on {self.device}"
        return (
            f"{', '.join(parts)} and {pool}: {self.pool_tokens:,} tokens, context {self.context:,}"
        )


def plan_memory(
    folder: Path, kv: KVConfig | None = None, *, model: ModelConfig | None = None
) -> MemoryPlan:
    """Plan a model folder with the settings of ``kiln serve``. Raises ModelError and ConfigError.

    ``model``: settings of the model that are not the defaults. The size of the weights follows from
    config.json. On a GPU the pool gets the rest of ``gpu_memory_utilization``; on a CPU it gets
    ``kv_memory_gib``.
    """
    kv, model = kv or KVConfig(), model or ModelConfig(str(folder))
    _, config = read_model(folder, model.quantization, model.overrides)
    device = resolve_device("auto")
    dtype = resolve_dtype(model.dtype, config, device)
    weights = stored_bytes(config, dtype)
    memory = kv.pool_memory(device.type)
    if device.type == "cpu":
        pool = int(memory * _GIB)
    else:
        free, total = torch.cuda.mem_get_info(device)
        pool = max(0, int(memory * total) - (total - free) - weights)
    kv_dtype = resolve_kv_dtype(kv.kv_cache_dtype, dtype)
    shape = KVShape(config.attention, kv_dtype)
    blocks = pool // (shape.bytes_per_token * kv.block_size)
    return MemoryPlan(str(device), weights, pool, blocks * kv.block_size, config.max_positions)


def plan_on_gpus(config: HFConfig, memory: int, world: int) -> MemoryPlan:
    """Plan each of ``world`` GPUs of ``memory`` bytes, with the default settings.

    The weights are in the checkpoint's dtype, and so is the pool.
    """
    kv = KVConfig()
    weights = stored_bytes(config, config.dtype) // world
    pool = max(0, int(kv.pool_memory("cuda") * memory) - weights)
    shape = KVShape(rank_attention(config.attention, Split(0, world)), config.dtype)
    tokens = pool // (shape.bytes_per_token * kv.block_size) * kv.block_size
    return MemoryPlan("cuda", weights, pool, tokens, config.max_positions)


def measure_memory(
    folder: Path, progress: Progress, *, model: ModelConfig | None = None
) -> MemoryPlan:
    """Start an engine with random weights in the shapes of a model folder, and measure it.

    The settings are those of ``kiln serve`` without flags but those of ``model``. Raises KilnError
    and KernelError.
    """
    from kiln.engine.runner.model_runner import ModelRunner  # imports every kernel

    settings = replace(model or ModelConfig(str(folder)), model=str(folder), load_format="dummy")
    config = EngineConfig(settings)
    runner = ModelRunner(config, progress)
    runner.try_out(progress)
    runner.capture_graphs(progress)
    use, tokens = runner.memory, runner.num_blocks * config.kv.block_size
    return MemoryPlan(
        str(runner.device),
        use.weights,
        use.pool,
        tokens,
        runner.max_model_len,
        use.step,
        runner.loaded.limits.budget,
        runner.graph_counts(),
    )
