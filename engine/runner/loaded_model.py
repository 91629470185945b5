"""Load a model: its weights, kernels, adapters, and what else takes memory beside the KV pool."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kiln.cache.env import LORA
from kiln.engine.attention.kernel_attention import KernelAttention, Limits
from kiln.engine.attention.paged_layer import Attention
from kiln.engine.attention.toggles import ATTENTION_FAMILIES
from kiln.engine.attention.torch_attention import TorchAttention
from kiln.engine.compile.compiled_model import compiled
from kiln.engine.config import EngineConfig, SchedulerConfig
from kiln.engine.distributed.group import Group
from kiln.engine.errors import ConfigError
from kiln.engine.graphs.device import GraphDevice
from kiln.engine.graphs.runner import GraphKey
from kiln.engine.kv.pool import KVShape
from kiln.engine.lora.runtime import Adapters, load_adapters
from kiln.engine.lora.sites import Sites
from kiln.engine.models.family import Family, Model
from kiln.engine.models.hf_config import HFConfig
from kiln.engine.models.kernel_needs import kernel_needs
from kiln.engine.models.loader import Progress, load_model, open_weights
from kiln.engine.models.model_folder import resolve_model_folder
from kiln.engine.models.registry import read_model
from kiln.engine.models.renamed_weights import HeadlessWeights
from kiln.engine.models.split import Split
from kiln.engine.models.splitting import check_split, rank_attention
from kiln.engine.models.weights import Weights
from kiln.engine.requests.pooling import Embedder
from kiln.engine.runner.budget import limits_of, most_prefill_in_graphs
from kiln.engine.runner.capture import graph_device, graph_keys
from kiln.engine.runner.device import resolve_dtype, resolve_kv_dtype
from kiln.engine.runner.embedder import longest_text, read_embedder
from kiln.engine.runner.inputs import StepInputs
from kiln.engine.runner.kernels import called_kernels
from kiln.engine.runner.lora_backend import choose_backend
from kiln.engine.runner.memory import products_used, weight_bytes
from kiln.engine.runner.sampler import HostCopies
from kiln.engine.runner.sums import sum_by_kernels
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.implementations import Decisions, decide

_DUMMY_SEED = 0  # of random weights: the same for all ranks, and after a restart


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, and all that takes memory there before the KV pool is sized.

    ``kernels``: kernel family -> what runs for it, and why. ``weight_bytes``: of the weights.
    """

    model: Model
    hf: HFConfig
    limits: SchedulerConfig  # of a step, all of them set
    budget_reason: str  # why a step has so many tokens
    max_model_len: int
    dtype: torch.dtype
    kv: KVShape
    group: Group
    kernels: dict[str, str]
    weight_bytes: int
    adapters: Adapters | None
    attention: Attention
    inputs: StepInputs
    copies: HostCopies
    graph_keys: tuple[GraphKey, ...]
    graph_device: GraphDevice | None
    embedder: Embedder | None


