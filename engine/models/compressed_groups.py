"""The groups of modules in a checkpoint of compressed-tensors, each with a weight scheme.

Source: compressed-tensors' quantization/quant_scheme.py and its compressors
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kiln.engine.layers.block_weight import BLOCK
from kiln.engine.models.compressed_args import Args, read_args
from kiln.engine.models.fields import Fields
from kiln.engine.models.fp8_schemes import FP8, BlockFP8, ChannelFP8
from kiln.engine.models.packed_scheme import PackedInts
from kiln.engine.models.quantization import refuse_others

_FIELDS = ("targets", "weights", "input_activations", "output_activations", "format")
_KINDS = {
    "float-quantized": ("float",),
    "int-quantized": ("int",),
    "naive-quantized": ("float", "int"),
}
_PACKED = "pack-quantized"
FORMATS = (*_KINDS, _PACKED)


Stored = ChannelFP8 | BlockFP8 | PackedInts


def _codes(strategy: str, kind: str, bits: int = 8, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, **more}


_INT8 = {
    "weights": _codes("channel", "int"),
    "input_activations": _codes("token", "int", dynamic=True),
}
PRESETS: Mapping[str, dict[str, Any]] = {
    "FP8": {
        "weights": _codes("tensor", "float"),
        "input_activations": _codes("tensor", "float"),
    },
    "FP8_DYNAMIC": {
        "weights": _codes("channel", "float"),
        "input_activations": _codes("token", "float", dynamic=True),
    },
    "FP8_BLOCK": {
        "weights": _codes("block", "float", block_structure=[BLOCK, BLOCK]),
        "input_activations": _codes("group", "float", dynamic=True, group_size=BLOCK),
    },
    "W8A8": _INT8,
    "INT8": _INT8,
    "W8A16": {"weights": _codes("channel", "int")},
    "W4A16": {"weights": _codes("group", "int", 4, group_size=128)},
    "W4A16_ASYM": {"weights": _codes("group", "int", 4, group_size=128, symmetric=False)},
}


def read_scheme(group: Fields, format_: str) -> Stored:
    """Read one of config_groups, whose tensors are in a format. Raises ModelError by name."""
    refuse_others(group, _FIELDS)
    weights = group.group("weights")
    if weights is None:
        raise group.error("weights", "Kiln supports only groups with quantised weights")
    if group.group("output_activations") is not None:
        raise group.error("output_activations", "Kiln does not quantise outputs: want null")
    args = read_args(weights)
    if args.dynamic:
        raise weights.error("dynamic", "want false for weights")
    if format_ == _PACKED:
        return _packed(group, weights, args)
    if args.kind not in _KINDS[format_]:
        raise weights.error("type", f"but its format is {format_!r}")
    if args.bits != 8:
        raise weights.error("num_bits", f"with the format {format_!r} Kiln supports only 8")
    if not args.symmetric:
        raise weights.error("symmetric", f"with the format {format_!r} Kiln supports only true")
    activations = _activations(group, args)
    if args.strategy == "block" and args.kind == "float":
        return BlockFP8("weight_scale", activations != "none")
    if args.strategy not in ("tensor", "channel"):
        raise weights.error("strategy", f"Kiln does not support it with the format {format_!r}")
    return ChannelFP8(args.strategy, activations, FP8 if args.kind == "float" else torch.int8)


def _activations(group: Fields, weights: Args) -> str:
    """Return how activations are rounded: "none", "token", "static" or "group" (128 inputs)."""
    fields = group.group("input_activations")
    if fields is None:
        return "none"
    args = read_args(fields)
    if args.kind != weights.kind:
        raise fields.error("type", f"but weights are {weights.kind!r}: Kiln wants the same")
    if args.bits != 8:
        raise fields.error("num_bits", "for activations Kiln supports only 8")
    if not args.symmetric:
        raise fields.error("symmetric", "for activations Kiln supports only true")
    if weights.strategy == "block":
        supported = {("group", True): "group"}
    else:
        supported = {("token", True): "token", ("tensor", False): "static"}
    found = supported.get((args.strategy, args.dynamic))
    if found is None:
        able = " or ".join(f"{name!r} with dynamic {_json(on)}" for name, on in supported)
        raise fields.error(
            "strategy",
            f"which means {args.strategy!r} with dynamic {_json(args.dynamic)}: beside weights of "
            f"{weights.strategy!r} Kiln supports {able}",
        )
    if found == "group" and args.group_size != BLOCK:
        raise fields.error("group_size", f"for activations Kiln supports only {BLOCK}")
    return found


def _json(flag: bool) -> str:
    return "true" if flag else "false"


def _packed(group: Fields, weights: Fields, args: Args) -> PackedInts:
    """Read a group of the format pack-quantized."""
    if group.group("input_activations") is not None:
        raise group.error("input_activations", f"with {_PACKED!r} Kiln supports only null")
    if args.kind != "int":
        raise weights.error("type", f"but its format is {_PACKED!r}")
    if args.bits not in (4, 8):
        raise weights.error("num_bits", f"with {_PACKED!r} Kiln supports 4 and 8")
    if args.strategy not in ("group", "channel"):
        raise weights.error("strategy", f"with {_PACKED!r} Kiln supports 'group' and 'channel'")
    return PackedInts(args.bits, args.group_size, args.symmetric, args.in_any_order)
