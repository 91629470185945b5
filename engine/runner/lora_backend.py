"""Choose what computes the adapters' parts; KILN_LORA_BACKEND and the families' toggles decide."""

from __future__ import annotations

from functools import partial

from kiln.cache.env import LORA, LORA_CHUNKED, EnvError
from kiln.engine.config import LoRAConfig
from kiln.engine.lora.chunked_backend import ChunkedLoRA
from kiln.engine.lora.kernel_backend import KernelLoRA
from kiln.engine.lora.runtime import MakeBackend
from kiln.engine.lora.torch_native import TorchNativeLoRA
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import KernelSpec
from kiln.jit_kernels.implementations import Decisions


def lora_kernels(config: LoRAConfig) -> frozenset[KernelSpec]:
    """Return the operators that the LoRA backend calls; none without adapters.

    If a toggle chooses among them they are there, so that an impossible choice is always refused.
    Raises EnvError if a toggle would have no effect.
    """
    env = settings()
    chunked = env.lora_backend == ChunkedLoRA.name
    toggle = env.kernel_choice(LORA_CHUNKED)
    if toggle != "auto" and not chunked:
        raise EnvError(
            f"KILN_LORA_CHUNKED={toggle} has no effect without KILN_LORA_BACKEND=csgmv: set that "
            "too, or unset it"
        )
    if not config.enabled and env.kernel_choice(LORA) == "auto":
        return frozenset()
    return (ChunkedLoRA if chunked else KernelLoRA).kernels


def choose_backend(decisions: Decisions, max_tokens: int) -> tuple[MakeBackend, str]:
    """Return what makes the backend for what was decided for the operators of LoRA, and why.

    For plain torch it is TorchNativeLoRA, which computes a segment at a time. The operators'
    references compute a token at a time, which is too slow to serve. ``max_tokens``: of a step.
    """
    own = [one for one in decisions.made if one.spec.family in (LORA, LORA_CHUNKED)]
    chunked = any(one.spec.family == LORA_CHUNKED for one in own)
    reason = decisions.summary()[LORA_CHUNKED if chunked else LORA]
    if all(one.implementation != "torch" for one in own):
        backend = ChunkedLoRA if chunked else KernelLoRA
        overlap = settings().lora_overlap
        return partial(backend, max_tokens=max_tokens, overlap=overlap), reason
    reason = f"{TorchNativeLoRA.name}: {reason.removeprefix('torch: ')}"
    return lambda pool, sites: TorchNativeLoRA(pool), reason
