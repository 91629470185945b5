"""How GPTQ stores a module: codes packed along inputs, zero points along outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kiln.engine.layers.weight import Weight
from kiln.engine.models.group_schemes import (
    check_order,
    few_rows_of,
    group_weight,
    in_order,
    quantized_by_group,
)
from kiln.engine.models.packed_modules import unpacked, words_of_outputs
from kiln.engine.models.scheme import FLOATS, Part, Scheme


@dataclass(frozen=True, slots=True)
class GPTQScheme(Scheme):
    """Integers of ``bits`` with a scale and a zero point for each group.

    ``group_size``: of inputs; 0: all of them. ``symmetric``: all zero points are half of the
    number of codes. ``any_order``: g_idx may give the groups in any order. ``offset`` is added to
    stored zero points. ``signed``: scales may be below 0. ``keeps_order``: groups in their order
    are kept as if in another, so that all experts of a layer have the same form.
    """

    bits: int
    group_size: int
    symmetric: bool
    any_order: bool
    offset: int
    signed: bool = False
    keeps_order: bool = False

    @property
    def few_rows(self) -> tuple[str, ...]:  # type: ignore[override]
        """The variant of skinny_gemm, if there is one for such groups."""
        symmetric = self.symmetric and not self.shares_fields
        return few_rows_of(self.bits, self.group_size, symmetric=symmetric)

    @property
    def shares_fields(self) -> bool:  # type: ignore[override]
        """Whether there is an order of inputs, which belongs to all outputs."""
        return self.any_order and self.group_size > 0

    @property
    def _per_word(self) -> int:
        return 32 // self.bits

    def read(self, part: Part) -> Weight:
        """Return the rank's share of a module."""
        inputs, outputs, per_word = part.inputs.whole, part.outputs.whole, self._per_word
        if inputs % per_word:
            raise part.error("qweight", f"has {per_word} inputs in a word, but the layer {inputs}")
        size = self.group_size or inputs
        groups = -(-inputs // size)
        place = (slice(inputs // per_word), part.outputs.place)
        words = part.tensor("qweight", (inputs // per_word, outputs), (torch.int32,), place)
        place = (slice(groups), part.outputs.place)
        scales = part.scales("scales", (groups, outputs), place, signed=self.signed)
        zeros = self._zeros(part, groups)
        group_of = self._group_of(part, size)
        _check_no_bias(part)
        codes = unpacked(words.T, self.bits)
        return group_weight(part, self.bits, codes, scales.T, zeros, group_of, size)

    def experts(self, parts: Sequence[Part], count: int) -> Weight:
        """Return ``count`` experts of equally many parts. Raises ValueError if experts differ."""
        return Scheme.experts(replace(self, keeps_order=True), parts, count)

    def quantized(self, values: torch.Tensor) -> Weight:
        """Return weights as this scheme would store them."""
        return quantized_by_group(
            values,
            self.bits,
            self.group_size,
            asymmetric=not self.symmetric,
            gives_order=self.shares_fields,
        )

    def _zeros(self, part: Part, groups: int) -> torch.Tensor | None:
        """Return the zero points [outputs, groups]; None if they are half of the codes' number.

        Files of symmetric weights may name the wrong version, so their words tell the zero points.
        """
        words, own = words_of_outputs(part, "qzeros", groups, self._per_word)
        if not self.symmetric:
            stored = unpacked(words, self.bits)[:, own].T
            return stored.to(torch.int16) + self.offset
        half = 2 ** (self.bits - 1)
        wanted = [_word_of(half - 1, self.bits), _word_of(half, self.bits)]
        if not any(bool((words == one).all()) for one in wanted):
            first = wanted[0] if bool((words.flatten()[:1] == wanted[0]).all()) else wanted[1]
            other = int(words[words != first][0]) & 0xFFFFFFFF
            told = " or only ".join(f"{one & 0xFFFFFFFF:#010x}" for one in wanted)
            raise part.error(
                "qzeros",
                f"has the word {other:#010x}, but quantization_config says sym, whose zero points "
                f"are only {told}: is sym wrong, or the file damaged?",
            )
        return None

    def _group_of(self, part: Part, size: int) -> torch.Tensor | None:
        """Return the group of each input, [in] int32; None if they are in their order."""
        inputs = part.inputs.whole
        if not self.shares_fields and not part.has("g_idx"):
            return None
        group_of = part.tensor("g_idx", (inputs,), (torch.int32,))
        if in_order(group_of, size):
            return group_of if self.shares_fields and self.keeps_order else None
        if not self.any_order:
            raise part.error(
                "g_idx", "has groups in another order, but quantization_config has no desc_act"
            )
        check_order(part, "g_idx", group_of, size)
        return group_of


def _word_of(zero: int, bits: int) -> int:
    """Return the int32 that holds the same zero point for each of its outputs."""
    word = sum(zero << shift for shift in range(0, 32, bits))
    return word - 2**32 if word >= 2**31 else word


def _check_no_bias(part: Part) -> None:
    """Accept a bias of zeros for a layer without one, as old files have it. Raises ModelError."""
    if part.bias or not part.has("bias"):
        return
    bias = part.tensor("bias", (part.outputs.whole,), FLOATS)
    if bool(bias.any()):
        raise part.error("bias", "is not of zeros, but the layer has no bias by config.json")
