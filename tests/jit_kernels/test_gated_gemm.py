"""A product of few rows with a gated activation behind it has the bits of one after the other."""

from __future__ import annotations

import pytest
import torch
from depth import at_depth
from skinny_products import GATED_SIZES, in_turn

from kiln.jit_kernels.declare.spec import label
from kiln.jit_kernels.ops.linear.functions import skinny_gemm_and_mul
from kiln.jit_kernels.ops.linear.spec import GATED
from kiln.jit_kernels.toolchains.template import render

NEEDS = at_depth({"scalar_t": "kiln::bf16"}, {})
SILU = GATED["silu"]
VARIANTS = [
    *SILU.variants(NEEDS),
    *GATED["gelu_tanh"].variants({**NEEDS, "weight": "Plain"}),
]


@pytest.mark.parametrize(
    "variant", VARIANTS, ids=[label(GATED[one["gate"]], one) for one in VARIANTS]
)
def test_bits_are_those_of_the_product_and_then_the_activation(variant):
    assert in_turn(render, [], 1, needs=variant) is None


def test_the_public_function_names_what_it_cannot_do():
    x, weight, out = torch.ones(2, 64), torch.ones(16, 64), torch.empty(2, 8)
    x, weight, out = (one.bfloat16() for one in (x, weight, out))
    skinny_gemm_and_mul(x, weight, out)
    assert (out == torch.nn.functional.silu(torch.tensor(64.0)) * 64).all()
    with pytest.raises(ValueError, match="activation 'relu': want one of silu, gelu_tanh"):
        skinny_gemm_and_mul(x, weight, out, "relu")
    with pytest.raises(ValueError, match=r"^skinny_gemm_silu_and_mul: shapes that do not fit"):
        skinny_gemm_and_mul(x, weight[:15], out)
    with pytest.raises(ValueError, match=r"^skinny_gemm_silu_and_mul: .*is of experts"):
        SILU.bind(
            SILU.make_arguments(VARIANTS[0], GATED_SIZES[0], "cpu")._replace(weight=weight[None])
        )
