"""transformers' fp8: blocks of 128 x 128, and one scale a module."""

from __future__ import annotations

from functools import partial

import torch

from packers.packer import Packed, Packer

FP8, LARGEST, BLOCK = torch.float8_e4m3fn, 448.0, 128


def fp8_codes(values: torch.Tensor) -> torch.Tensor:
    """Return the nearest 8-bit floats, saturated."""
    return values.clamp(-LARGEST, LARGEST).to(torch.float32).to(FP8)


def spread(scales: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
    """Return scales of blocks as float64 of each weight, [outputs, inputs]."""
    rows = torch.arange(outputs) // BLOCK
    return scales.double()[rows][:, torch.arange(inputs) // BLOCK]


def pack_blocks(
    weight: torch.Tensor, generator: torch.Generator, suffix: str, dtype: torch.dtype
) -> Packed:
    """Pack with a scale for each block, in ``suffix``."""
    outputs, inputs = weight.shape
    scales = torch.empty(-(-outputs // BLOCK), -(-inputs // BLOCK), dtype=torch.float64)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block = weight[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
            scales[row, column] = block.abs().max() / LARGEST
    stored = scales.to(dtype)
    each = spread(stored, outputs, inputs)
    codes = fp8_codes(weight / each)
    return Packed({"weight": codes, suffix: stored}, codes.double() * each)


def pack_tensor(
    weight: torch.Tensor,
    generator: torch.Generator,
    suffix: str = "weight_scale",
    of_inputs: str = "",
) -> Packed:
    """Pack with one scale, in ``suffix``; ``of_inputs``: also one of the inputs."""
    scale = (weight.abs().max() / LARGEST).float()
    codes = fp8_codes(weight / scale.double())
    tensors = {"weight": codes, suffix: scale}
    if of_inputs:
        tensors[of_inputs] = (0.01 + 0.01 * (100 * weight[0, 0]).abs() % 0.01).float()
    return Packed(tensors, codes.double() * scale.double())


def round_groups(x: torch.Tensor, module: Packed) -> torch.Tensor:
    """Round each 128 inputs of a row with a scale of their own; the last may be fewer."""
    return torch.cat([round_rows(part, module) for part in x.split(BLOCK, dim=1)], dim=1)


def round_rows(x: torch.Tensor, module: Packed) -> torch.Tensor:
    """Round each row with a scale of its own."""
    scale = (x.abs().amax(1, keepdim=True) / LARGEST).clamp(min=2.0**-126)
    return fp8_codes(x / scale).double() * scale


def round_static(x: torch.Tensor, module: Packed, of_inputs: str = "input_scale") -> torch.Tensor:
    """Round with the module's scale of the inputs."""
    scale = module.tensors[of_inputs].double()
    return fp8_codes(x / scale).double() * scale


_BLOCKS = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
_TENSOR = {"quant_method": "fp8", "weight_block_size": None}
_inverse = partial(pack_blocks, suffix="weight_scale_inv")
PACKERS = [
    Packer("fp8-blocks", _BLOCKS, partial(_inverse, dtype=torch.float32), round_groups),
    Packer("fp8-blocks-bf16", _BLOCKS, partial(_inverse, dtype=torch.bfloat16), round_groups),
    Packer(
        "fp8-tensor",
        {**_TENSOR, "activation_scheme": "dynamic"},
        pack_tensor,
        round_rows,
    ),
    Packer(
        "fp8-static",
        {**_TENSOR, "activation_scheme": "static"},
        partial(pack_tensor, of_inputs="input_scale"),
        round_static,
    ),
    Packer(
        "fp8-static-transformers",
        {**_TENSOR, "activation_scheme": "static", "dequantize": False},
        partial(pack_tensor, suffix="weight_scale_inv", of_inputs="activation_scale"),
        partial(round_static, of_inputs="activation_scale"),
    ),
]
