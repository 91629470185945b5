"""What config.json says of each layer's attention: windows, chunks, and whether it rotates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType

from kiln.engine.kv.shape import Window
from kiln.engine.models.fields import Fields

Windows = tuple[Window | None, ...]  # one per layer; empty: no windows
SLIDING, FULL, CHUNKED = "sliding_attention", "full_attention", "chunked_attention"
_OLDER = MappingProxyType({"attention": FULL, "mamba": "linear_attention"})  # by transformers 5


def switched_windows(fields: Fields, slides: Callable[[int, int], bool]) -> Windows:
    """Return the window of each layer; no windows unless ``use_sliding_window`` is true.

    ``layer_types`` says which layers have a window. Without it,
    ``slides(layer, max_window_layers)`` does. Raises ModelError.
    """
    if not fields.flag("use_sliding_window"):
        return ()  # sliding_window is ignored: transformers writes 0
    window = _sliding_window(fields)
    if "layer_types" in fields:
        return tuple(window if kind == SLIDING else None for kind in _kinds(fields))
    bound = fields.count("max_window_layers", least=0)
    layers = range(fields.count("num_hidden_layers"))
    return tuple(window if slides(layer, bound) else None for layer in layers)


def layer_kinds(fields: Fields, default: Callable[[int], str], *kinds: str) -> list[str]:
    """Return the kind of each layer's attention: ``layer_types``, or ``default`` of its index.

    ``kinds`` are those that the family has. Raises ModelError.
    """
    layers = range(fields.count("num_hidden_layers"))
    found = _kinds(fields) or [default(layer) for layer in layers]
    if len(found) != len(layers) or not {*found} <= {*kinds}:
        raise fields.error(
            "layer_types", f"want one of {', '.join(kinds)} for each of {len(layers)} layers"
        )
    return found


def _kinds(fields: Fields) -> list[str]:
    return [_OLDER.get(kind, kind) for kind in fields.texts("layer_types")]


def sliding_windows(fields: Fields, kinds: Sequence[str]) -> Windows:
    """Return ``sliding_window`` for the layers whose kind is ``sliding_attention``.

    Raises ModelError if there are such layers, but no window.
    """
    window = _sliding_window(fields)
    if window is None and SLIDING in kinds:
        raise fields.error("sliding_window", f"but layers are {SLIDING}: want their window")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def constant_windows(fields: Fields) -> Windows:
    """Return ``sliding_window`` for every layer, as in Mistral. Raises ModelError."""
    return (_sliding_window(fields),) * fields.count("num_hidden_layers")


def _sliding_window(fields: Fields) -> Window | None:
    size = fields.optional_count("sliding_window")
    return None if size is None else Window(size)


def chunks(fields: Fields, kinds: Sequence[str]) -> Windows:
    """Return ``attention_chunk_size`` for the layers whose kind is ``chunked_attention``.

    Raises ModelError if there are such layers, but no size.
    """
    size = fields.optional_count("attention_chunk_size")
    if size is None and CHUNKED in kinds:
        raise fields.error("attention_chunk_size", f"but layers are {CHUNKED}: want their chunk")
    window = None if size is None else Window(size, chunked=True)
    return tuple(window if kind == CHUNKED else None for kind in kinds)


def rotating_layers(fields: Fields) -> list[bool]:
    """Return which layers rotate: in ``no_rope_layers`` a 1 says that a layer does.

    Without a list, every layer does but each ``no_rope_layer_interval``-th. Raises ModelError.
    """
    layers = fields.count("num_hidden_layers")
    listed = fields.counts("no_rope_layers")
    if not listed:
        every = fields.count("no_rope_layer_interval")
        return [(layer + 1) % every != 0 for layer in range(layers)]
    if len(listed) < layers or not {*listed} <= {0, 1}:
        raise fields.error("no_rope_layers", f"want 0 or 1 for each of {layers} layers")
    return [one == 1 for one in listed[:layers]]


def _kind(window: Window | None) -> str:
    if window is None:
        return FULL
    return CHUNKED if window.chunked else SLIDING


def check_layer_types(fields: Fields, windows: Windows) -> None:
    """Check that ``layer_types``, if present, agrees with the windows. Raises ModelError."""
    num_layers = fields.count("num_hidden_layers")
    kinds = [_kind(window) for window in windows] or [FULL] * num_layers
    if "layer_types" in fields and (_kinds(fields) != kinds or len(kinds) != num_layers):
        raise fields.error(
            "layer_types",
            f"want {FULL}, {SLIDING} or {CHUNKED} for each of {num_layers} layers, in agreement "
            "with the window fields",
        )
