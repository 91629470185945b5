"""What some families do to the logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LogitsHead:
    """An LM head whose logits are scaled, then capped: cap * tanh(logit / cap). 0: not capped."""

    part: Callable[[torch.Tensor], torch.Tensor]
    scale: float
    soft_cap: float

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [num_rows, vocab_size] of hidden states [num_rows, hidden_size]."""
        logits = self.part(hidden)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits
