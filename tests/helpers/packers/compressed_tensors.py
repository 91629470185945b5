"""compressed-tensors: 8-bit codes with scales, and integers packed in words, weights or both."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from depth import at_depth

from packers.fp8 import (
    fp8_codes,
    pack_blocks,
    round_groups,
    round_rows,
    round_static,
    spread,
)
from packers.packer import Packed, Packer, Rounded

FP8, LARGEST = torch.float8_e4m3fn, {"float": 448.0, "int": 127.0}
SCALES = (torch.float32, torch.bfloat16, torch.float16)


def int8_codes(values: torch.Tensor) -> torch.Tensor:
    """Return the nearest integers, saturated."""
    return values.round().clamp(-128, 127).to(torch.int8)


def every_fp8_code() -> torch.Tensor:
    """Return the 254 codes that are numbers."""
    codes = torch.arange(256, dtype=torch.uint8)
    return codes[codes & 0x7F != 0x7F].view(FP8)


def spread_all(codes: torch.Tensor, every: torch.Tensor) -> torch.Tensor:
    """Return the codes with each of ``every`` somewhere, far from each other."""
    out, every = codes.clone(), every[: codes.numel()]
    step = out.numel() // len(every)
    out.view(-1)[: step * len(every) : step] = every
    return out


def pack_8_bits(
    weight: torch.Tensor,
    generator: torch.Generator,
    kind: str,
    strategy: str,
    dtype: torch.dtype,
    static: bool = False,
) -> Packed:
    """Pack with a scale for each output, or one; every code occurs."""
    own = weight.abs().amax(1, keepdim=True)
    scale = (own if strategy == "channel" else own.max().reshape(1)) / LARGEST[kind]
    scale = scale.to(dtype)
    codes = (fp8_codes if kind == "float" else int8_codes)(weight / scale.double())
    every = every_fp8_code() if kind == "float" else torch.arange(-128, 128).to(torch.int8)
    codes = spread_all(codes, every)
    tensors = {"weight": codes, "weight_scale": scale}
    if static:
        tensors["input_scale"] = torch.tensor([4.9 / LARGEST[kind]], dtype=dtype)
    return Packed(tensors, codes.double() * scale.double())


def pack_every_block(
    weight: torch.Tensor, generator: torch.Generator, dtype: torch.dtype
) -> Packed:
    """Pack with a scale for each block; every code occurs."""
    first = pack_blocks(weight, generator, "weight_scale", dtype)
    codes, scales = first.tensors["weight"], first.tensors["weight_scale"]
    codes = spread_all(codes, every_fp8_code())
    return Packed(
        {"weight": codes, "weight_scale": scales},
        codes.double() * spread(scales, *weight.shape),
    )


def pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return rows of codes as int32 words, the first code in the lowest bits, zeros behind."""
    each = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % each))
    places = bits * torch.arange(each)
    words = (padded.view(len(codes), -1, each) << places).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def pack_ints(
    weight: torch.Tensor,
    generator: torch.Generator,
    bits: int,
    group_size: int | None,
    dtype: torch.dtype,
    symmetric: bool = True,
    any_order: bool = False,
    unpacked_zeros: bool = False,
) -> Packed:
    """Pack signed codes plus half of their number; rows and groups take turns at all zero points.

    ``any_order``: the inputs of a group are drawn at random. ``unpacked_zeros``: as int8.
    """
    outputs, inputs = weight.shape
    half, groups = 2 ** (bits - 1), inputs // (group_size or inputs)
    of_input = torch.arange(inputs) // (inputs // groups)
    if any_order:
        of_input = of_input[torch.randperm(inputs, generator=generator)]
    zeros = torch.zeros(outputs, groups, dtype=torch.int64)
    if not symmetric:
        turns = torch.arange(outputs)[:, None] + 3 * torch.arange(groups)
        zeros = (turns * (1 if bits == 4 else 37)) % (2 * half) - half
    largest = torch.stack(
        [weight[:, of_input == group].abs().amax(1) for group in range(groups)], dim=1
    )
    scales = (largest / (half - 1)).to(dtype)
    each_zero, each_scale = zeros[:, of_input], scales.double()[:, of_input]
    codes = (weight / each_scale + each_zero).round().clamp(-half, half - 1).long()
    codes = spread_all(codes, torch.arange(-half, half))
    tensors = {
        "weight_packed": pack_words(codes + half, bits),
        "weight_shape": torch.tensor([outputs, inputs]),
        "weight_scale": scales,
    }
    if any_order:
        tensors["weight_g_idx"] = of_input.int()
    if unpacked_zeros:
        tensors["weight_zero_point"] = zeros.to(torch.int8)
    elif not symmetric:
        tensors["weight_zero_point"] = pack_words((zeros + half).T, bits).T.contiguous()
    return Packed(tensors, (codes - each_zero).double() * each_scale)


def round_int8_rows(x: torch.Tensor, module: Packed) -> torch.Tensor:
    """Round each row to int8 with a scale of its own."""
    scale = (x.abs().amax(1, keepdim=True) / 127).clamp(min=2.0**-126)
    return int8_codes(x / scale).double() * scale


