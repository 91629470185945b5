"""An attention layer as the model declares it: everything between its two projections."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kiln.engine.attention.operator import attention
from kiln.engine.kv.shape import AttentionShape, Window
from kiln.engine.layers.norm import RMSNorm
from kiln.engine.layers.rotary import Rotary


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Grouped-query attention. ``index`` counts the model's attention layers from 0.

    With ``query_norm`` and ``key_norm`` [head_dim], queries and keys are normalised before they are
    rotated; a layer has both, of one form, or neither. With ``rotary`` None they are not rotated. A
    KV pool of 8-bit floats holds keys / ``k_scale`` and values / ``v_scale``; beside a pool of
    other floats both are 1.0.

    A logit is query times key times ``scale``. With a ``soft_cap`` c it becomes c tanh(logit / c).
    Each head's sink is one more logit, neither scaled nor capped, whose weight has no value.
    """

    index: int
    shape: AttentionShape
    rotary: Rotary | None
    query_norm: RMSNorm | None = None
    key_norm: RMSNorm | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    scale: float | None = None  # None: head_dim ** -0.5
    soft_cap: float = 0.0  # 0: none
    sinks: torch.Tensor | None = None  # [num_heads] float32

    @property
    def window(self) -> Window | None:
        """Which keys a token attends to; None: all of them up to itself."""
        return self.shape.windows[self.index]

    @property
    def softmax_scale(self) -> float:
        """The factor of the attention logits, query times key."""
        return float(self.shape.head_dim**-0.5) if self.scale is None else self.scale

    def __call__(self, positions: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
        """Return the attention [num_tokens, num_heads * head_dim] of a step; overwrites qkv.

        positions: [num_tokens] int64; qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim].
        """
        out = qkv.new_empty(qkv.shape[0], self.shape.query_size)
        attention(qkv, positions, out, self.index)
        return out
