"""MXFP4, as gpt-oss has its experts: floats of 4 bits in blocks of 32 with a power of two.

Source: transformers' Mxfp4Config
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase

from kiln.engine.models.fields import Fields
from kiln.engine.models.mxfp4_scheme import StackedMXFP4
from kiln.engine.models.quantization import Format, Quantization, refuse_others
from kiln.engine.models.scheme import DENSE, Scheme
from kiln.engine.models.weights import Weights

_FIELDS = ("quant_method", "modules_to_not_convert", "dequantize")


@dataclass(frozen=True)
class MXFP4(Quantization):
    """Experts are quantised, except in modules that ``ignored`` names with wildcards."""

    ignored: tuple[str, ...]
    method = "mxfp4"
    bits = 4.25

    @property
    def schemes(self) -> Collection[Scheme]:
        """The scheme of what is quantised."""
        return (StackedMXFP4(),)

    def scheme(self, name: str, role: str, source: Weights) -> Scheme:
        """Return the scheme of a module."""
        if role not in ("gate_up_proj", "down_proj") or ".experts." not in name:
            return DENSE
        names = source.spellings(name)
        wildcards = (end for entry in self.ignored for end in (entry, f"{entry}.*"))
        listed = any(fnmatchcase(one, entry) for entry in wildcards for one in names)
        return DENSE if listed else StackedMXFP4()


def read(fields: Fields) -> MXFP4:
    """Read quantization_config. Raises ModelError."""
    refuse_others(fields, _FIELDS)
    return MXFP4(tuple(fields.texts("modules_to_not_convert")))


FORMAT = Format("mxfp4", read)
