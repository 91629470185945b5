"""Sliding windows of the families that may have them."""

from __future__ import annotations

from kiln.engine.models.fields import Fields

_DEFAULT = 4096  # what transformers takes where config.json is silent; null means no window


def switched_windows(fields: Fields) -> tuple[int | None, ...]:
    """Return a window a layer, off unless ``use_sliding_window`` is true: Qwen's rule.

    The layers that ``layer_types`` names slide, or those from ``max_window_layers`` on. Raises
    ModelError.
    """
    if not fields.flag("use_sliding_window", False):
        return ()  # and sliding_window may be anything: transformers writes 0
    window = _window(fields)
    if window is None:
        return ()
    num_layers = fields.count("num_hidden_layers")
    if "layer_types" not in fields:
        first = fields.count("max_window_layers", 28, least=0)  # transformers' default
        return tuple(window if layer >= first else None for layer in range(num_layers))
    kinds = {"full_attention": None, "sliding_attention": window}
    types = fields.texts("layer_types")
    if len(types) != num_layers or not set(types) <= set(kinds):
        raise fields.error("layer_types", f"want {' or '.join(kinds)} for each layer")
    return tuple(kinds[kind] for kind in types)


def constant_windows(fields: Fields) -> tuple[int | None, ...]:
    """Return ``sliding_window`` for every layer: Mistral's rule. Raises ModelError."""
    if "layer_types" in fields:
        raise fields.error("layer_types", "Kiln serves this family with one window for all layers")
    return (_window(fields),) * fields.count("num_hidden_layers")


def _window(fields: Fields) -> int | None:
    if not fields.mentions("sliding_window"):
        return _DEFAULT
    return fields.optional_count("sliding_window")
