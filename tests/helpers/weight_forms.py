"""Weights of every form with random contents, as skinny_gemm multiplies them."""

from __future__ import annotations

import torch
from product_runs import int4, mxfp4

from kiln.engine.layers.block_weight import BlockGroupWeight, BlockWeight
from kiln.engine.layers.channel_weight import ChannelWeight, StaticWeight, TokenWeight
from kiln.engine.layers.weight import DenseWeight, Weight
from kiln.engine.layers.weight_parts import join

FP8 = torch.float8_e4m3fn
OUTPUTS, INPUTS = 72, 256


def codes(*size: int) -> torch.Tensor:
    """Return 8-bit floats."""
    return torch.randn(size).to(FP8)


def int8(*size: int) -> torch.Tensor:
    """Return 8-bit integers."""
    return torch.randint(-128, 128, size, dtype=torch.int8)


def scales(*size: int) -> torch.Tensor:
    """Return scales from 0.01 to 0.11."""
    return 0.01 + 0.1 * torch.rand(size)


def dense(outputs: int = OUTPUTS) -> Weight:
    """Return weights of bf16."""
    return DenseWeight(torch.randn(outputs, INPUTS).bfloat16() / 16)


def block(kind: type[BlockWeight], first: int = 0) -> BlockWeight:
    """Return weights in blocks; ``first``: which output of its block the first one is."""
    return kind.of(codes(OUTPUTS, INPUTS), scales(1 + (first > 56), INPUTS // 128), first)


FORMS = {
    "dense": dense,
    "channel": lambda: ChannelWeight(codes(OUTPUTS, INPUTS), scales(OUTPUTS, 1)),
    "token": lambda: TokenWeight(codes(OUTPUTS, INPUTS), scales(OUTPUTS, 1)),
    "static": lambda: StaticWeight(
        codes(OUTPUTS, INPUTS), scales(OUTPUTS, 1), torch.tensor([0.02])
    ),
    "int8 channel": lambda: ChannelWeight(int8(OUTPUTS, INPUTS), scales(OUTPUTS, 1)),
    "int8 token": lambda: TokenWeight(int8(OUTPUTS, INPUTS), scales(OUTPUTS, 1)),
    "int8 static": lambda: StaticWeight(
        int8(OUTPUTS, INPUTS), scales(OUTPUTS, 1), torch.tensor([0.03])
    ),
    "block": lambda: block(BlockWeight),
    "block from the middle": lambda: block(BlockWeight, 100),
    "block group": lambda: block(BlockGroupWeight),
    "int4": lambda: int4(128, True, INPUTS),
    "mxfp4": lambda: mxfp4(INPUTS),
    "mixed": lambda: join([FORMS["token"](), dense(8)]),
}
