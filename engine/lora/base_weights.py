"""Copies of base weights in an adapter's file, compared with the weights of the served model.

PEFT saves such copies beside an adapter of the embedding, or if ``save_embedding_layers`` is set.
They differ from the model's if it was resized or trained: the adapter then needs those weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kiln.engine.layers.weight import Weight
from kiln.engine.lora.sites import Kind, Part, Site

Places = Callable[[Site, Part], tuple[slice, slice]]  # outputs and inputs
_CHUNK = 2**20  # elements that are compared at once


def whole(site: Site, part: Part) -> tuple[slice, slice]:
    """Return all outputs and inputs of a part, for a process that has the whole model."""
    return slice(None), slice(None)


class BaseWeights:
    """The weights of the layers that were built, on this rank's device.

    ``places`` returns which outputs and inputs of a part of the whole model this rank has.
    """

    def __init__(self, sites: Sequence[Site], places: Places = whole) -> None:
        self._places = places
        self._own: dict[int, tuple[Weight, int]] = {}  # by the row of a part: and its first row
        for site in sites:
            for part in site.parts:
                self._own[part.row] = (site.weight, part.output_start)

    @torch.inference_mode()
    def first_difference(self, site: Site, part: Part, stored: Any) -> int | None:
        """Return the first row in which a copy differs from the model's weight; None: in none.

        ``site``, ``part``: of the whole model. ``stored``: a slice of a safetensors file of the
        weight's shape. Numbers are equal if they are so in the dtype of either side, because
        rounding to the dtype of the training or of the server changes nothing that was trained.
        """
        outputs, inputs = self._places(site, part)
        rows, columns = (inputs, outputs) if site.kind is Kind.EMBEDDING else (outputs, inputs)
        num_rows, num_columns = stored.get_shape()
        begin, end, _ = rows.indices(num_rows)
        weight, start = self._own[part.row]
        step = max(1, _CHUNK // num_columns)
        for first in range(begin, end, step):
            copy = stored[first : min(first + step, end)][:, columns]
            # The rank's layer may have zeros behind its share.
            place = slice(start + first - begin, start + first - begin + len(copy))
            own = weight.dequantized(place, weight.dtype)[:, : copy.shape[1]].to("cpu")
            same = (copy.to(own.dtype) == own) | (own.to(copy.dtype) == copy)
            if not bool(same.all()):
                return first + int((~same).any(dim=1).nonzero()[0])
        return None
