"""AWQ, as AutoAWQ writes it ("gemm"): integers of 4 bits with zero points, packed along outputs.

    qweight  int32 [in, out / 8]: 8 outputs in a word, in the order 0 2 4 6 1 3 5 7
    qzeros   int32 [groups, out / 8]: zero points in the same order
    scales   float16 [groups, out]: w = (code - zero) * scale

Source: AutoAWQ
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from kiln.engine.layers.weight import Weight
from kiln.engine.models.calibration_fields import NEUTRAL, has_signed_scales
from kiln.engine.models.fields import Fields
from kiln.engine.models.group_schemes import (
    few_rows_of,
    group_weight,
    quantized_by_group,
    stored_bits,
)
from kiln.engine.models.packed_modules import GATES, is_packed, unpacked, words_of_outputs
from kiln.engine.models.quantization import Format, Quantization, refuse_others
from kiln.engine.models.scheme import DENSE, Part, Scheme
from kiln.engine.models.weights import Weights

_READ = (
    *("quant_method", "bits", "w_bit", "group_size", "q_group_size", "zero_point", "version"),
    *("modules_to_not_convert", "format", "checkpoint_format", "pack_dtype"),
)
_BITS, _PER_WORD = 4, 8
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of the outputs of a word in it


@dataclass(frozen=True, slots=True)
class AWQScheme(Scheme):
    """Integers of 4 bits. ``group_size``: of inputs; 0: all of them.

    ``signed``: scales may be below 0.
    """

    group_size: int
    signed: bool = False

    @property
    def few_rows(self) -> tuple[str, ...]:  # type: ignore[override]
        """The variant of skinny_gemm, if there is one for such groups."""
        return few_rows_of(_BITS, self.group_size, symmetric=False)

    def read(self, part: Part) -> Weight:
        """Return the rank's share of a module."""
        inputs, outputs = part.inputs.whole, part.outputs.whole
        size = self.group_size or inputs
        if inputs % size:
            raise part.error("qweight", f"has {inputs} inputs, no multiple of group_size {size}")
        groups = inputs // size
        codes = _codes(part, "qweight", inputs)
        zeros = _codes(part, "qzeros", groups).to(torch.int16)
        place = (slice(groups), part.outputs.place)
        scales = part.scales("scales", (groups, outputs), place, signed=self.signed)
        return group_weight(part, _BITS, codes.T, scales.T, zeros.T, group_size=size)

    def quantized(self, values: torch.Tensor) -> Weight:
        """Return weights as this scheme would store them."""
        return quantized_by_group(values, _BITS, self.group_size, asymmetric=True)


def _codes(part: Part, suffix: str, rows: int) -> torch.Tensor:
    """Return the codes [rows, outputs] uint8 of the rank's outputs."""
    words, own = words_of_outputs(part, suffix, rows, _PER_WORD)
    codes = unpacked(words, _BITS).view(rows, -1, _PER_WORD)
    return codes[..., list(_PLACES)].flatten(1)[:, own]


@dataclass(frozen=True)
class AWQ(Quantization):
    """Every projection has ``stored`` but those whose names contain one of ``ignored``.

    A module with a float weight is not quantised either, if ``ignored`` is None. The head is
    never, and routers need not be listed.
    """

    stored: AWQScheme
    ignored: tuple[str, ...] | None
    method = "awq"

    @property
    def bits(self) -> float:  # type: ignore[override]
        """The bits of a weight with its share of a scale and a zero point."""
        return stored_bits(_BITS, self.stored.group_size, asymmetric=True)

    @property
    def schemes(self) -> Collection[Scheme]:
        """The scheme of what is quantised."""
        return (self.stored,)

    def scheme(self, name: str, role: str, source: Weights) -> Scheme:
        """Return the scheme of a module. Raises ModelError if its tensors are of another."""
        wanted: bool | None = None
        names = source.spellings(name)
        listed = any(one in spelled for one in self.ignored or () for spelled in names)
        if role in ("embed_tokens", "lm_head") or listed:
            wanted = False
        elif self.ignored is not None and role not in GATES:
            wanted = True
        return self.stored if is_packed(name, role, source, wanted) else DENSE


def read(fields: Fields) -> AWQ:
    """Read quantization_config, or quant_config.json. Raises ModelError."""
    refuse_others(fields, (*_READ, *NEUTRAL))
    if fields.text("quant_method", "awq") != "awq":
        raise fields.error("quant_method", "want 'awq'")
    name = "modules_to_not_convert"
    return read_awq(fields, tuple(fields.texts(name)) or None)


def read_awq(fields: Fields, ignored: tuple[str, ...] | None = None) -> AWQ:
    """Read the fields that say what the tensors mean. Raises ModelError."""
    for name in ("version", "format", "checkpoint_format"):
        if fields.text(name, "gemm").lower() != "gemm":
            raise fields.error(name, "of AWQ Kiln supports only 'gemm'")
    if fields.text("pack_dtype", "int32") != "int32":
        raise fields.error("pack_dtype", "Kiln supports only 'int32'")
    if not fields.flag("zero_point", True):
        raise fields.error(
            "zero_point", "Kiln supports AWQ only with zero points: load the base model instead"
        )
    bits = _either(fields, "bits", "w_bit", _BITS)
    if bits != _BITS:
        raise fields.error("bits" if "bits" in fields else "w_bit", "AWQ has 4 bits in Kiln")
    size = _either(fields, "group_size", "q_group_size", 128)
    if size == 0:
        raise fields.error("group_size", "want a number of inputs, or -1 for all of them")
    return AWQ(AWQScheme(max(size, 0), has_signed_scales(fields)), ignored)


def _either(fields: Fields, name: str, older: str, default: int) -> int:
    """Return a number that has one of two names. Raises ModelError if both say otherwise."""
    value = fields.count(name, fields.count(older, default, -1), -1)
    if older in fields and fields.count(older, default, -1) != value:
        raise fields.error(name, f"but {older} is {fields.count(older, default, -1)}")
    return value


FORMAT = Format("awq", read, "quant_config.json", read)
