"""The names of the tensors in a PEFT adapter: the module, and what of it a tensor is."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path

from kiln.engine.errors import ModelError

_PREFIX = "base_model.model."
_EXPERTS = ".experts."


class Role(Enum):
    """What of a module a tensor is; the value is the end of its name."""

    A = ".lora_A.weight"
    B = ".lora_B.weight"
    EMBEDDING_A = ".lora_embedding_A"
    EMBEDDING_B = ".lora_embedding_B"
    BASE_WEIGHT = ".base_layer.weight"  # a copy of the base model's, saved beside embeddings
    BASE_BIAS = ".base_layer.bias"


_WEIGHT = "a whole trained weight (modules_to_save)"
_BIAS = "a trained bias (bias, modules_to_save)"
_UNKNOWN = "PEFT's save_pretrained writes no such name"
# The ends of names whose keys of adapter_config.json are refused too.
_REFUSED = {
    ".lora_B.bias": "a bias of LoRA B (lora_bias)",
    ".lora_magnitude_vector": "DoRA (use_dora)",
    ".lora_magnitude_vector.weight": "DoRA (use_dora)",
    ".trainable_tokens_delta": "trained tokens (trainable_token_indices)",
    ".weight": _WEIGHT,
    ".bias": _BIAS,
}


def split_name(name: str, refused: Mapping[str, str], path: Path) -> tuple[str, Role]:
    """Return the checkpoint's name of a tensor's module, and the tensor's role.

    ``refused``: modules that take no adapter. Raises ModelError for a tensor that Kiln cannot use.
    """
    if not name.startswith(_PREFIX):
        raise ModelError(f"{path}: tensor {name[:120]}: want a name that begins with {_PREFIX}")
    whole = name.removeprefix(_PREFIX)
    role = next((role for role in Role if whole.endswith(role.value)), None)
    if role is None:
        why = next((why for end, why in _REFUSED.items() if whole.endswith(end)), _UNKNOWN)
        if ".lora_" in whole and why in (_WEIGHT, _BIAS):
            why = _UNKNOWN
        raise ModelError(f"{path}: tensor {name[:120]} is not supported: {why}")
    module = whole.removesuffix(role.value)
    what = "experts" if _EXPERTS in f"{module}." else refused.get(module)
    if what is not None:
        raise ModelError(f"{path}: tensor {name[:120]} is not supported: it adapts {what}")
    return module, role
