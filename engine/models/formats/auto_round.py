"""AutoRound, where it packs modules as AutoGPTQ or AutoAWQ does; its other packings are refused.

Source: AutoRound's export to the formats auto_round:auto_gptq and auto_round:auto_awq
"""

from __future__ import annotations

from kiln.engine.models.calibration_fields import NEUTRAL
from kiln.engine.models.fields import Fields
from kiln.engine.models.formats.awq import AWQ, read_awq
from kiln.engine.models.formats.gptq import GPTQ, read_gptq
from kiln.engine.models.quantization import Format, refuse_others

_READ = (
    *("quant_method", "packing_format", "backend", "bits", "group_size", "sym", "data_type"),
    *("act_bits", "act_data_type", "extra_config", "desc_act", "zero_point", "version"),
)
_OF_FLOATS = ("act_group_size", "act_sym", "act_dynamic")  # of activations that stay floats
_LEAST_FLOAT_BITS = 16


def read(fields: Fields) -> GPTQ | AWQ:
    """Read quantization_config. Raises ModelError."""
    refuse_others(fields, (*_READ, *_OF_FLOATS, *NEUTRAL))
    name = "packing_format" if "packing_format" in fields else "backend"
    packing = fields.text(name, "")
    if fields.text("data_type", "int") != "int":
        raise fields.error("data_type", "of AutoRound Kiln supports only 'int'")
    if fields.count("act_bits", _LEAST_FLOAT_BITS) < _LEAST_FLOAT_BITS:
        raise fields.error("act_bits", "Kiln supports AutoRound only with activations of floats")
    _check_extra(fields)
    if "auto_gptq" in packing:
        return read_gptq(fields)
    if "auto_awq" in packing:
        return read_awq(fields)
    raise fields.error(
        name,
        "of AutoRound Kiln reads only the packings auto_round:auto_gptq and auto_round:auto_awq: "
        "load the unquantised base model instead",
    )


def _check_extra(fields: Fields) -> None:
    """Raise ModelError for modules that have other bits, unless they are floats."""
    extra = fields.group("extra_config")
    for name in [] if extra is None else extra.names():
        assert extra is not None
        own = extra.group(name)
        if own is not None and own.count("bits", 0, 0) < _LEAST_FLOAT_BITS:
            raise extra.error(name, "of AutoRound Kiln supports no modules with other bits")


FORMAT = Format("auto-round", read)