def load(config: EngineConfig, group: Group, report: Progress) -> LoadedModel:
    """Load what this rank runs of the model of a config.

    Raises ConfigError or ModelError when the model cannot be served as configured, KernelError when
    a toggle names a kernel that cannot run.
    """
    wanted, device = config.model, group.device
    split = Split(group.rank, group.size, group.name)
    folder = resolve_model_folder(wanted.model)
    config, family, hf, embedder = _read(config, folder)
    check_split(hf, split.world)
    length = _max_model_len(wanted.max_model_len, hf, None if embedder is None else folder)
    dtype = resolve_dtype(wanted.dtype, hf, device)
    kv_dtype = resolve_kv_dtype(config.kv.kv_cache_dtype, dtype)
    kv = KVShape(rank_attention(hf.attention, split), kv_dtype)
    limits, reason = limits_of(config, hf, dtype, kv, length, group)
    rows, tokens = limits.num_rows, limits.budget
    drafts = config.speculative.num_speculative_tokens
    longest = most_prefill_in_graphs(hf, device, split.world)
    keys = graph_keys(config.graphs, rows, tokens, settings().graph_prefill, drafts, longest)
    # Kernels that are loaded take memory: they come before the pool is sized.
    decisions, kernels, attend = _choose_kernels(config, (family, hf), dtype, kv, group, report)
    with torch.inference_mode():
        weights = _open_weights(config, folder, dtype, embedder)
        sites = Sites() if config.lora.enabled else None  # None: layers without adapters
        place = (dtype, device)
        model = load_model(family, hf, weights, length, *place, report, sites, split, kv_dtype)
        num_bytes, adapters = weight_bytes(model, device), None
        if sites is not None:
            make_backend, kernels[LORA] = choose_backend(decisions, tokens)
            adapters = load_adapters(config.lora, sites, *place, report, make_backend)
        most = Limits(rows, tokens, length)
        return LoadedModel(
            model=compiled(model, device, settings(), report),
            hf=hf,
            limits=limits,
            budget_reason=reason,
            max_model_len=length,
            dtype=dtype,
            kv=kv,
            group=group,
            kernels=kernels | products_used(model, dtype, device, kernels.get("linear", "")),
            weight_bytes=num_bytes,
            adapters=adapters,
            attention=_make_attention(attend, kv, most, dtype, device),
            inputs=StepInputs(
                max_requests=rows,
                max_tokens=tokens,
                max_model_len=length,
                block_size=config.kv.block_size,
                vocab_size=hf.vocab_size,
                device=device,
                max_drafts=drafts,
                long_start=hf.long_start(length),
            ),
            copies=HostCopies(rows * (1 + drafts), rows, device),
            graph_keys=keys,
            graph_device=graph_device(config.graphs, device, settings()),
            embedder=embedder,
        )


def _read(
    config: EngineConfig, folder: Path
) -> tuple[EngineConfig, Family, HFConfig, Embedder | None]:
    """Return the config, the model's family and its own config, and how it makes embeddings.

    A model for embeddings gets no head of its own, so that none is loaded. Its steps report hidden
    states, which runs in no graph.
    """
    wanted = config.model
    family, hf = read_model(folder, wanted.quantization, wanted.overrides)
    embedder = read_embedder(folder, wanted.task, hf.hidden_size, wanted.overrides)
    if embedder is not None:
        hf = replace(hf, tie_word_embeddings=True)
        config = replace(config, graphs=replace(config.graphs, enabled=False))
    return config, family, hf, embedder


def _open_weights(
    config: EngineConfig, folder: Path, dtype: torch.dtype, embedder: Embedder | None
) -> Weights:
    weights = open_weights(folder, config.model.load_format, _DUMMY_SEED, dtype)
    return weights if embedder is None else HeadlessWeights(weights)


def _choose_kernels(
    config: EngineConfig,
    model: tuple[Family, HFConfig],
    dtype: torch.dtype,
    kv: KVShape,
    group: Group,
    report: Progress,
) -> tuple[Decisions, dict[str, str], bool]:
    """Load the kernels; return what was decided, a summary, and whether kernels attend."""
    device = group.device
    needs = kernel_needs(model[1], dtype, kv.dtype)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    decisions = decide(called_kernels(config, model, device, needs), device, needs, report)
    kernels = dict(decisions.summary())
    if not {*ATTENTION_FAMILIES} <= kernels.keys():
        no_kernel = "torch: there is no kernel for this dtype, head_dim, soft cap and block_size"
        kernels |= dict.fromkeys(ATTENTION_FAMILIES, no_kernel)
    kernels |= sum_by_kernels(group, device, dtype)
    return decisions, kernels, decisions.run_kernels(*ATTENTION_FAMILIES)


def _make_attention(
    by_kernels: bool, kv: KVShape, most: Limits, dtype: torch.dtype, device: torch.device
) -> Attention:
    if by_kernels:
        return KernelAttention(kv, most, device)
    return TorchAttention(kv.attention.windows, dtype)


def _max_model_len(wanted: int | None, config: HFConfig, of_texts: Path | None) -> int:
    """Return the context in tokens; ``of_texts``: the folder of a model for embeddings."""
    if wanted is not None and wanted > config.max_positions:
        raise ConfigError(
            f"max_model_len={wanted}: the model reaches {config.max_positions} tokens "
            f"(max_position_embeddings and rope scaling of its config.json)"
        )
    most = config.max_positions
    return wanted or (most if of_texts is None else longest_text(of_texts, most))
