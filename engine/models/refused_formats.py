"""Formats of quantised checkpoints that Kiln does not read, and why."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

from kiln.engine.models.fields import Fields

_BASE = "load the unquantised base model instead"
_CODEBOOKS = f"its weights are entries of trained tables, for which Kiln has no product: {_BASE}"
_OWN_PACKING = "its tensors are packed in a way of its own"
_NVFP4 = f"its 4-bit floats have scales of 8-bit floats, for which Kiln has no product: {_BASE}"
# By quant_method or quant_algo in lower case, with "-" for "_".
REASONS = MappingProxyType(
    {
        "bitsandbytes": "its blocks run along the flattened weights, so that no rank can have a "
        f"share of them: {_BASE}",
        "nvfp4": _NVFP4,
        "w4a16-nvfp4": _NVFP4,
        "modelopt-fp4": _NVFP4,
        "gguf": f"Kiln reads only safetensors: {_BASE}",
        "aqlm": _CODEBOOKS,
        "vptq": _CODEBOOKS,
        "higgs": _CODEBOOKS,
        "spqr": f"it keeps outliers in sparse tensors, for which Kiln has no product: {_BASE}",
        "hqq": f"{_OWN_PACKING}, with zero points that are not integers: {_BASE}",
        "quanto": f"{_OWN_PACKING}: {_BASE}",
        "torchao": f"its tensors are objects of a Python library: {_BASE}",
        "eetq": f"{_OWN_PACKING}, for one kind of GPU: {_BASE}, with --quantization fp8",
        "fp-quant": f"its weights are rotated, and so must be what they multiply: {_BASE}",
        "bitnet": f"its weights have three values, for which Kiln has no product: {_BASE}",
        "quark": f"its names and fields are its own: {_BASE}, or one of compressed-tensors",
        "intel/auto-round": f"it is of an early AutoRound, with a packing of its own: {_BASE}",
        "fbgemm-fp8": "it bounds activations by a number that the file holds: "
        f"{_BASE}, with --quantization fp8",
    }
)
_ALIASES = MappingProxyType(
    {"fpquant": "fp-quant", "bnb": "bitsandbytes", "optimum-quanto": "quanto"}
)


def refuse_formats(fields: Fields) -> None:
    """Raise ModelError if quantization_config names a format that Kiln knows, but does not read."""
    if "quant_method" not in fields:  # bitsandbytes wrote none at first
        for name in ("load_in_4bit", "load_in_8bit"):
            if name in fields and fields.flag(name):
                raise fields.error(name, f"which is bitsandbytes: {REASONS['bitsandbytes']}")
    for name in ("quant_method", "quant_algo"):
        if name in fields:
            own = fields.text(name).lower().replace("_", "-")
            reason = REASONS.get(_ALIASES.get(own, own))
            if reason is not None:
                raise fields.error(name, f"which Kiln does not read: {reason}")


def gguf_advice(folder: Path) -> str:
    """Return what to do about a folder with a GGUF file; empty if it has none."""
    first = min((path.name for path in folder.glob("*.gguf")), default="")
    return f"{first} is of GGUF, but {REASONS['gguf']}" if first else ""
