"""How compressed-tensors describes codes, of weights or of activations: QuantizationArgs.

Source: compressed-tensors' quantization/quant_args.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kiln.engine.layers.block_weight import BLOCK
from kiln.engine.models.fields import Fields
from kiln.engine.models.quantization import refuse_others

_FIELDS = (
    *("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic"),
    # Without effect on a checkpoint: dtypes are those of its tensors, observers made the scales.
    *("actorder", "scale_dtype", "zp_dtype", "observer", "observer_kwargs"),
)
_STRATEGIES = ("tensor", "channel", "group", "block", "token")
_IN_ORDER, _IN_ANY_ORDER = (None, False, "weight", "static"), (True, "group", "dynamic")


@dataclass(frozen=True, slots=True)
class Args:
    """Codes of ``bits`` and a ``kind``, "int" or "float", and what a scale belongs to.

    ``strategy``: "tensor", "channel" (an output), "group" (``group_size`` inputs), "block" (128 x
    128) or "token". ``in_any_order``: the inputs of a group need not be neighbours.
    """

    bits: int
    kind: str
    symmetric: bool
    strategy: str
    group_size: int
    dynamic: bool
    in_any_order: bool


def read_args(fields: Fields) -> Args:
    """Read the description of codes. Raises ModelError by name for what Kiln does not support."""
    refuse_others(fields, _FIELDS)
    kind = fields.text("type", "int")
    if kind not in ("int", "float"):
        raise fields.error("type", "want 'int' or 'float'")
    size = _group_size(fields)
    strategy = fields.text("strategy", "tensor" if size is None else "group" if size else "channel")
    if strategy not in _STRATEGIES:
        raise fields.error("strategy", f"Kiln supports {', '.join(_STRATEGIES)}")
    if bool(size) != (strategy == "group"):
        raise fields.error("group_size", f"which does not go with the strategy {strategy!r}")
    _check_block(fields, strategy)
    order = _lower(fields.value("actorder"))
    if order not in (*_IN_ORDER, *_IN_ANY_ORDER):
        raise fields.error("actorder", "want null, 'weight', 'static', 'group' or 'dynamic'")
    in_any_order = order in _IN_ANY_ORDER
    if in_any_order and strategy != "group":
        raise fields.error("actorder", f"which does not go with the strategy {strategy!r}")
    return Args(
        bits=fields.count("num_bits", 8),
        kind=kind,
        symmetric=fields.flag("symmetric", True),
        strategy=strategy,
        group_size=size or 0,
        dynamic=fields.flag("dynamic", False),
        in_any_order=in_any_order,
    )


def check_kv_cache(fields: Fields, name: str = "kv_cache_scheme") -> None:
    """Raise ModelError unless a scheme of keys and values is absent, or fp8 with static scales."""
    own = fields.group(name)
    if own is None:
        return
    args = read_args(own)
    supported: dict[str, Any] = {
        "num_bits": (args.bits, 8),
        "type": (args.kind, "float"),
        "strategy": (args.strategy, "tensor"),
        "dynamic": (args.dynamic, False),
        "symmetric": (args.symmetric, True),
    }
    for field, (found, wanted) in supported.items():
        if found != wanted:
            raise own.error(field, f"for keys and values Kiln supports only {wanted!r}")


def _group_size(fields: Fields) -> int | None:
    """Return the inputs of a group; 0: those of an output; None: not given."""
    value = fields.value("group_size")
    if value is None:
        return None
    if type(value) is not int or (value != -1 and value < 1):
        raise fields.error("group_size", "want an integer of 1 or more, or -1")
    return max(value, 0)


def _check_block(fields: Fields, strategy: str) -> None:
    """Raise ModelError unless blocks are of 128 x 128, written as a list or a text."""
    value = fields.value("block_structure")
    if strategy != "block" and value is None:
        return
    if strategy != "block" or value not in ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"):
        raise fields.error(
            "block_structure", f"Kiln supports [{BLOCK}, {BLOCK}], with the strategy 'block'"
        )


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value
