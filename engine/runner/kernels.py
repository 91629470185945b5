"""The kernels that a loaded model can call: no other is built or loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from kiln.cache.env import LORA, LORA_CHUNKED
from kiln.engine.attention.rotate_and_store import store_kernels
from kiln.engine.attention.toggles import ATTENTION_FAMILIES, kernels_can_attend
from kiln.engine.config import EngineConfig, KVConfig
from kiln.engine.layers.few_rows import few_row_kernels, gates_few, with_limits_source
from kiln.engine.layers.many_rows import many_row_kernels
from kiln.engine.lora.chunked_backend import ChunkedLoRA
from kiln.engine.lora.kernel_backend import KernelLoRA
from kiln.engine.models.family import Family
from kiln.engine.models.hf_config import HFConfig, QKNorm
from kiln.engine.models.kernel_needs import dequantises, layer_kernels
from kiln.engine.runner.lora_backend import lora_kernels
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import KernelSpec, Needs
from kiln.jit_kernels.implementations import Decision
from kiln.jit_kernels.ops.edits.spec import BAN_WORDS, TOKEN_EDITS
from kiln.jit_kernels.ops.linear.spec import SKINNY_GEMM
from kiln.jit_kernels.ops.sampling.spec import SAMPLE_TOKENS
from kiln.jit_kernels.ops.speculative.spec import PROPOSE_NGRAM, VERIFY_CHAIN
from kiln.jit_kernels.ops.step.spec import STEP_INPUTS
from kiln.jit_kernels.registry import all_specs

# Every model needs these, because any request may ask for penalties, banned tokens or bad words.
_STEP = (STEP_INPUTS, SAMPLE_TOKENS, TOKEN_EDITS, BAN_WORDS)
_DRAFTS = (VERIFY_CHAIN, PROPOSE_NGRAM)
# Other code chooses the kernels of these families: the LoRA backend, and the group of ranks.
_CHOSEN_ELSEWHERE = (LORA, LORA_CHUNKED, "all_reduce")


def with_limits(made: Iterable[Decision], device: torch.device) -> list[Decision]:
    """Return decisions; those about products of few rows also say how many rows these may have."""
    return [
        replace(one, reason=with_limits_source(one.reason, device))
        if one.spec.family == SKINNY_GEMM.family and one.implementation != "torch"
        else one
        for one in made
    ]


def _of_layers(
    config: EngineConfig | None, model: tuple[Family, HFConfig], *, gates: bool
) -> list[KernelSpec]:
    """Return what layers call, but for fused kernels that are not called with these settings.

    Adapters add to products, so nothing is fused then. Where activations are rounded, that is done
    behind the activation of an MLP, which therefore is not fused with the product before it.
    """
    family, hf = model
    called = layer_kernels(family, hf)
    if config is not None and config.lora.enabled:
        called = [one for one in called if not one.has_unfused_path]
    if gates and gates_few("silu") and not hf.quantization.rounds_activations:
        return called
    return [one for one in called if one.family != SKINNY_GEMM.family]


def called_kernels(
    config: EngineConfig | None, model: tuple[Family, HFConfig], device: torch.device, needs: Needs
) -> list[KernelSpec]:
    """Return the specs that a model can call on a device, with those that replace them there.

    ``config`` None: what it can call with any settings. Kernels that sum over ranks are left out,
    because the group of ranks loads them. If a toggle is set for a family that the model does not
    call, the whole family is included, so that an impossible choice is always refused. Raises
    ConfigError if a toggle asks for attention kernels that do not support the model, EnvError if a
    toggle of LoRA would have no effect.
    """
    _, hf = model
    few = few_row_kernels(device, needs)
    called = [*_STEP, *few, *_of_layers(config, model, gates=bool(few))]
    called += many_row_kernels(device, needs) if dequantises(hf, device) else []
    rotary_dims = {0 if rope is None else rope.dim for rope in hf.ropes}
    norms = hf.traits.qk_norm in (QKNorm.HEAD, QKNorm.HEAD_WITHOUT_WEIGHT)
    called += store_kernels(hf.head_dim, rotary_dims, norms, device, needs)
    if config is None:
        called += [*_DRAFTS, *KernelLoRA.kernels, *ChunkedLoRA.kernels]
    else:
        called += lora_kernels(config.lora)
        called += _DRAFTS if config.speculative.method is not None else ()
    if kernels_can_attend(needs, (KVConfig() if config is None else config.kv).block_size):
        called += [spec for spec in all_specs().values() if spec.family in ATTENTION_FAMILIES]
    names = {spec.name for spec in called}
    families = {*_CHOSEN_ELSEWHERE, *ATTENTION_FAMILIES, *(spec.family for spec in called)}
    return [
        spec
        for spec in all_specs().values()
        if (spec.replaces or spec.name) in names
        or (spec.family not in families and settings().kernel_choice(spec.family) != "auto")
    ]
