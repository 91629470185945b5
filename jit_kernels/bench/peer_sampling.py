"""FlashInfer's sampling: filters and a draw, without log-probabilities.

Its random numbers differ from Kiln's, so its tokens cannot equal the reference's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType, ModuleType

import torch

from kiln.jit_kernels.bench.timing import Call
from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import KernelSpec
from kiln.jit_kernels.ops.sampling.reference import KEYS, SETTINGS


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens [rows] drawn with random numbers other than the reference's."""

    tokens: torch.Tensor
    logits: torch.Tensor

    def check(self) -> None:
        """Raise ValueError if a token is out of range or has probability 0."""
        rows = torch.arange(self.logits.shape[0], device=self.logits.device)
        tokens = self.tokens.long()
        inside = (tokens >= 0) & (tokens < self.logits.shape[1])
        if not (inside & (self.logits[rows, tokens * inside] > float("-inf"))).all():
            raise ValueError("a token was drawn that has no probability")


def flashinfer_form(spec: KernelSpec, flashinfer: ModuleType) -> Callable[[Arguments], Call]:
    """Return a form that runs FlashInfer's softmax and the sampling function that the rows need."""
    sampling = flashinfer.sampling

    def form(a: Arguments) -> Call:
        if a.mask is not None or a.edit_spans is not None:
            raise ValueError("FlashInfer has no masks and no penalties")
        logits = a.logits
        temperature = a.settings[:, SETTINGS.index("temperature")].contiguous()
        top_p = a.settings[:, SETTINGS.index("top_p")].contiguous()
        top_k = a.keys[:, KEYS.index("top_k")].int()
        if (temperature == 0).all():
            return lambda: Drawn(logits.argmax(1), logits)
        draw = _draw_of(sampling, top_k, top_p)
        return lambda: Drawn(draw(sampling.softmax(logits.float(), temperature)), logits)

    return form


def _draw_of(
    sampling: ModuleType, top_k: torch.Tensor, top_p: torch.Tensor
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return FlashInfer's cheapest function that applies the rows' filters."""
    by_k, by_p = bool((top_k > 0).any()), bool((top_p < 1).any())
    if by_k and by_p:
        return lambda probs: sampling.top_k_top_p_sampling_from_probs(probs, top_k, top_p)
    if by_k:
        return lambda probs: sampling.top_k_sampling_from_probs(probs, top_k)
    if by_p:
        return lambda probs: sampling.top_p_sampling_from_probs(probs, top_p)
    return lambda probs: sampling.sampling_from_probs(probs)


SAMPLING = MappingProxyType({"sample_tokens": {"flashinfer": ("flashinfer", flashinfer_form)}})
