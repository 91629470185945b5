"""The softmax of an attention layer, and attention with a soft cap or sinks in torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Softmax:
    """How a layer turns queries and the keys in its pool into weights; see AttentionLayer."""

    scale: float  # of the logits, query times key in the pool
    soft_cap: float = 0.0  # 0: none
    sinks: torch.Tensor | None = None  # [num_heads] float32

    @property
    def is_plain(self) -> bool:
        """Whether ``F.scaled_dot_product_attention`` can compute it."""
        return self.soft_cap == 0 and self.sinks is None

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Do what ``F.scaled_dot_product_attention`` does, with the soft cap and the sinks.

        query: [batch, num_heads, num_tokens, head_dim]; keys, values: [batch, num_kv_heads,
        num_keys, head_dim]; mask: True or 0 where a key is visible, else False or -infinity; None:
        causal, with as many keys as tokens. Computes in float32.
        """
        kv_heads, num_keys = keys.shape[1:3]
        grouped = query.float().unflatten(1, (kv_heads, -1))
        logits = (grouped @ keys.float().unsqueeze(2).mT).flatten(1, 2) * self.scale
        if self.soft_cap:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        if mask is None:
            mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
        logits = logits.where(mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
        if self.sinks is not None:
            sinks = self.sinks[:, None, None].expand(*logits.shape[:-1], 1)
            logits = torch.cat((logits, sinks), dim=-1)
        weights = logits.softmax(-1)[..., :num_keys].unflatten(1, (kv_heads, -1))
        out: torch.Tensor = (weights @ values.float().unsqueeze(2)).flatten(1, 2)
        return out.to(query.dtype)
