"""Integers of 4 or 8 bits in words of 32, as compressed-tensors packs them."""

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
    stored_bits,
)
from kiln.engine.models.packed_modules import unpacked
from kiln.engine.models.scheme import Part, Scheme


@dataclass(frozen=True, slots=True)
class PackedInts(Scheme):
    """``weight_packed``: codes in words along the inputs, the first in the lowest bits.

    ``weight_shape`` holds the numbers of outputs and inputs. ``weight_scale`` has a scale for each
    ``group_size`` inputs of an output, with 0 for all of its inputs. ``weight_zero_point``, unless
    ``symmetric``, has zero points in words along the outputs; in old files they are int8. With
    ``in_any_order``, ``weight_g_idx`` has the group of each input. ``keeps_order``: groups in their
    order are kept as if in another, so that all experts of a layer have the same form.
    """

    bits: int
    group_size: int
    symmetric: bool
    in_any_order: bool = False
    keeps_order: bool = False
    rounds = False  # activations

    @property
    def suffixes(self) -> frozenset[str]:
        """The suffixes of a module's tensors."""
        zeros = () if self.symmetric else ("weight_zero_point",)
        order = ("weight_g_idx",) if self.in_any_order else ()
        return frozenset(("weight_packed", "weight_shape", "weight_scale", *zeros, *order))

    @property
    def bits_per_weight(self) -> float:
        """The bits of a code, and its part of those of its group."""
        return stored_bits(self.bits, self.group_size, asymmetric=not self.symmetric)

    @property
    def few_rows(self) -> tuple[str, ...]:  # type: ignore[override]
        """The variant of skinny_gemm, if there is one for such groups."""
        symmetric = self.symmetric and not self.in_any_order
        return few_rows_of(self.bits, self.group_size, symmetric=symmetric)

    @property
    def shares_fields(self) -> bool:  # type: ignore[override]
        """Whether there is an order of inputs, which belongs to all outputs of a part."""
        return self.in_any_order

    def read(self, part: Part) -> Weight:
        """Return the rank's share of a module."""
        rows, inputs = part.outputs.whole, part.inputs.whole
        self._check_shape(part)
        groups = self._num_groups(part)
        size = (rows, self._num_words(inputs))
        words = part.tensor("weight_packed", size, (torch.int32,), (part.outputs.place,))
        scales = part.scales("weight_scale", (rows, groups), (part.outputs.place,))
        codes = unpacked(words, self.bits)[:, :inputs]
        zeros = None if self.symmetric else self._zeros(part, groups)
        order = self._order(part, groups) if self.in_any_order else None
        return group_weight(part, self.bits, codes, scales, zeros, order)

    def quantized(self, values: torch.Tensor) -> Weight:
        """Return weights as this scheme would store them, in groups of neighbours."""
        return quantized_by_group(
            values,
            self.bits,
            self.group_size,
            asymmetric=not self.symmetric,
            gives_order=self.in_any_order,
        )

    def experts(self, parts: Sequence[Part], count: int) -> Weight:
        """Return ``count`` experts of equally many parts. Raises ValueError if experts differ."""
        return Scheme.experts(replace(self, keeps_order=True), parts, count)

    def _check_shape(self, part: Part) -> None:
        stored = part.tensor("weight_shape", (2,), (torch.int64, torch.int32)).tolist()
        wanted = [part.outputs.whole, part.inputs.whole]
        if stored != wanted:
            raise part.error("weight_shape", f"holds {stored}, but config.json implies {wanted}")

    def _num_groups(self, part: Part) -> int:
        inputs = part.inputs.whole
        groups, left = divmod(inputs, self.group_size or inputs)
        if left:
            raise part.error(
                "weight_packed",
                f"has {inputs} inputs, not a multiple of group_size {self.group_size} in "
                "quantization_config",
            )
        return groups

    def _num_words(self, count: int) -> int:
        return -(-count * self.bits // 32)

    def _zeros(self, part: Part, groups: int) -> torch.Tensor:
        """Return the zero points of codes that count from 0, [out, groups] int16."""
        name, half = "weight_zero_point", 2 ** (self.bits - 1)
        rows, place = part.outputs.whole, part.outputs.place
        if part.source.dtype(f"{part.name}.{name}") == torch.int8:  # before version 0.10
            signed = part.tensor(name, (rows, groups), (torch.int8,), (place,)).short()
            wrong = signed[(signed < -half) | (signed >= half)]
            if len(wrong):
                raise part.error(name, f"holds {int(wrong[0])}: want {-half} to {half - 1}")
            return signed.add_(half)
        words = part.tensor(name, (self._num_words(rows), groups), (torch.int32,))
        return unpacked(words.T, self.bits).T[place].short().contiguous()

    def _order(self, part: Part, groups: int) -> torch.Tensor | None:
        """Return the group of each input, [in] int32; None if they are in their order."""
        name, inputs = "weight_g_idx", part.inputs.whole
        order = part.tensor(name, (inputs,), (torch.int32, torch.int64)).int()
        size = inputs // groups
        check_order(part, name, order, size)
        return None if in_order(order, size) and not self.keeps_order else order
