"""Modules whose codes are packed in words of 32 bits, under ``qweight``, as of AWQ and GPTQ."""

from __future__ import annotations

import torch

from kiln.engine.errors import ModelError
from kiln.engine.models.scheme import Part
from kiln.engine.models.weights import Weights

GATES = ("router", "shared_expert_gate")  # roles that quantisers leave out without saying so


def is_packed(name: str, role: str, source: Weights, wanted: bool | None) -> bool:
    """Whether a module is quantised.

    ``wanted``: what quantization_config says; None: nothing, so that its tensors decide. Raises
    ModelError if they are not as wanted.
    """
    if source.random:
        return role not in (*GATES, "lm_head") if wanted is None else wanted
    floats, codes = source.has(f"{name}.weight"), source.has(f"{name}.qweight")
    if wanted is None:
        return not floats
    if wanted and floats and not codes:
        raise ModelError(
            f"{name}: quantization_config says that it is quantised, but the checkpoint has tensor "
            f"{name}.weight and no {name}.qweight"
        )
    if not wanted and codes and not floats:
        raise ModelError(
            f"{name}: quantization_config says that it is not quantised, but the checkpoint has "
            f"tensor {name}.qweight and no {name}.weight"
        )
    return wanted


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes [..., n * 32 / bits] uint8 in words [..., n] int32, from the low bits on.

    ``bits`` is 4 or 8.
    """
    shape = (*words.shape[:-1], 4 * words.shape[-1])
    octets = words.flatten().view(torch.uint8)  # the lowest first, on every machine of torch's
    octets = octets.view(shape)  # a single word of a row may have any stride, so not at once
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


def words_of_outputs(
    part: Part, suffix: str, rows: int, per_word: int
) -> tuple[torch.Tensor, slice]:
    """Return the words [rows, n] that hold the rank's outputs, and which of theirs are the rank's.

    The tensor is [rows, outputs / ``per_word``] int32. Raises ModelError.
    """
    share = part.outputs
    if share.whole % per_word:
        raise part.error(
            suffix, f"has {per_word} outputs in a word, which do not divide the {share.whole} of it"
        )
    first, last = share.start // per_word, -(-(share.start + share.size) // per_word)
    place = (slice(rows), slice(first, last))
    words = part.tensor(suffix, (rows, share.whole // per_word), (torch.int32,), place)
    begin = share.start - first * per_word
    return words, slice(begin, begin + share.size)
