"""The model on its device: a Batch in, its tokens out."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from kiln.cache.env import LORA, EnvError
from kiln.engine.attention.kernel_attention import KernelAttention, Limits
from kiln.engine.attention.paged_layer import Attention, bind_layers
from kiln.engine.attention.toggles import ATTENTION_FAMILIES, kernels_can_attend
from kiln.engine.attention.torch_attention import TorchAttention
from kiln.engine.compile.compiled_model import compiled
from kiln.engine.config import EngineConfig, KVConfig
from kiln.engine.distributed.group import Group
from kiln.engine.distributed.peers import needs_for
from kiln.engine.distributed.split import Split
from kiln.engine.errors import ConfigError, DeviceError, KilnError, ModelError
from kiln.engine.graphs.counts import GraphCounts
from kiln.engine.kv.pool import KVPool, KVShape
from kiln.engine.kv.sizing import peak_bytes, size_pool
from kiln.engine.lora.runtime import Adapters, load_adapters
from kiln.engine.lora.sharding import AdapterShard
from kiln.engine.lora.sites import Sites
from kiln.engine.lora.store import AdapterStore as RankStore
from kiln.engine.models.hf_config import HFConfig
from kiln.engine.models.kernel_needs import kernel_needs
from kiln.engine.models.loader import Progress, load_model, open_weights
from kiln.engine.models.model_folder import resolve_model_folder
from kiln.engine.models.registry import read_model
from kiln.engine.models.splitting import check_split, rank_attention
from kiln.engine.requests.adapter_jobs import AdapterStore
from kiln.engine.requests.batch import Batch, SampledTokens, StepOutput
from kiln.engine.runner.device import resolve_device, resolve_dtype, resolve_kv_dtype
from kiln.engine.runner.failures import explained
from kiln.engine.runner.forward import ModelStep
from kiln.engine.runner.inputs import StepInputs
from kiln.engine.runner.lora_backend import choose_backend, without_unused
from kiln.engine.runner.memory import MemoryUse, weight_bytes
from kiln.engine.runner.sampler import HostCopies
from kiln.engine.runner.step_frame import StepFrame
from kiln.engine.runner.step_graphs import StepGraphs, graph_device, graph_keys
from kiln.engine.runner.steps import Steps, ThreadedSteps
from kiln.engine.runner.sums import patience_ms, sum_by_kernels
from kiln.engine.runner.trial import in_one_block, trial_batch
from kiln.jit_kernels.declare.errors import KernelError
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import Needs
from kiln.jit_kernels.implementations import decide
from kiln.jit_kernels.registry import all_specs

_CPU_TRIAL_TOKENS = 16
_DUMMY_SEED = 0  # of random weights: the same for all ranks, and after a restart

logger = logging.getLogger(__name__)


class ModelRunner:
    """A loaded model with its KV pool. One thread calls it.

    ``kernels``: kernel family -> what runs for it, and why. ``group``: the ranks that share the
    model, of which this process runs one; None: it has the whole model.
    ``progress`` hears of (stage, done, total). Raises ConfigError or ModelError when the model
    cannot be served as configured, KernelError when a toggle names a kernel that cannot run.
    """

    def __init__(
        self, config: EngineConfig, progress: Progress | None = None, group: Group | None = None
    ) -> None:
        wanted, report = config.model, progress or _silent
        self.device = resolve_device(wanted.device) if group is None else group.device
        self._group = group or Group(0, 1, self.device)
        split = Split(self._group.rank, self._group.size, self._group.name)
        self._limits = config.scheduler.for_device(self.device.type)
        config.kv.pool_memory(self.device.type)  # complain before the weights are loaded
        self._graph_config = config.graphs
        rows, tokens = self._limits.num_rows, self._limits.max_num_batched_tokens
        self._graph_keys = graph_keys(config.graphs, rows, tokens, settings().graph_prefill)
        folder = resolve_model_folder(wanted.model)
        family, self.model_config = read_model(folder)
        check_split(self.model_config, split.world)
        self._kv_heads = rank_attention(self.model_config.attention, split)
        self.max_model_len = _max_model_len(wanted.max_model_len, self.model_config)
        self.dtype = resolve_dtype(wanted.dtype, self.model_config.dtype, self.device)
        self.kv_dtype = resolve_kv_dtype(config.kv.kv_cache_dtype, self.dtype)
        needs = self._kernel_needs()
        can_attend = kernels_can_attend(needs, config.kv.block_size)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        # Kernels that are loaded take memory: they come before the pool is sized.
        specs = without_unused(all_specs().values(), config.lora)
        decisions = decide(specs, self.device, needs, report)
        self._kernels_attend = can_attend and decisions.run_kernels(*ATTENTION_FAMILIES)
        self.kernels = decisions.summary()
        if not can_attend:
            no_kernel = "torch: there is no kernel for this dtype, head_dim and block_size"
            self.kernels |= dict.fromkeys(ATTENTION_FAMILIES, no_kernel)
        self.kernels |= sum_by_kernels(self._group, self.device, self.dtype)
        with torch.inference_mode(), explained(self.device, "loading the model"):
            hf, length = self.model_config, self.max_model_len
            weights = open_weights(folder, wanted.load_format, _DUMMY_SEED, self.dtype)
            sites = Sites() if config.lora.enabled else None  # None: layers without adapters
            place = (self.dtype, self.device)
            model = load_model(family, hf, weights, length, *place, report, sites, split)
            self.memory = MemoryUse(weight_bytes(hf, *place, split.world))
            self._adapters: Adapters | None = None
            if sites is not None:  # takes memory, as the kernels do
                backend = choose_backend(decisions, self._limits.max_num_batched_tokens)
                shard = None if split.world == 1 else AdapterShard(family, hf, split)
                self._adapters = load_adapters(
                    config.lora, sites, self.dtype, self.device, report, backend.make, shard
                )
                self.kernels[LORA] = backend.reason
            self._model = compiled(model, self.device, settings(), report)
            self._attention = self._make_attention(config)  # takes memory too
            self._inputs = StepInputs(
                max_requests=self._limits.num_rows,
                max_tokens=self._limits.max_num_batched_tokens,
                max_model_len=length,
                block_size=config.kv.block_size,
                vocab_size=self.vocab_size,
                device=self.device,
            )
            self._graph_device = graph_device(config.graphs, self.device, settings())
            self._copies = HostCopies(self._limits.num_rows, self.device)
            self._use(self._make_pool(config.kv))

    @property
    def device_type(self) -> str:
        """Where the model runs: "cuda" or "cpu"."""
        return self.device.type

    @property
    def vocab_size(self) -> int:
        """How many tokens the model can draw."""
        return self.model_config.vocab_size

    @property
    def num_blocks(self) -> int:
        """The blocks of the KV pool."""
        return self._pool.num_blocks

    @property
    def adapter_store(self) -> AdapterStore | None:
        """The LoRA adapters, if the model is built for any."""
        return self.rank_store

    @property
    def rank_store(self) -> RankStore | None:
        """The parts of the LoRA adapters that this rank keeps, if the model is built for any."""
        return None if self._adapters is None else self._adapters.store

    def launch(self, batch: Batch) -> Any:
        """Start to compute every token of a batch, and to sample one for each request that samples.

        The step behind may be launched before this one is collected. Raises DeviceError if the
        device is lost, ConfigError if memory ran out; so does ``collect``.
        """
        return self._steps.launch(batch)

    def collect(self, launched: Any) -> StepOutput:
        """Wait for a launched step and return its tokens. Steps are collected in order."""
        return self._steps.collect(launched)

    def follow(self, frame: StepFrame) -> None:
        """Run a step that rank 0 has announced."""
        self._direct.follow(frame)

    def run(self, batch: Batch) -> StepOutput:
        """Launch a step and collect it."""
        return self.collect(self.launch(batch))

    def try_out(self, progress: Progress | None = None) -> None:
        """Run the largest step that there can be, so that a client is not the first to see it fail.

        Raises ModelError when it fails, and what a kernel raises.
        """
        report = progress or _silent
        report("first step", 0, 1)
        for names in self._adapter_groups():
            trial = self._trial(self.num_blocks, len(names))
            slots = {request.request_id: request.adapter_slot for request in trial.requests}
            for token in self._try(trial):
                if token.error is not None:
                    name = names.get(slots[token.request_id])
                    who = "" if name is None else f"LoRA adapter {name!r}: "
                    raise ModelError(f"{who}the model's first step failed: {token.error}")
        report("first step", 1, 1)

    def capture_graphs(self, progress: Progress | None = None) -> None:
        """Capture the CUDA graphs, before any request comes. Raises ModelError if one is wrong."""
        self._group.set_patience(patience_ms(self.device))
        with explained(self.device, "capturing CUDA graphs"):
            self._graphs.capture(self._pool, progress or _silent)

    def graph_counts(self) -> GraphCounts:
        """Return how often each graph was replayed, and why steps ran without one."""
        runner = self._graphs.runner
        return GraphCounts() if runner is None else runner.counts

    def all_reduces(self) -> Mapping[str, int]:
        """Return how often tensors were summed over the ranks, by algorithm."""
        return self._group.stats()

    def check_ranks(self) -> None:
        """Raise DeviceError if another rank is gone."""

    def close(self) -> None:
        """End the thread of the steps and free the graphs; no step may follow. May be repeated.

        The rest of the memory is freed with the runner.
        """
        if isinstance(self._steps, ThreadedSteps):
            self._steps.close(wait=self._group.size == 1)  # else another rank may be gone
        self._group.close()

    def _kernel_needs(self) -> Needs:
        own = kernel_needs(self.model_config, self.dtype, self.kv_dtype)
        return {**own, **needs_for(self._group.size, self.device)}

    def _adapter_groups(self) -> Iterable[dict[int, str]]:
        """Return the names of adapters by slot, so that each has a request of a trial step."""
        if self._adapters is None:
            return ({},)
        return self._adapters.groups(max(1, self._limits.num_rows - 1))

    def _trial(self, num_blocks: int, num_adapters: int = 0) -> Batch:
        # Memory is not measured on a CPU, and the whole budget would take it seconds.
        most = _CPU_TRIAL_TOKENS if self.device.type == "cpu" else sys.maxsize
        return trial_batch(
            self._limits,
            min(self._limits.max_num_batched_tokens, most),
            max_model_len=self.max_model_len,
            num_blocks=num_blocks,
            block_size=self._pool.block_size,
            num_adapters=num_adapters,
        )

    def _try(self, trial: Batch) -> tuple[SampledTokens, ...]:
        try:
            return self.run(trial).tokens
        except (KernelError, EnvError, DeviceError):
            raise
        except Exception as error:
            what = str(error)
            if not isinstance(error, KilnError):
                logger.exception("the model's first step failed")
                what = repr(error)
            raise ModelError(f"the model's first step failed: {what}") from error

    def _step_bytes(self, kv: KVConfig) -> int:
        """Return the memory that the largest step and the graphs take besides weights and pool.

        The trial needs a pool of one block only; what it draws means nothing.
        """
        self._use(self._allocate(1, kv))
        try:
            for names in self._adapter_groups():
                trial = self._trial(sys.maxsize, len(names))
                alike = in_one_block(trial, self.max_model_len, kv.block_size)
                step = peak_bytes(partial(self._try, alike), self.device)
                self.memory.step = max(self.memory.step, step)
            self.memory.graphs = self._graphs.measure()
            return self.memory.step + self.memory.graphs
        finally:
            del self._pool, self._steps, self._direct, self._graphs

    def _use(self, pool: KVPool) -> None:
        """Make a pool the one that every step writes."""
        self._pool = pool
        self._inputs.use_pool(pool.token_ids)
        layers = bind_layers(self._model.attention_layers, pool, self._attention, self.dtype)
        step = ModelStep(self._model, self._attention, layers, self._inputs, self.vocab_size)
        self._graphs = StepGraphs(
            step,
            self._graph_config,
            self._graph_keys,
            settings(),
            self._graph_device,
            self._group,
            self._adapters,
        )
        self._direct = Steps(step, self._graphs, self._copies, self._group, self._adapters)
        threaded = self.device.type == "cpu" and self._limits.overlap and self._group.rank == 0
        self._steps = ThreadedSteps(self._direct) if threaded else self._direct

    @property
    def _kv_shape(self) -> KVShape:
        return KVShape(self._kv_heads, self.kv_dtype)

    def _make_attention(self, config: EngineConfig) -> Attention:
        shape, limits = self._kv_shape, self._limits
        if not self._kernels_attend:
            return TorchAttention(shape.attention.windows, self.dtype)
        most = Limits(limits.num_rows, limits.max_num_batched_tokens, self.max_model_len)
        return KernelAttention(shape, most, self.device)

    def _make_pool(self, kv: KVConfig) -> KVPool:
        measured = self.device.type == "cuda" and kv.num_blocks is None
        step_bytes = self._step_bytes(kv) if measured else 0
        own = size_pool(kv, self._kv_shape, self.device, self.max_model_len, step_bytes)
        return self._allocate(self._group.minimum([own])[0], kv)

    def _allocate(self, num_blocks: int, kv: KVConfig) -> KVPool:
        shape = self._kv_shape
        try:
            by_head = isinstance(self._attention, KernelAttention)
            pool = KVPool(shape, num_blocks, kv.block_size, self.device, by_head=by_head)
        except RuntimeError as error:  # torch.OutOfMemoryError too
            size = num_blocks * kv.block_size * shape.bytes_per_token / 2**30
            raise ConfigError(
                f"the KV pool of {size:.1f} GiB does not fit in memory: lower num_kv_blocks, "
                f"kv_memory_gib or gpu_memory_utilization"
            ) from error
        self.memory.pool = num_blocks * kv.block_size * shape.bytes_per_token
        return pool


def _silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""


def _max_model_len(wanted: int | None, config: HFConfig) -> int:
    if wanted is not None and wanted > config.max_positions:
        raise ConfigError(
            f"max_model_len={wanted}: the model reaches {config.max_positions} tokens "
            f"(max_position_embeddings and rope scaling of its config.json)"
        )
    return wanted or config.max_positions