def round_int8_static(x: torch.Tensor, module: Packed) -> torch.Tensor:
    """Round to int8 with the module's scale of the inputs."""
    scale = module.tensors["input_scale"].double()
    return int8_codes(x / scale).double() * scale


def config(format_: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    """Return the quantization_config of one group for all projections."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "output_activations": None}},
        "ignore": ["re:.*lm_head", r"re:.*\.(gate|router)$"],
        "kv_cache_scheme": None,
    }


TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
STATIC = {"num_bits": 8, "strategy": "tensor", "dynamic": False}
GROUP = {"num_bits": 8, "strategy": "group", "group_size": 128, "dynamic": True}
ROUNDED: dict[tuple[str, str], Rounded | None] = {
    ("float", "none"): None,
    ("float", "token"): round_rows,
    ("float", "static"): round_static,
    ("int", "none"): None,
    ("int", "token"): round_int8_rows,
    ("int", "static"): round_int8_static,
}


def of_8_bits(name: str, kind: str, strategy: str, activations: str, turn: int) -> Packer:
    """Return a packer of 8-bit codes, with the scale dtype that is due."""
    inputs = {"none": None, "token": TOKEN, "static": STATIC}[activations]
    weights = {"num_bits": 8, "type": kind, "strategy": strategy, "dynamic": False}
    static, dtype = activations == "static", SCALES[turn % 3]
    pack = partial(pack_8_bits, kind=kind, strategy=strategy, dtype=dtype, static=static)
    settings = config(name, weights, inputs and {**inputs, "type": kind})
    rounded = ROUNDED[kind, activations]
    return Packer(f"ct-{name}-{kind}-{strategy}-{activations}", settings, pack, rounded)


def of_blocks(name: str, structure: Any, inputs: bool, dtype: torch.dtype) -> Packer:
    """Return a packer of 8-bit floats with a scale for each block."""
    weights = {"type": "float", "strategy": "block", "block_structure": structure}
    settings = config("float-quantized", weights, {**GROUP, "type": "float"} if inputs else None)
    pack = partial(pack_every_block, dtype=dtype)
    return Packer(name, settings, pack, round_groups if inputs else None)


def of_ints(name: str, bits: int, group_size: int | None, turn: int, **more: Any) -> Packer:
    """Return a packer of integers in words."""
    weights = {"num_bits": bits, "type": "int", "symmetric": more.get("symmetric", True)}
    weights |= {"strategy": "group" if group_size else "channel", "group_size": group_size}
    weights |= {"actorder": "group" if more.get("any_order") else "weight"}
    if group_size is None:
        del weights["actorder"]
    pack = partial(pack_ints, bits=bits, group_size=group_size, dtype=SCALES[turn % 3], **more)
    return Packer(f"ct-{name}", config("pack-quantized", weights, None), pack)


_8_BITS = (
    *(("float-quantized", "float", strategy) for strategy in ("tensor", "channel")),
    *(("int-quantized", "int", strategy) for strategy in ("tensor", "channel")),
)
EVERY = [
    *(
        of_8_bits(name, kind, strategy, activations, turn)
        for name, kind, strategy in _8_BITS
        for turn, activations in enumerate(("token", "static", "none"))
    ),
    of_8_bits("naive-quantized", "float", "channel", "none", 1),
    of_8_bits("naive-quantized", "int", "tensor", "none", 2),
    of_blocks("ct-blocks", [128, 128], True, torch.float32),
    of_blocks("ct-blocks-text", "128x128", True, torch.bfloat16),
    of_blocks("ct-blocks-weights", [128, 128], False, torch.float16),
    of_ints("int4-group-128", 4, 128, 1),
    of_ints("int4-group-32-asymmetric", 4, 32, 2, symmetric=False),
    of_ints("int4-group-64-old", 4, 64, 0, symmetric=False, unpacked_zeros=True),
    of_ints("int4-channel", 4, None, 1),
    of_ints("int4-channel-asymmetric", 4, None, 0, symmetric=False),
    of_ints("int4-any-order", 4, 32, 2, any_order=True),
    of_ints("int4-any-order-asymmetric", 4, 64, 1, symmetric=False, any_order=True),
    of_ints("int8-channel", 8, None, 0),
    of_ints("int8-group-64-asymmetric", 8, 64, 1, symmetric=False),
    of_ints("int8-group-32-old", 8, 32, 2, symmetric=False, unpacked_zeros=True),
]
# Whole models take the others with --deep alone.
_USUAL = (
    *("ct-float-quantized-float-channel-token", "ct-float-quantized-float-channel-static"),
    *("ct-int-quantized-int-channel-token", "ct-blocks-text", "ct-int4-group-32-asymmetric"),
    *("ct-int4-any-order-asymmetric", "ct-int8-group-32-old"),
)
PACKERS = at_depth([packer for packer in EVERY if packer.name in _USUAL], EVERY)
