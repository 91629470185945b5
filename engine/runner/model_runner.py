"""The model on its device: a Batch in, its tokens out."""

from __future__ import annotations

import torch

from kiln.engine.attention.context import AttentionStep, attention_step
from kiln.engine.attention.kernel_attention import KernelAttention, Limits
from kiln.engine.attention.paged_layer import Attention, bind_layers
from kiln.engine.attention.toggles import ATTENTION_FAMILIES, kernels_can_attend
from kiln.engine.attention.torch_attention import TorchAttention
from kiln.engine.batch import Batch, StepOutput
from kiln.engine.config import EngineConfig
from kiln.engine.errors import ConfigError
from kiln.engine.kv.pool import KVPool, KVShape
from kiln.engine.kv.sizing import size_pool
from kiln.engine.model_folder import resolve_model_folder
from kiln.engine.models.hf_config import HFConfig
from kiln.engine.models.kernel_needs import kernel_needs
from kiln.engine.models.loader import Progress, load_model, open_weights
from kiln.engine.models.registry import read_model
from kiln.engine.runner.device import resolve_device, resolve_dtype, resolve_kv_dtype
from kiln.engine.runner.inputs import make_inputs
from kiln.engine.runner.sampler import sample
from kiln.jit_kernels.implementations import decide
from kiln.jit_kernels.registry import all_specs


class ModelRunner:
    """A loaded model with its KV pool. One thread calls it.

    ``kernels``: kernel family -> what runs for it, and why.
    ``progress`` hears of (stage, done, total). Raises ConfigError or ModelError when the model
    cannot be served as configured, KernelError when a toggle names a kernel that cannot run.
    """

    def __init__(self, config: EngineConfig, progress: Progress | None = None) -> None:
        wanted, report = config.model, progress or _silent
        self.device = resolve_device(wanted.device)
        config.kv.pool_memory(self.device.type)  # complain before the weights are loaded
        folder = resolve_model_folder(wanted.model)
        family, self.model_config = read_model(folder)
        self.max_model_len = _max_model_len(wanted.max_model_len, self.model_config)
        self.dtype = resolve_dtype(wanted.dtype, self.model_config.dtype, self.device)
        self.kv_dtype = resolve_kv_dtype(config.kv.kv_cache_dtype, self.dtype)
        needs = kernel_needs(self.model_config, self.dtype, self.kv_dtype)
        can_attend = kernels_can_attend(needs, config.kv.block_size)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        # Kernels that are loaded take memory: they come before the pool is sized.
        decisions = decide(all_specs().values(), self.device, needs, report)
        self._kernels_attend = can_attend and decisions.run_kernels(*ATTENTION_FAMILIES)
        self.kernels = decisions.summary()
        if not can_attend:
            no_kernel = "torch: there is no kernel for this dtype, head_dim and block_size"
            self.kernels |= dict.fromkeys(ATTENTION_FAMILIES, no_kernel)
        with torch.inference_mode():
            weights = open_weights(folder, wanted.load_format, wanted.seed, self.dtype, self.device)
            self._model = load_model(
                family, self.model_config, weights, self.max_model_len, self.device, report
            )
            self._attention = self._make_attention(config)  # takes memory too
            self._pool = self._make_pool(config)
            layers = self._model.attention_layers
            self._layers = bind_layers(layers, self._pool, self._attention, self.dtype)

    @property
    def vocab_size(self) -> int:
        """How many tokens the model can draw."""
        return self.model_config.vocab_size

    @property
    def num_blocks(self) -> int:
        """The blocks of the KV pool."""
        return self._pool.num_blocks

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepOutput:
        """Compute every token of a batch, and draw one for each request that samples."""
        inputs = make_inputs(batch, self._pool.block_size, self.device)
        plan = self._attention.plan(inputs.metadata)
        with attention_step(AttentionStep(self._layers, inputs.metadata, plan)):
            hidden = self._model.forward(inputs.token_ids, inputs.positions)
        sampling = [request for request in batch.requests if request.samples]
        if not sampling:
            return StepOutput(())
        logits = self._model.logits(hidden.index_select(0, inputs.sample_rows))
        return StepOutput(sample(logits, sampling))

    @property
    def _kv_shape(self) -> KVShape:
        return KVShape(self.model_config.attention, self.kv_dtype)

    def _make_attention(self, config: EngineConfig) -> Attention:
        shape, limits = self._kv_shape, config.scheduler
        if not self._kernels_attend:
            return TorchAttention(shape.attention.windows, self.dtype)
        most = Limits(limits.max_num_seqs, limits.max_num_batched_tokens, self.max_model_len)
        return KernelAttention(shape, most, self.device)

    def _make_pool(self, config: EngineConfig) -> KVPool:
        shape = self._kv_shape
        num_blocks = size_pool(config.kv, shape, self.device, self.max_model_len)
        try:
            by_head = isinstance(self._attention, KernelAttention)
            return KVPool(shape, num_blocks, config.kv.block_size, self.device, by_head=by_head)
        except RuntimeError as error:  # torch.OutOfMemoryError too
            size = num_blocks * config.kv.block_size * shape.bytes_per_token / 2**30
            raise ConfigError(
                f"the KV pool of {size:.1f} GiB does not fit in memory: lower num_kv_blocks, "
                f"kv_memory_gib or gpu_memory_utilization"
            ) from error


def _silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""


def _max_model_len(wanted: int | None, config: HFConfig) -> int:
    if wanted is not None and wanted > config.max_positions:
        raise ConfigError(
            f"max_model_len={wanted}: the model reaches {config.max_positions} tokens "
            f"(max_position_embeddings and rope scaling of its config.json)"
        )
    return wanted or config.max_positions
