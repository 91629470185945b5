"""The rotary part of config.json, in the layouts of transformers 4 and 5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from kiln.engine.models.fields import Fields
from kiln.engine.models.windows import FULL
from kiln.jit_kernels.ops.rotary.table import RopeScaling

_DEFAULT_THETA = 10_000.0  # transformers' default
_LENGTHS = ("max_position_embeddings", "max_sequence_length", "max_seq_length", "max_seq_len")
_ORIGINAL = "original_max_position_embeddings"
_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_OWN: dict[str, tuple[str, ...]] = {  # the keys of each rope type
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
    "yarn": (
        *("factor", _ORIGINAL, "beta_fast", "beta_slow"),
        *("attention_factor", "mscale", "mscale_all_dim", "truncate"),
        "finetuned",  # describes how the checkpoint was made
        # Of DeepSeek-R1-0528-Qwen3-8B. transformers does not read it, and neither does Kiln.
        "attn_factor",
    ),
    "longrope": (
        *("factor", _ORIGINAL, "attention_factor"),
        *("short_factor", "long_factor"),
        *("short_mscale", "long_mscale"),  # of Phi-3-small; transformers does not read them
    ),
}
KINDS = MappingProxyType({kind: kind for kind in _OWN})  # by their names in config.json

_ALL = frozenset(name for names in _OWN.values() for name in names)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A rotary embedding, which rotates the first ``dim`` dimensions of each head."""

    dim: int
    theta: float
    scaling: RopeScaling | None
    max_positions: int  # longest context in tokens, scaling included

    @property
    def short_context(self) -> int:
        """The length in tokens from which on a request has other frequencies; 0: none has."""
        scaling = self.scaling
        if scaling is None or scaling.kind != "longrope":
            return 0
        return scaling.original_max_position_embeddings


def ropes_by_kind(
    fields: Fields, head_dim: int, kinds: Sequence[str], thetas: Mapping[str, str]
) -> tuple[RopeConfig, ...]:
    """Return the rope of each layer, where each kind of layer has parameters of its own.

    ``rope_parameters`` holds an object for each kind. Older files have a key for the theta of each,
    by ``thetas``, and ``rope_scaling``, which is that of layers with full attention alone. In these
    families ``max_position_embeddings`` includes the scaling. Raises ModelError.
    """
    reach = fields.count("max_position_embeddings")
    ropes = {
        kind: read_rope(fields, head_dim, layer_type=kind, theta=thetas[kind])
        for kind in dict.fromkeys(kinds)
    }
    return tuple(replace(ropes[kind], max_positions=reach) for kind in kinds)


def read_rope(
    fields: Fields,
    head_dim: int,
    *,
    partial: float | None = None,
    layer_type: str = "",
    theta: str = "rope_theta",
    kinds: Mapping[str, str] = KINDS,
) -> RopeConfig:
    """Read ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (4).

    ``partial``: the default of ``partial_rotary_factor``; None: the family has no such key.
    ``layer_type``: whose parameters to read where each type of layer has its own, and ``theta``
    what their theta is called outside of ``rope_parameters``. ``kinds``: the rope types that the
    family supports, by what config.json calls them. Raises ModelError on an unknown rope type, an
    unknown key, or a malformed field.
    """
    rope, older = fields.group("rope_parameters"), fields.group("rope_scaling")
    if rope is not None and older is not None:
        raise fields.error("rope_scaling", "but rope_parameters is also set: want one of them")
    if layer_type:
        rope = _of_layer_type(rope, layer_type)
        older = older if layer_type == FULL else None
    rope = rope or older
    length = fields.count("max_position_embeddings")  # required
    max_positions = min(fields.count(name) for name in _LENGTHS if name in fields)
    base = fields.number(theta, _DEFAULT_THETA)
    scaling = None
    if rope is not None:
        base = rope.number("rope_theta", base)
        original = None if layer_type else fields.optional_count(_ORIGINAL)
        scaling = _read_scaling(rope, kinds, length, original)
        if layer_type and scaling is not None and scaling.kind == "yarn":
            scaling = replace(scaling, truncate=True)  # transformers does not read it there
    dim = head_dim
    if partial is not None:
        dim = _rotated(fields, rope or fields, head_dim, partial)
    elif scaling is not None:
        _refuse_partial(fields, rope or fields, head_dim, scaling)
    if head_dim % 2:
        raise fields.error("head_dim", f"want an even number of dimensions, not {head_dim}")
    if scaling is not None and scaling.kind == "longrope":
        assert rope is not None
        scaling = _with_lists(scaling, rope, dim, of_layers=bool(layer_type))
    return RopeConfig(dim, base, scaling, _reach(scaling, max_positions))


