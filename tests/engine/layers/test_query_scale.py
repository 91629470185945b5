"""The factor of queries by their position is that of transformers, in any dtype."""

from __future__ import annotations

import pytest
import torch
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from kiln.engine.attention.layer import AttentionLayer
from kiln.engine.kv.shape import AttentionShape
from kiln.engine.layers.linear import Linear
from kiln.engine.layers.norm import RMSNorm
from kiln.engine.layers.query_scale import QueryScale, QueryScaling
from kiln.engine.layers.weight import DenseWeight
from kiln.engine.models.block import SelfAttention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_factors_are_transformers(dtype):
    positions = torch.arange(300)
    theirs = get_llama_4_attn_scale(positions[None], 0.1, 16)[0, 0].to(dtype)
    assert torch.equal(QueryScaling(0.1, 16).table(300, dtype), theirs)
    shifted = 1 + 0.1 * torch.log1p(torch.floor((positions + 1.0) / 16))  # Llama-4
    ours = QueryScaling(0.1, 16, shift=1).table(300, dtype)
    torch.testing.assert_close(ours[:, 0], shifted.to(dtype), rtol=1e-6, atol=0)


def test_a_query_is_scaled_by_the_factor_of_its_position():
    scale, query = QueryScale(torch.tensor([[1.0], [2.0], [3.0]])), torch.ones(2, 4)
    scale(torch.tensor([2, 1]), query)
    assert query.tolist() == [[3.0] * 4, [2.0] * 4]


def test_a_norm_of_heads_that_would_undo_the_scale_is_refused():
    shape, norm = AttentionShape(2, 1, 8, (None,)), RMSNorm(torch.ones(8), 1e-6)
    linear = Linear(DenseWeight(torch.ones(16, 16)))
    attention = AttentionLayer(0, shape, None, norm, norm)
    with pytest.raises(ValueError, match=r"attention layer 0: queries are scaled .* want one of"):
        SelfAttention(linear, attention, linear, None, QueryScale(torch.ones(4, 1)))
