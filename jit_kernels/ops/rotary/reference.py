"""The rotary embedding in torch."""

from __future__ import annotations

import torch

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import Results


def rotary_reference(a: Arguments) -> Results:
    """Return the new query and key."""
    rows = a.cos_sin_table.index_select(0, a.positions)
    cosines, sines = rows.unsqueeze(1).chunk(2, dim=-1)
    return {"query": rotated(a.query, cosines, sines), "key": rotated(a.key, cosines, sines)}


def rotated(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Return x [tokens, heads, head_dim] rotated by cosines, sines [tokens, 1, rotary_dim / 2]."""
    half = cosines.shape[-1]
    wide = x if x.dtype == torch.float64 else x.float()
    a, b, rest = wide[..., :half], wide[..., half : 2 * half], x[..., 2 * half :]
    turned = (a * cosines).addcmul_(b, sines, value=-1), (b * cosines).addcmul_(a, sines)
    if rest.shape[-1]:
        return torch.cat((torch.cat(turned, dim=-1).to(x.dtype), rest), dim=-1)
    return torch.cat(turned, dim=-1).to(x.dtype)
