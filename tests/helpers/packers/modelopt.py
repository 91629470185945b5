"""ModelOpt's 8-bit floats: one scale, a scale for each output, and blocks."""

from __future__ import annotations

from functools import partial

import torch
from depth import at_depth

from packers.compressed_tensors import pack_8_bits, pack_every_block
from packers.fp8 import round_groups, round_rows, round_static
from packers.packer import Packed, Packer


def pack_tensor(weight: torch.Tensor, generator: torch.Generator) -> Packed:
    """Pack with one scale of no dimension, of weights and of inputs."""
    made = pack_8_bits(weight, generator, "float", "tensor", torch.float32, static=True)
    flat = {name: one.squeeze() if "scale" in name else one for name, one in made.tensors.items()}
    return Packed(flat, made.weight)


def pack_channel(weight: torch.Tensor, generator: torch.Generator, flat: bool) -> Packed:
    """Pack with a scale for each output, as [out, 1] or [out]."""
    made = pack_8_bits(weight, generator, "float", "channel", torch.float32)
    scale = made.tensors["weight_scale"]
    tensors = {**made.tensors, "weight_scale": scale.flatten() if flat else scale}
    return Packed(tensors, made.weight)


def pack_blocks(weight: torch.Tensor, generator: torch.Generator, dtype: torch.dtype) -> Packed:
    """Pack with a scale for each block, in a tensor of four dimensions."""
    made = pack_every_block(weight, generator, dtype)
    scale = made.tensors["weight_scale"][:, None, :, None].contiguous()
    return Packed({**made.tensors, "weight_scale": scale}, made.weight)


_IGNORED = {"quant_method": "modelopt", "ignore": ["lm_head", "*.gate", "*.router"]}
_BLOCKS = {**_IGNORED, "group_size": 128}
EVERY = [
    Packer(
        "modelopt-fp8",
        {**_IGNORED, "quant_algo": "fp8", "kv_cache_scheme": None},
        pack_tensor,
        round_static,
    ),
    *(
        Packer(
            f"modelopt-channel-{'flat' if flat else 'column'}",
            {**_IGNORED, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
            partial(pack_channel, flat=flat),
            round_rows,
        )
        for flat in (False, True)
    ),
    Packer(
        "modelopt-blocks-weights",
        {**_BLOCKS, "quant_algo": "FP8_PB_WO"},
        partial(pack_blocks, dtype=torch.float32),
    ),
    Packer(
        "modelopt-blocks",
        {**_BLOCKS, "quant_algo": "FP8_BLOCK_SCALES"},
        partial(pack_blocks, dtype=torch.bfloat16),
        round_groups,
    ),
]
PACKERS = at_depth(EVERY[:1], EVERY)  # whole models take the others with --deep alone
