"""Choose what computes the adapters' parts; KILN_LORA_BACKEND and KILN_LORA decide."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from kiln.cache.env import LORA
from kiln.engine.config import LoRAConfig
from kiln.engine.lora.backend import BaseLoRABackend
from kiln.engine.lora.kernel_backend import KernelLoRA
from kiln.engine.lora.pool import AdapterPool
from kiln.engine.lora.sites import Site
from kiln.engine.lora.torch_native import TorchNativeLoRA
from kiln.jit_kernels.declare.spec import KernelSpec
from kiln.jit_kernels.implementations import Decisions
from kiln.jit_kernels.settings import settings


@dataclass(frozen=True, slots=True)
class Choice:
    """A function from a pool and the model's sites to a backend; its name and why, as text."""

    make: Callable[[AdapterPool, Sequence[Site]], BaseLoRABackend]
    reason: str


def without_unused(specs: Iterable[KernelSpec], config: LoRAConfig) -> list[KernelSpec]:
    """Return the specs without those of LoRA, if a model has no adapters.

    If a toggle chooses among them they stay, so that an impossible choice is always refused.
    """
    used = config.enabled or settings().kernel_choice(LORA) != "auto"
    return [spec for spec in specs if used or spec.family != LORA]


def choose_backend(decisions: Decisions, max_tokens: int) -> Choice:
    """Return the backend for what was decided for the operators of LoRA.

    Plain torch works by segments and not through the operators, whose references go token by token.
    ``max_tokens``: of a step.
    """
    own = [one for one in decisions.made if one.spec.family == LORA]
    reason = decisions.summary()[LORA]
    if all(one.implementation != "torch" for one in own):
        return Choice(partial(KernelLoRA, max_tokens=max_tokens), reason)
    reason = f"{TorchNativeLoRA.name}: {reason.removeprefix('torch: ')}"
    return Choice(lambda pool, sites: TorchNativeLoRA(pool), reason)