def _of_layer_type(rope: Fields | None, layer_type: str) -> Fields | None:
    """Return what ``rope_parameters`` says of a type of layer, None if nothing.

    transformers ignores what is not in the object of any type, which Kiln refuses.
    """
    if rope is None:
        return None
    for name in rope.switched_on():
        if name in _COMMON or name in _ALL:
            raise rope.error(name, f"want it in an object for each type of layer, {layer_type}: …")
    return rope.group(layer_type)


def _rotated(fields: Fields, rope: Fields, head_dim: int, default: float) -> int:
    """Return how many dimensions of each head are rotated."""
    place = rope if "partial_rotary_factor" in rope else fields
    dim = int(head_dim * place.number("partial_rotary_factor", default))
    if not 0 < dim <= head_dim or dim % 2:
        raise place.error(
            "partial_rotary_factor",
            f"want one with which an even number of {head_dim} dimensions is rotated, not {dim}",
        )
    return dim


def _refuse_partial(fields: Fields, rope: Fields, head_dim: int, scaling: RopeScaling) -> None:
    """Raise ModelError if only a part of each head would be rotated.

    The models of transformers ignore ``partial_rotary_factor`` without scaling, and fail with it.
    """
    place = rope if "partial_rotary_factor" in rope else fields
    if int(head_dim * place.number("partial_rotary_factor", 1.0)) != head_dim:
        raise place.error(
            "partial_rotary_factor",
            f"Kiln rotates whole heads with rope type {scaling.kind}: want 1",
        )


def _read_scaling(
    rope: Fields, kinds: Mapping[str, str], length: int, original: int | None
) -> RopeScaling | None:
    """Read how frequencies are scaled; ``length``: ``max_position_embeddings``.

    ``original``: the original length at the top of config.json. As in transformers, it counts more
    than the one beside the scaling.
    """
    name = "rope_type" if "rope_type" in rope else "type"
    told = rope.text(name, "default")
    kind = kinds.get(told)
    if kind is None or kinds.get(rope.text("type", told)) != kind:
        raise rope.error(name, f"Kiln supports {', '.join(kinds)}")
    for unknown in set(rope.switched_on()) - {*_COMMON, *_OWN[kind]}:
        raise rope.error(unknown, f"Kiln does not support this key for rope type {kind}")
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", rope.number("factor"))
    original = original or rope.count(_ORIGINAL, length)
    if kind == "longrope":
        if original < 2:
            raise rope.error(_ORIGINAL, f"and {original} counts: want 2 tokens or more")
        return RopeScaling(
            "longrope",
            rope.number("factor", length / original),
            original,
            attention_factor=rope.optional_number("attention_factor"),
        )
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            rope.number("factor"),
            original,
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    return RopeScaling(
        "yarn",
        rope.number("factor", length / original),
        original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )


def _with_lists(scaling: RopeScaling, rope: Fields, dim: int, *, of_layers: bool) -> RopeScaling:
    """Return longrope with its two lists, of a number for each frequency."""
    if of_layers:  # the tokens of a request are rotated by one of two lists in all layers
        raise rope.error("rope_type", "Kiln supports longrope only if all layers have the same")
    lists = []
    for name in ("short_factor", "long_factor"):
        lists.append(tuple(rope.numbers(name)))
        if len(lists[-1]) != dim // 2:
            raise rope.error(
                name, f"want {dim // 2} numbers, one for each two of {dim} rotated dimensions"
            )
    return replace(scaling, short_factor=lists[0], long_factor=lists[1])


def _reach(scaling: RopeScaling | None, max_positions: int) -> int:
    """Return the longest context, by vLLM's rule for ``max_model_len``.

    ``max_position_embeddings`` includes the scaling for llama3 and longrope, but not for linear.
    For yarn both exist, so the original length is used.
    """
    if scaling is None or scaling.kind in ("llama3", "longrope"):
        return max_positions
    original = scaling.original_max_position_embeddings or max_positions
    return int(original * scaling.factor)
