"""The default token budget of a step, computed from the model and the GPU.

Nothing is timed, so the budget is the same at every start. Larger steps use a GPU better, until its
multiprocessors are full. But a request that decodes gets one token a step, so a long step delays
it. Therefore the default is the largest budget whose step is still short.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kiln.engine.config import LEAST_BUDGET, EngineConfig, SchedulerConfig
from kiln.engine.distributed.group import Group
from kiln.engine.graphs.buckets import token_buckets
from kiln.engine.kv.pool import KVShape
from kiln.engine.models.costs import step_bytes, step_flops, stored_bytes
from kiln.engine.models.hf_config import HFConfig
from kiln.engine.runner.capture import MOST_PREFILL_TOKENS

BUDGETS = (LEAST_BUDGET, 3072, 4096, 6144, 8192)
_LONGEST_MS = 50.0
# By compute capability: the peak of one multiprocessor for dense products of 16-bit numbers with
# float32 accumulation, in 10^12 operations a second. It is the peak of a card in NVIDIA's data
# sheet, divided by the card's number of multiprocessors: of the T4, A100, A40, L40S, H100, B200 and
# RTX PRO 6000, in this order.
_TERAFLOPS = {75: 1.6, 80: 2.9, 86: 1.8, 89: 2.5, 90: 7.5, 100: 15.2, 120: 2.6}
_GEFORCE = 0.5  # GeForce cards run such products at half the rate
# The share of the peak that a whole prefill step reaches. On an H100, Llama-3-8B reaches 0.6 of it
# and Qwen3-0.6B 0.47.
_EFFICIENCY = 0.5
# How long the host takes to launch the kernels of one layer, measured with Qwen3-0.6B on the host
# of an H100.
_LAUNCHES_MS = 0.34


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU. ``capability``: 90 for 9.0. ``memory``: bytes in total."""

    name: str
    capability: int
    num_multiprocessors: int
    memory: int

    @property
    def flops(self) -> float:
        """Operations a second at the peak, for a 16-bit model; within a factor of 1.3."""
        known = max(key for key in _TERAFLOPS if key <= max(self.capability, min(_TERAFLOPS)))
        rate = _TERAFLOPS[known] * (_GEFORCE if "GeForce" in self.name else 1.0)
        return 1e12 * rate * self.num_multiprocessors


def card_of(device: torch.device) -> Card:
    """Return the card of a CUDA device."""
    found = torch.cuda.get_device_properties(device)
    capability = 10 * found.major + found.minor
    return Card(found.name, capability, found.multi_processor_count, found.total_memory)


def estimated_ms(config: HFConfig, card: Card, world: int, num_tokens: int) -> float:
    """Return how long a step of one prompt takes on ``world`` cards, in milliseconds."""
    return 1000 * step_flops(config, num_tokens) / (card.flops * _EFFICIENCY * world)


def default_budget(
    config: HFConfig, dtype: torch.dtype, card: Card, world: int, room: int
) -> tuple[int, str]:
    """Return the budget of a model on ``world`` cards, and why.

    ``room``: bytes of a card for the temporary memory of a step. Models in float32 use no tensor
    cores, and keep the least budget.
    """
    if dtype.itemsize > 2:
        return LEAST_BUDGET, f"the default in {str(dtype).removeprefix('torch.')}"
    for tokens in reversed(BUDGETS):
        milliseconds = estimated_ms(config, card, world, tokens)
        if tokens == LEAST_BUDGET or (
            milliseconds < _LONGEST_MS and step_bytes(config, dtype, tokens, world) <= room
        ):
            break
    return tokens, f"{milliseconds:.0f} ms by estimate"


def most_prefill_in_graphs(config: HFConfig, device: torch.device, world: int) -> int:
    """Return up to how many tokens a step with prefills is worth a graph.

    A larger one takes the GPU longer than its launches take the host, and its padding costs more.
    """
    if device.type == "cpu":
        return MOST_PREFILL_TOKENS
    card, launches = card_of(device), _LAUNCHES_MS * config.num_layers
    sizes = (MOST_PREFILL_TOKENS, *token_buckets(BUDGETS[-1]))
    return max(
        one
        for one in sizes
        if one <= MOST_PREFILL_TOKENS or estimated_ms(config, card, world, one) < launches
    )


def limits_of(
    config: EngineConfig,
    hf: HFConfig,
    dtype: torch.dtype,
    kv: KVShape,
    max_model_len: int,
    group: Group,
) -> tuple[SchedulerConfig, str]:
    """Return the limits of a step, all of them set, and why its budget is what it is.

    They are the same on all ranks, which must call this together. A larger budget than the least
    must leave room for the KV pool that was asked for, or for one request of ``max_model_len``
    tokens. What other processes hold of the GPU's memory does not count. Raises ConfigError if
    the pool's memory is set for the other kind of device.
    """
    share = config.kv.pool_memory(group.device.type)
    limits, given = config.scheduler.for_device(group.device.type), config.scheduler
    if given.max_num_batched_tokens is not None:
        return limits, "as set"
    if group.device.type == "cpu":
        return limits, "the default on a CPU"
    card, blocks = card_of(group.device), config.kv.num_blocks
    pool = max_model_len if blocks is None else blocks * config.kv.block_size
    weights = stored_bytes(hf, dtype) // group.size
    adapters = (config.lora.memory_gib or 0) * 2**30
    room = int(share * card.memory - weights - adapters - pool * kv.bytes_per_token)
    tokens, reason = default_budget(hf, dtype, card, group.size, room)
    (shared,) = group.minimum([tokens])
    if shared < tokens:
        reason = "the smallest of all ranks"
    return limits.with_budget(shared), reason
