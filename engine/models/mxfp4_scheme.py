"""How gpt-oss stores experts in MXFP4: all of a layer in one tensor, gate and up rows in turn.

    <layer>.mlp.experts.gate_up_proj_blocks  uint8 [experts, 2 * inner, hidden / 32, 16]
    <layer>.mlp.experts.gate_up_proj_scales  uint8 [experts, 2 * inner, hidden / 32]
    <layer>.mlp.experts.down_proj_blocks     uint8 [experts, hidden, inner / 32, 16]
    <layer>.mlp.experts.down_proj_scales     uint8 [experts, hidden, inner / 32]

A byte holds two inputs, the even one in the low bits. The biases are floats: see fused_experts.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kiln.engine.errors import ModelError
from kiln.engine.layers.mxfp4_weight import BLOCK, LARGEST_SCALE, MXFP4Weight
from kiln.engine.layers.weight import Weight
from kiln.engine.layers.weight_parts import join
from kiln.engine.models.scheme import Part, Scheme

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)")
_ROWS = MappingProxyType(  # the stem of a stored tensor's name, the first row, the step
    {
        "gate_proj": ("gate_up_proj", 0, 2),
        "up_proj": ("gate_up_proj", 1, 2),
        "down_proj": ("down_proj", 0, 1),
    }
)
_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between the values of neighbours


class Place(NamedTuple):
    """Where the outputs of an expert's projection are in the tensors of all experts.

    Output i is row ``first + i * step`` of ``expert`` in ``<layer>.<stem>_blocks`` and ``_scales``.
    """

    layer: str
    stem: str
    expert: int
    first: int
    step: int


def place_of(name: str) -> Place:
    """Return where a module such as "model.layers.0.mlp.experts.3.gate_proj" is stored.

    Raises ModelError if the name is not that of an expert's projection.
    """
    found = _EXPERT.fullmatch(name)
    if found is None or found[3] not in _ROWS:
        raise ModelError(f"{name}: Kiln reads MXFP4 only for experts' {', '.join(_ROWS)}")
    return Place(found[1], _ROWS[found[3]][0], int(found[2]), *_ROWS[found[3]][1:])


@dataclass(frozen=True, slots=True)
class StackedMXFP4(Scheme):
    """The experts of gpt-oss."""

    few_rows = ("E2M1", "kBy32")

    def read(self, part: Part) -> Weight:
        """Return the rank's share of a module."""
        return self.linear([part])

    def linear(self, parts: Sequence[Part]) -> Weight:
        """Return the parts behind each other; the rows that two of them share are read once."""
        rows: dict[object, tuple[torch.Tensor, torch.Tensor]] = {}
        weights = []
        for part in parts:
            place = place_of(part.name)
            key = (place.layer, place.stem, place.expert, part.outputs, part.inputs)
            if key not in rows:
                rows[key] = _stored_rows(part, place)
            own = slice(place.first, None, place.step)
            codes, scales = (one[own] for one in rows[key])
            weights.append(_share(part, codes, scales).padded(part.outputs.room))
        return join(weights)

    def experts(self, parts: Sequence[Part], count: int) -> Weight:
        """Return ``count`` experts of equally many parts. Raises ModelError if there are others."""
        layer, stem, *_ = place_of(parts[0].name)
        stored = parts[0].source.shape(f"{layer}.{stem}_blocks")
        if stored[:1] != (count,):
            raise replace(parts[0], name=layer).error(
                f"{stem}_blocks", f"is {list(stored)}, but config.json implies {count} experts"
            )
        return Scheme.experts(self, parts, count)

    def quantized(self, values: torch.Tensor) -> Weight:
        """Return weights as this scheme would store them."""
        outputs, inputs = values.shape
        size = math.gcd(BLOCK, inputs)
        blocks = values.float().view(outputs, -1, size)
        exponents = torch.frexp(blocks.abs().amax(2))[1].clamp(-124, 127) - 3  # 6 is below 2**3
        scaled = torch.ldexp(blocks, -exponents.unsqueeze(2))
        codes = 8 * (scaled < 0).to(torch.uint8)
        for middle in _MIDDLES:
            codes += scaled.abs() > middle
        return MXFP4Weight.of(codes.view(outputs, inputs), (exponents + 127).to(torch.uint8))


def _stored_rows(part: Part, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of the rank's outputs and those between: codes and scales, both uint8.

    Codes [rows, inputs] are of whole blocks, which hold the rank's inputs; scales [rows, blocks].
    """
    outputs, inputs = part.outputs, part.inputs
    stem, own = place.stem, replace(part, name=place.layer)
    if inputs.whole % BLOCK:
        raise own.error(f"{stem}_blocks", f"has blocks of {BLOCK}, but the layer {inputs.whole}")
    experts = part.source.shape(f"{place.layer}.{stem}_blocks")[0]
    shape = (experts, place.step * outputs.whole, inputs.whole // BLOCK)
    where = (
        slice(place.expert, place.expert + 1),
        slice(place.step * outputs.start, place.step * (outputs.start + outputs.size)),
        slice(inputs.start // BLOCK, -(-(inputs.start + inputs.size) // BLOCK)),
    )
    octets = own.tensor(f"{stem}_blocks", (*shape, BLOCK // 2), (torch.uint8,), where)[0]
    scales = own.tensor(f"{stem}_scales", shape, (torch.uint8,), where)[0]
    if bool((scales > LARGEST_SCALE).any()):
        raise own.error(
            f"{stem}_scales",
            f"has the scale {int(scales.max())}: want at most {LARGEST_SCALE}, 255 is no number "
            "and others are too large for float32: is the file damaged?",
        )
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1), scales


def _share(part: Part, codes: torch.Tensor, scales: torch.Tensor) -> MXFP4Weight:
    """Return the rank's inputs of whole blocks, as smaller blocks if it has a part of one."""
    share = part.inputs
    size = math.gcd(BLOCK, share.start, share.size, share.room)
    first = share.start // BLOCK
    starts = torch.arange(share.start, share.start + share.size, size, device=codes.device)
    more = (share.room - share.size) // size
    begin = share.start - first * BLOCK
    codes = F.pad(codes[:, begin : begin + share.size], (0, share.room - share.size))
    return MXFP4Weight.of(codes, F.pad(scales[:, starts // BLOCK - first], (0, more)))
