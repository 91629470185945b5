"""Fine-grained fp8, as transformers, DeepSeek and Qwen write it, and older fp8 of one scale.

    weight            float8_e4m3fn [out, in]
    weight_scale_inv  [out / 128, in / 128], rounded up: w = code * scale, despite the name
    weight_scale      [] instead of it without weight_block_size
    input_scale       [], only with activation_scheme "static"

transformers 5, which wrote Ministral-3, calls the last two weight_scale_inv and activation_scale.

Source: transformers' FineGrainedFP8Config, AutoFP8
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

from kiln.engine.layers.block_weight import BLOCK
from kiln.engine.models.fields import Fields
from kiln.engine.models.fp8_schemes import AtLoadFP8, BlockFP8, ChannelFP8
from kiln.engine.models.quantization import Format, Quantization, is_listed, refuse_others
from kiln.engine.models.scheme import DENSE, Scheme
from kiln.engine.models.weights import Weights

_FIELDS = (
    *("quant_method", "activation_scheme", "weight_block_size", "modules_to_not_convert"),
    *("ignored_layers", "fmt", "scale_fmt", "expert_dtype"),
)


@dataclass(frozen=True)
class FP8(Quantization):
    """Every projection but the listed modules has ``stored``; routers and tables are floats."""

    stored: Scheme
    ignored: tuple[str, ...]
    method = "fp8"
    bits = 8.0
    rounds_activations = True

    @property
    def schemes(self) -> Collection[Scheme]:
        """The scheme of what is not listed."""
        return (self.stored,)

    def scheme(self, name: str, role: str, source: Weights) -> Scheme:
        """Return the scheme of a module."""
        if role in ("embed_tokens", "lm_head", "router", "shared_expert_gate"):
            return DENSE
        names, stored = source.spellings(name), self.stored
        if any(is_listed(one, self.ignored) for one in names):
            return DENSE
        if isinstance(stored, ChannelFP8) and source.has(f"{name}.weight_scale_inv"):
            return replace(stored, scale="weight_scale_inv", input_scale="activation_scale")
        return stored


def read(fields: Fields) -> FP8:
    """Read quantization_config. Raises ModelError."""
    refuse_others(fields, _FIELDS)
    for name, only in (("fmt", "e4m3"), ("scale_fmt", "float"), ("expert_dtype", "fp8")):
        if fields.text(name, only) != only:
            raise fields.error(name, f"Kiln supports only {only!r}")
    static = fields.text("activation_scheme", "dynamic")
    if static not in ("dynamic", "static"):
        raise fields.error("activation_scheme", "want 'dynamic' or 'static'")
    block = fields.counts("weight_block_size")
    ignored = (*fields.texts("modules_to_not_convert"), *fields.texts("ignored_layers"))
    if not block:
        return FP8(ChannelFP8("tensor", "static" if static == "static" else "token"), ignored)
    if block != [BLOCK, BLOCK]:
        raise fields.error("weight_block_size", f"Kiln supports only [{BLOCK}, {BLOCK}]")
    if static == "static":
        raise fields.error("activation_scheme", "with blocks Kiln supports only 'dynamic'")
    return FP8(BlockFP8("weight_scale_inv"), ignored)


def at_load() -> FP8:
    """Quantise floats with a scale for each output and each token."""
    return FP8(AtLoadFP8(torch.float8_e4m3fn), ())


FORMAT = Format("fp8", read, at_load=at_load)
