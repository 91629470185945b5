"""The scales that a checkpoint has for a KV pool of 8-bit floats: code * scale is the number.

    self_attn.k_scale, self_attn.v_scale                    compressed-tensors
    self_attn.k_proj.k_scale, self_attn.v_proj.v_scale      ModelOpt
    self_attn.k_proj.output_scale, ...v_proj.output_scale   AutoFP8
    self_attn.kv_scale                                      the same for keys and values

Each is a float [1] or []. Beside them may be scales of queries and of attention's weights, which
only arithmetic in 8-bit floats needs: Kiln attends in 16 bits or more.
"""

from __future__ import annotations

import math

import torch

from kiln.engine.errors import ModelError
from kiln.engine.models.scheme import FLOATS
from kiln.engine.models.weights import Weights

_SPELLINGS = (  # of keys, of values
    ("k_scale", "v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("kv_scale", "kv_scale"),
)
_UNUSED = ("q_scale", "q_proj.q_scale", "prob_scale")


def read_kv_scales(
    weights: Weights, prefix: str, kv_dtype: torch.dtype | None
) -> tuple[float, float]:
    """Return the scales of a layer's keys and values in a pool of ``kv_dtype``.

    ``prefix``: of the layer's names, such as "model.layers.3.self_attn.". Both are 1.0 if the
    checkpoint has none, and in a pool of other floats, which needs none: nothing is read then.
    Raises ModelError if a scale is no finite number above 0, or there is one for each head.
    """
    pairs = [(prefix + key, prefix + value) for key, value in _SPELLINGS]
    for name in (*(name for pair in pairs for name in pair), *(prefix + one for one in _UNUSED)):
        weights.ignore(name)
    if kv_dtype != torch.float8_e4m3fn:
        return 1.0, 1.0
    stored = [pair for pair in pairs if any(weights.has(name) for name in pair)]
    found = [(_read(weights, key), _read(weights, value)) for key, value in stored]
    for names, scales in zip(stored[1:], found[1:], strict=True):
        if scales != found[0]:
            raise ModelError(
                f"tensors {stored[0][0]} and {stored[0][1]} are {found[0]}, but {names[0]} and "
                f"{names[1]} are {scales}: which scales has the KV pool? Remove the wrong ones, or "
                "serve with --kv-cache-dtype auto, which needs none"
            )
    return found[0] if found else (1.0, 1.0)


def _read(weights: Weights, name: str) -> float:
    """Return a scale, as float32 holds it. Raises ModelError."""
    dtype, shape = weights.dtype(name), weights.shape(name)
    if dtype not in FLOATS or shape not in ((), (1,)):
        found = f"{str(dtype).removeprefix('torch.')} {list(shape)}"
        raise _error(
            weights.stored_name(name), found, "Kiln has one float for all heads of a layer"
        )
    stored = torch.empty(shape, dtype=torch.float64)
    weights.fill(name, stored, shape)
    scale = stored.float().item()
    if not 0 < scale < math.inf:
        raise _error(weights.stored_name(name), str(stored.item()), "want a finite number above 0")
    return scale


def _error(name: str, found: str, problem: str) -> ModelError:
    return ModelError(
        f"tensor {name}, a scale of the KV pool, is {found}: {problem}. With --kv-cache-dtype auto "
        "the pool needs none"
    )
