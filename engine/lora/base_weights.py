"""Copies of base weights in an adapter's file, compared with the weights of the served model.

PEFT saves such copies beside an adapter of the embedding, or if ``save_embedding_layers`` is set.
They differ from the model's if it was resized or trained: the adapter then needs those weights.
"""

from __future__ import annotations

from typing import Any

import torch

from kiln.engine.layers.weight import DenseWeight, Weight
from kiln.engine.lora.sites import Kind, Part, Site
from kiln.engine.models.split import Share

_CHUNK = 2**20  # elements that are compared at once


@torch.inference_mode()
def first_difference(site: Site, part: Part, stored: Any) -> int | None:
    """Return the first row in which a copy differs from the model's weight; None: in none.

    Only what this rank has is compared. ``stored``: a slice of a safetensors file of the shape of
    the whole weight. Numbers are equal if they are so in the dtype of either side, because rounding
    to the dtype of the training or of the server changes nothing that was trained.
    """
    runs, columns, start = part.outputs, part.inputs, part.output_start
    weight = site.weight
    if part.order:
        weight, start = _as_stored(site, part), 0
    if site.kind is Kind.EMBEDDING:
        runs, (columns,) = (part.inputs,), part.outputs
    for run in runs:
        row = _first_of_run(weight, run, columns, start, stored)
        if row is not None:
            return row
        start += run.room
    return None


def _as_stored(site: Site, part: Part) -> Weight:
    """Return a part of a weight with its outputs in the order of the checkpoint."""
    place = slice(part.output_start, part.output_start + part.output_size)
    own = site.weight.dequantized(place, site.weight.dtype)
    values = torch.empty_like(own)
    values[list(part.order)] = own
    return DenseWeight(values)


def _first_of_run(
    weight: Weight, run: Share, columns: Share, start: int, stored: Any
) -> int | None:
    """Do the same for one run of rows, which begin at ``start`` in the weight."""
    end = run.start + run.size
    step = max(1, _CHUNK // columns.whole)
    for first in range(run.start, end, step):
        copy = stored[first : min(first + step, end)][:, columns.place]
        place = slice(start + first - run.start, start + first - run.start + len(copy))
        own = weight.dequantized(place, weight.dtype)[:, : columns.size].to("cpu")
        same = (copy.to(own.dtype) == own) | (own.to(copy.dtype) == copy)
        if not bool(same.all()):
            return first + int((~same).any(dim=1).nonzero()[0])
    return None
