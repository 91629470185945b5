"""GPTQ: integers of 4 or 8 bits with a scale per group of inputs, packed along inputs.

    qweight  int32 [in * bits / 32, out]
    qzeros   int32 [groups, out * bits / 32]: zero - 1 in files of v1, zero in those of v2
    scales   float16 [groups, out]: w = (code - zero) * scale
    g_idx    int32 [in]: the group of each input, in any order with desc_act

Source: AutoGPTQ, GPTQModel
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from kiln.engine.models.calibration_fields import NEUTRAL, has_signed_scales
from kiln.engine.models.fields import Fields
from kiln.engine.models.gptq_scheme import GPTQScheme
from kiln.engine.models.group_schemes import stored_bits
from kiln.engine.models.name_rules import NameRules
from kiln.engine.models.packed_modules import is_packed
from kiln.engine.models.quantization import Format, Quantization, refuse_others
from kiln.engine.models.scheme import DENSE, Scheme
from kiln.engine.models.weights import Weights

_READ = (
    *("quant_method", "method", "bits", "group_size", "desc_act", "sym", "checkpoint_format"),
    *("format", "lm_head", "dynamic", "modules_in_block_to_quantize", "pack_dtype"),
)
_OF_A_RULE = ("bits", "group_size", "desc_act", "sym", "damp_percent", "mse", "static_groups")
_OFFSETS = {"gptq": 1, "gptq_v2": 0}  # what is added to stored zero points


@dataclass(frozen=True)
class GPTQ(Quantization):
    """Every projection has ``stored``, or the scheme of the first rule that matches its name.

    ``listed``: the last parts of the names of quantised modules; None: those without a float
    weight. ``head``: whether the head is quantised.
    """

    stored: GPTQScheme
    rules: NameRules[GPTQScheme | None]
    listed: tuple[str, ...] | None = None
    head: bool = False
    method = "gptq"

    @property
    def bits(self) -> float:  # type: ignore[override]
        """The bits of a weight with its share of a scale and a zero point."""
        own = self.stored
        return stored_bits(own.bits, own.group_size, asymmetric=not own.symmetric)

    @property
    def schemes(self) -> Collection[Scheme]:
        """The schemes of what is quantised."""
        return [self.stored, *filter(None, self.rules.values)]

    def scheme(self, name: str, role: str, source: Weights) -> Scheme:
        """Return the scheme of a module. Raises ModelError if its tensors are of another."""
        names = source.spellings(name)
        found = (self.rules.first(one, source) for one in names)
        (scheme,) = next(filter(None, found), (self.stored,))
        wanted: bool | None = None
        if role == "embed_tokens" or scheme is None:
            wanted = False
        elif role == "lm_head":
            wanted = self.head
        elif self.listed is not None:
            wanted = any(f".{one}".endswith(f".{entry}") for entry in self.listed for one in names)
        return scheme if is_packed(name, role, source, wanted) and scheme is not None else DENSE


def read(fields: Fields) -> GPTQ:
    """Read quantization_config, or quantize_config.json. Raises ModelError."""
    refuse_others(fields, (*_READ, *NEUTRAL))
    for name in ("quant_method", "method"):
        if fields.text(name, "gptq").lower() != "gptq":
            raise fields.error(name, "want 'gptq'")
    if fields.text("pack_dtype", "int32") != "int32":
        raise fields.error("pack_dtype", "Kiln supports only 'int32'")
    name = "modules_in_block_to_quantize"
    return read_gptq(fields, tuple(fields.nested_texts(name)) or None)


def read_gptq(fields: Fields, listed: tuple[str, ...] | None = None) -> GPTQ:
    """Read the fields that say what the tensors mean. Raises ModelError."""
    signed = has_signed_scales(fields)
    default = GPTQScheme(4, 128, True, False, _offset(fields), signed)
    stored = _scheme(fields, default, fields.count("bits"))
    return GPTQ(stored, _rules(fields, stored), listed, fields.flag("lm_head", False))


def _scheme(fields: Fields, default: GPTQScheme, bits: int) -> GPTQScheme:
    """Read a scheme; fields that are absent are those of another."""
    if bits not in (4, 8):
        raise fields.error("bits", "of GPTQ Kiln supports 4 and 8")
    size = fields.count("group_size", default.group_size or -1, -1)
    if size == 0:
        raise fields.error("group_size", "want a number of inputs, or -1 for all of them")
    size = max(size, 0)
    return replace(
        default,
        bits=bits,
        group_size=size,
        symmetric=fields.flag("sym", default.symmetric),
        any_order=fields.flag("desc_act", default.any_order),
    )


def _offset(fields: Fields) -> int:
    """Return what is added to stored zero points, by the version that the fields name."""
    names = [name for name in ("checkpoint_format", "format") if name in fields]
    for name in names:
        if fields.text(name).lower() not in _OFFSETS:
            raise fields.error(name, f"of GPTQ Kiln supports {', '.join(_OFFSETS)}")
    offsets = [_OFFSETS[fields.text(name).lower()] for name in names] or [1]
    if offsets[-1] != offsets[0]:
        raise fields.error("format", f"but checkpoint_format is {fields.text(names[0])!r}")
    return offsets[0]


def _rules(fields: Fields, stored: GPTQScheme) -> NameRules[GPTQScheme | None]:
    """Read ``dynamic``: "-:expression" leaves modules out, others have fields of their own."""
    rules: list[tuple[str, GPTQScheme | None]] = []
    group = fields.group("dynamic")
    for name in [] if group is None else group.names():
        assert group is not None
        own, scheme = group.group(name), None
        if not name.startswith("-:"):
            scheme = stored
            if own is not None:
                refuse_others(own, _OF_A_RULE)
                scheme = _scheme(own, stored, own.count("bits", stored.bits))
        rules.append((name.removeprefix("-:").removeprefix("+:"), scheme))
    try:
        return NameRules(rules, "quantization_config.dynamic")
    except ValueError as error:
        raise fields.error("dynamic", f"which has no regular expression: {error}") from error


FORMAT = Format("gptq", read, "quantize_config.json", read)
