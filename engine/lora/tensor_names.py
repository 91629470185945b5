"""The names of the tensors in a PEFT adapter: the module, and what of it a tensor is."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from kiln.engine.errors import ModelError

_PREFIX, _BODY = "base_model.model.", "model."
# How names of tensors begin in a model of texts and images, in several versions of transformers,
# and how the same names begin in the text model alone.
_INSIDE = (
    ("language_model.model.", _BODY),
    ("language_model.lm_head", "lm_head"),
    ("model.language_model.", _BODY),
    ("language_model.", _BODY),
)
_IMAGES = re.compile(r"(?:model\.)?(?:vision|image|multi_modal)\w*\..+")  # the part for images
_EXPERTS = ".experts."


class Role(Enum):
    """What of a module a tensor is; the value is the end of its name in PEFT's own files."""

    A = ".lora_A.weight"
    B = ".lora_B.weight"
    EMBEDDING_A = ".lora_embedding_A"
    EMBEDDING_B = ".lora_embedding_B"
    # Copies of the base model's weight: of a layer that has an adapter, and of another one.
    BASE_WEIGHT = ".base_layer.weight"
    WEIGHT = ".weight"


class TensorName(NamedTuple):
    """A tensor's module in the checkpoint, its role, and the name of its adapter, or "".

    ``trained``: what the module was called in the model that the adapter was trained on, by which
    adapter_config.json names it.
    """

    module: str
    role: Role
    adapter: str
    trained: str

    @property
    def is_of_images(self) -> bool:
        """Whether the module is in a part of the model that no text passes through."""
        return _IMAGES.fullmatch(self.module) is not None


# PEFT's files leave out the adapter's name, which is "default" unless one was given. Files that
# were made of a model's state_dict have it.
_LORA = re.compile(
    r"(?P<module>.+)(?:(?P<pair>\.lora_[AB])(?:\.(?P<of_pair>[^.]+))?\.weight"
    r"|(?P<table>\.lora_embedding_[AB])(?:\.(?P<of_table>(?!(?:weight|bias)$)[^.]+))?)"
)
_WEIGHT = "a whole trained weight (modules_to_save)"
_BIAS = "a trained bias (bias, modules_to_save)"
_UNKNOWN = "PEFT's save_pretrained writes no such name"
# The ends of names whose keys of adapter_config.json are refused too.
_REFUSED = {
    ".lora_B.bias": "a bias of LoRA B (lora_bias)",
    ".lora_magnitude_vector": "DoRA (use_dora)",
    ".lora_magnitude_vector.weight": "DoRA (use_dora)",
    ".trainable_tokens_delta": "trained tokens (trainable_token_indices)",
    ".base_layer.bias": "a copy of a base bias: remove it from the file",
    ".weight": _WEIGHT,
    ".bias": _BIAS,
}


def split_name(
    name: str, parts: Container[str], refused: Mapping[str, str], path: Path
) -> TensorName:
    """Return what a tensor's name says.

    ``parts``: modules that can have an adapter; ``refused``: modules that take none. Raises
    ModelError for a tensor that Kiln cannot use.
    """
    if not name.startswith(_PREFIX):
        raise ModelError(f"{path}: tensor {name[:120]}: want a name that begins with {_PREFIX}")
    whole = name.removeprefix(_PREFIX)
    found = _parsed(whole, parts)
    if found is not None and found.is_of_images:
        return found
    if found is None:
        why = next((why for end, why in _REFUSED.items() if whole.endswith(end)), _UNKNOWN)
        if ".lora_" in whole and why in (_WEIGHT, _BIAS):
            why = _UNKNOWN
        raise ModelError(f"{path}: tensor {name[:120]} is not supported: {why}")
    what = "experts" if _EXPERTS in f"{found.module}." else refused.get(found.module)
    if what is not None:
        raise ModelError(f"{path}: tensor {name[:120]} is not supported: it adapts {what}")
    return found


def _parsed(whole: str, parts: Container[str]) -> TensorName | None:
    lora = _LORA.fullmatch(whole)
    if lora is not None:
        pair, table = lora["pair"], lora["table"]
        role, trained = Role(table or f"{pair}.weight"), lora["module"]
        adapter = lora["of_pair"] or lora["of_table"] or ""
        return TensorName(_in_checkpoint(trained, parts), role, adapter, trained)
    for role in (Role.BASE_WEIGHT, Role.WEIGHT):
        trained = whole.removesuffix(role.value)
        module = _in_checkpoint(trained, parts)
        if trained != whole and (role is Role.BASE_WEIGHT or module in parts):
            return TensorName(module, role, "", trained)
    return None


def _in_checkpoint(trained: str, parts: Container[str]) -> str:
    """Return what a module is called in the text model; its own name if that has no such module.

    An adapter of a model without a head leaves out the name of what is below the head.
    """
    inside = (new + trained.removeprefix(old) for old, new in _INSIDE if trained.startswith(old))
    return next((name for name in (trained, *inside, _BODY + trained) if name in parts), trained)
