"""The model on its device: a Batch in, its tokens out."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from kiln.engine.attention.kernel_attention import KernelAttention
from kiln.engine.attention.paged_layer import bind_layers
from kiln.engine.config import EngineConfig
from kiln.engine.distributed.group import Group
from kiln.engine.errors import ConfigError
from kiln.engine.graphs.counts import GraphCounts
from kiln.engine.graphs.piecewise import LayersBetween
from kiln.engine.graphs.runner import LORA, CudaGraphRunner
from kiln.engine.graphs.verify import Verification
from kiln.engine.kv.host_blocks import HostBlocks
from kiln.engine.kv.pool import KVPool
from kiln.engine.kv.sizing import peak_bytes, size_pool
from kiln.engine.lora.loaded_adapter import AdapterStore
from kiln.engine.models.loader import Progress
from kiln.engine.requests.batch import Batch, StepOutput
from kiln.engine.requests.late_masks import LateMasks
from kiln.engine.runner.capture import capture_graphs, measure_graphs
from kiln.engine.runner.device import resolve_device
from kiln.engine.runner.drafters import proposer
from kiln.engine.runner.executor import Executor
from kiln.engine.runner.failures import explained
from kiln.engine.runner.forward import ModelStep
from kiln.engine.runner.loaded_model import load
from kiln.engine.runner.memory import MemoryUse
from kiln.engine.runner.offload import host_memory
from kiln.engine.runner.sums import patience_ms
from kiln.engine.runner.threaded_executor import ThreadedExecutor
from kiln.engine.runner.trial import attempt, in_one_block, trial_steps, try_step
from kiln.jit_kernels.declare.settings import settings

_CPU_TRIAL_TOKENS = 16


class ModelRunner:
    """A loaded model with its KV pool. One thread calls it.

    ``group``: the ranks that share the model, of which this process runs one; None: it has the
    whole model. ``progress`` hears of (stage, done, total). Raises what ``load`` raises.
    """

    def __init__(
        self, config: EngineConfig, progress: Progress | None = None, group: Group | None = None
    ) -> None:
        self._config = config
        self._group = group or Group(0, 1, resolve_device(config.model.device))
        self.device = self._group.device
        self._verification = Verification.parse(settings().graph_verify)
        with torch.inference_mode(), explained(self.device, "loading the model"):
            self.loaded = own = load(config, self._group, progress or _silent)
            self.memory = MemoryUse(own.weight_bytes)
            self.pool = self._make_pool()
            self.executor = self._make_executor(self.pool)
        self.device_type = self.device.type
        self.limits, self.max_model_len = own.limits, own.max_model_len
        self.long_start = own.hf.long_start(own.max_model_len)
        self.num_blocks, self.vocab_size = self.pool.num_blocks, own.hf.vocab_size
        self.image_token_ids = own.hf.image_token_ids
        self.embedder = own.embedder
        # This rank's parts of the LoRA adapters; None if the model has no place for adapters.
        self.rank_store = None if own.adapters is None else own.adapters.store
        self.adapter_store: AdapterStore | None = self.rank_store
        threaded = self.device_type == "cpu" and own.limits.overlap
        threaded = threaded and self._group.rank == 0
        self._steps = ThreadedExecutor(self.executor) if threaded else self.executor
        with explained(self.device, "allocating host memory"):
            report = progress or _silent
            self.host_memory = host_memory(config.kv, self.pool, self._group, self._steps, report)
        self.host_blocks: HostBlocks | None = self.host_memory

    def launch(self, batch: Batch) -> Any:
        """Start to compute the tokens of a batch and to sample. A late step is sampled by ``bind``.

        The step behind may be launched before this one is collected. Raises DeviceError if the
        device is lost, ConfigError if memory ran out; so does ``collect``.
        """
        return self._steps.launch(batch)

    def bind(self, launched: Any, masks: LateMasks) -> Any:
        """Start to sample a late step, the newest one, under the masks of its requests."""
        return self._steps.bind(launched, masks)

    def collect(self, launched: Any) -> StepOutput:
        """Wait for a launched step and return its tokens. Steps are collected in order."""
        return self._steps.collect(launched)

    def run(self, batch: Batch) -> StepOutput:
        """Launch a step and collect it."""
        return self.collect(self.launch(batch))

    def try_out(self, progress: Progress | None = None) -> None:
        """Run the largest step that there can be, so that a client is not the first to see it fail.

        Raises ModelError when it fails, and what a kernel raises.
        """
        report = progress or _silent
        report("first step", 0, 1)
        for trial, names in self._trials(self.num_blocks):
            try_step(self.run, trial, names)
        report("first step", 1, 1)

    def capture_graphs(self, progress: Progress | None = None) -> None:
        """Capture the CUDA graphs, before any request comes. Raises ModelError if one is wrong."""
        self._group.set_patience(patience_ms(self.device))
        with explained(self.device, "capturing CUDA graphs"):
            capture_graphs(self.executor, self.pool, self._verification, progress or _silent)

    def graph_counts(self) -> GraphCounts:
        """Return how often each graph was replayed, and why steps ran without one."""
        graphs = self.executor.graphs
        return GraphCounts() if graphs is None else graphs.counts

    def all_reduces(self) -> Mapping[str, int]:
        """Return how often tensors were summed over the ranks, by algorithm."""
        return self._group.stats()

    def check_ranks(self) -> None:
        """Raise DeviceError if another rank is gone."""

    def close(self) -> None:
        """End all threads and free the graphs; no step may follow. May be repeated.

        The rest of the memory is freed with the runner.
        """
        wait = self._group.size == 1  # else another rank may be gone
        if isinstance(self._steps, ThreadedExecutor):
            self._steps.close(wait=wait)
        if self.host_memory is not None:
            self.host_memory.close(wait=wait)
        self._group.close()

    def _make_executor(self, pool: KVPool) -> Executor:
        """Make what runs steps on a pool."""
        own, env = self.loaded, settings()
        own.inputs.use_pool(pool.token_ids)
        layers = bind_layers(own.model.attention_layers, pool, own.attention, own.dtype)
        graph_adapters = graphs = None
        device = own.graph_device
        if device is not None and own.adapters is not None and own.adapters.reserve_graphs():
            graph_adapters = own.adapters
        step = ModelStep(
            model=own.model,
            attention=own.attention,
            layers=layers,
            inputs=own.inputs,
            vocab_size=own.hf.vocab_size,
            adapters=own.adapters,
            graph_adapters=graph_adapters,
            between=LayersBetween(layers, (lambda x: x) if device is None else device.keep),
            whole_prefills=env.graph_prefill == "full",
        )
        if device is not None:
            keys = own.graph_keys
            if graph_adapters is not None:  # graphs of the base model contain nothing of LoRA
                keys += tuple(key._replace(variant=LORA) for key in keys)
            graphs = CudaGraphRunner(
                keys,
                device,
                own.inputs.addresses,
                garbage_collection=self._config.graphs.garbage_collection,
                # Of several ranks none may go on alone, as the others wait for its sums.
                strict=env.graph_strict or self._group.size > 1,
                agree=self._group.minimum,
            )
        return Executor(
            step,
            graphs,
            own.copies,
            self._group,
            propose=proposer(self._config.speculative, own.inputs),
            shadow=self._verification.every,
            strict=env.graph_strict,
        )

    def _make_pool(self) -> KVPool:
        own, kv = self.loaded, self._config.kv
        measured = self.device.type == "cuda" and kv.num_blocks is None
        step_bytes = self._step_bytes() if measured else 0
        num_blocks = size_pool(kv, own.kv, self.device, own.max_model_len, step_bytes)
        return self._allocate(self._group.minimum([num_blocks])[0])

    def _step_bytes(self) -> int:
        """Return the memory that the largest step and the graphs take besides weights and pool.

        The trial needs a pool of one block only; what it draws means nothing.
        """
        executor = self._make_executor(self._allocate(1))

        def run(batch: Batch) -> StepOutput:
            return executor.collect(executor.launch(batch))

        for trial, _ in self._trials(sys.maxsize):
            alike = in_one_block(trial, self.loaded.max_model_len, self._config.kv.block_size)
            step = peak_bytes(partial(attempt, run, alike), self.device)
            self.memory.step = max(self.memory.step, step)
        self.memory.graphs = measure_graphs(executor)
        return self.memory.step + self.memory.graphs

    def _trials(self, num_blocks: int) -> Iterator[Any]:
        """Yield the largest steps; see ``trial_steps``."""
        own = self.loaded
        # Memory is not measured on a CPU, and the whole budget would take it seconds.
        most = _CPU_TRIAL_TOKENS if self.device.type == "cpu" else sys.maxsize
        return trial_steps(
            own.adapters,
            own.limits,
            min(own.limits.budget, most),
            max_model_len=own.max_model_len,
            num_blocks=num_blocks,
            block_size=self._config.kv.block_size,
            embeds=own.embedder is not None,
        )

    def _allocate(self, num_blocks: int) -> KVPool:
        own, kv = self.loaded.kv, self._config.kv
        num_bytes = num_blocks * kv.block_size * own.bytes_per_token
        try:
            by_head = isinstance(self.loaded.attention, KernelAttention)
            pool = KVPool(own, num_blocks, kv.block_size, self.device, by_head=by_head)
        except RuntimeError as error:  # torch.OutOfMemoryError too
            raise ConfigError(
                f"the KV pool of {num_bytes / 2**30:.1f} GiB does not fit in memory: lower "
                f"num_kv_blocks, kv_memory_gib or gpu_memory_utilization"
            ) from error
        self.memory.pool = num_bytes
        return pool


def _silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""
