"""Weights put together: of several forms in one projection, of experts, and from an operator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kiln.engine.layers.weight import FORMS, Tensors, Weight


@dataclass(frozen=True, slots=True)
class MixedWeight(Weight):
    """Outputs in several forms, such as a quantised q and an unquantised k of one projection."""

    parts: tuple[Weight, ...]

    @property
    def form(self) -> str:
        """The names of the forms."""
        return "+".join(part.form for part in self.parts)

    @property
    def tensors(self) -> Tensors:
        """The fields of all parts."""
        return [one for part in self.parts for one in part.tensors]

    @property
    def out_features(self) -> int:
        """The number of outputs of all parts."""
        return sum(part.out_features for part in self.parts)

    def dequantized(self, outputs: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights of some outputs, with zeros behind inputs that a part has more of."""
        start, stop, _ = outputs.indices(self.out_features)
        found: list[torch.Tensor] = []
        for part in self.parts:
            own = slice(max(start, 0), min(stop, part.out_features))
            if own.start < own.stop:
                found.append(part.dequantized(own, dtype))
            start, stop = start - part.out_features, stop - part.out_features
        inputs = max(one.shape[-1] for one in found)
        return torch.cat([F.pad(one, (0, inputs - one.shape[-1])) for one in found], dim=-2)

    def reordered(self, order: Sequence[int]) -> MixedWeight:
        """Return each part in another order. Raises ValueError if outputs change their part."""
        parts, start = list[Weight](), 0
        for part in self.parts:
            own = [one - start for one in order[start : start + part.out_features]]
            if sorted(own) != list(range(part.out_features)):
                raise ValueError("outputs cannot move from one form of weights to another")
            parts.append(part.reordered(own))
            start += part.out_features
        return MixedWeight(tuple(parts))

    def describe(self) -> str:
        """Say what each part is."""
        return " and ".join(dict.fromkeys(part.describe() for part in self.parts))

    def product(self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Write x @ weight.T + bias to out."""
        sizes = [part.out_features for part in self.parts]
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        for part, place, own in zip(self.parts, out.split(sizes, dim=1), biases, strict=True):
            part.product(x, place, own)

    def grouped(
        self, rows: torch.Tensor, ends: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """Return each row times the weights of its expert."""
        return torch.cat([part.grouped(rows, ends, experts) for part in self.parts], dim=1)


def weight_of(form: str, tensors: Tensors) -> Weight:
    """Return the weights of what ``form`` and ``tensors`` gave."""
    parts: list[Weight] = []
    for name in form.split("+"):
        kind = FORMS[name]
        count = len(kind.__match_args__)
        parts.append(kind(*tensors[:count]))
        tensors = tensors[count:]
    return parts[0] if len(parts) == 1 else MixedWeight(tuple(parts))


def join(parts: Sequence[Weight]) -> Weight:
    """Return weights behind each other along the outputs; neighbours of one form become one."""
    runs: list[list[Weight]] = []
    single = [one for part in parts for one in getattr(part, "parts", (part,))]
    for part in single:
        if runs and runs[-1][-1].joins(part):
            runs[-1].append(part)
        else:
            runs.append([part])
    joined = [type(run[0]).joined(run) for run in runs]
    return joined[0] if len(joined) == 1 else MixedWeight(tuple(joined))


def stack(weights: Iterator[Weight], count: int) -> Weight:
    """Return the weights of ``count`` experts as one; takes them one by one, to save memory.

    Raises ValueError if they differ in form or sizes.
    """
    first = next(weights)
    out: Tensors = [
        None if one is None else one.new_empty(count, *one.shape) for one in first.tensors
    ]
    for index in range(count):
        one = first if index == 0 else next(weights)
        if one.form != first.form:
            raise ValueError(f"expert {index} is {one.describe()}, the first {first.describe()}")
        for place, own in zip(out, one.tensors, strict=True):
            if (place is None) != (own is None):
                raise ValueError(f"expert {index} has other tensors than the first")
            if place is not None and own is not None:
                if place.shape[1:] != own.shape or place.dtype != own.dtype:
                    raise ValueError(
                        f"expert {index} has {own.dtype} {list(own.shape)}, the first "
                        f"{place.dtype} {list(place.shape[1:])}"
                    )
                place[index].copy_(own)
    return weight_of(first.form, out)
