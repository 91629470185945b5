"""The weights of a projection in any form, and their products.

A form is a frozen dataclass of tensors. An operator takes the tensors and the name of the form, and
makes the object again, so that ``torch.compile`` sees one operator whatever the form. What a
checkpoint calls its tensors, and how a form is made of them, is up to the schemes in ``models``.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
import torch.nn.functional as F

from kiln.engine.layers.opaque import opaque_operator

TILE_BYTES = 2**26  # of dequantised weights at once
_TILE_STEP = 128  # outputs
_FORMS: dict[str, type[Weight]] = {}  # by name
Tensors = list[torch.Tensor | None]


class Weight(ABC):
    """Weights [..., out, in], with the experts in front if there are any.

    Every field of a subclass is a tensor or None, and its rows belong to outputs, in their order;
    fields in ``shared`` belong to all outputs. Zeros in every field are weights of zero.
    """

    __slots__ = ()
    shared: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        """Register a form by the name of its class."""
        known = _FORMS.setdefault(cls.__name__, cls)
        if known.__module__ != cls.__module__:
            raise TypeError(f"{known.__module__} and {cls.__module__} declare {cls.__name__}")
        _FORMS[cls.__name__] = cls  # dataclass() makes each class twice

    @property
    def form(self) -> str:
        """The name of the form, for operators."""
        return type(self).__name__

    @property
    def tensors(self) -> Tensors:
        """The fields, for operators."""
        return [getattr(self, field.name) for field in dataclasses.fields(self)]  # type: ignore[arg-type]

    @property
    @abstractmethod
    def out_features(self) -> int:
        """The number of outputs."""

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return next(one for one in self.tensors if one is not None).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that holds the weights: float32 if they are quantised."""
        return torch.float32

    @abstractmethod
    def dequantized(self, outputs: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights of some outputs, [..., num_outputs, in], rounded once to ``dtype``."""

    @abstractmethod
    def describe(self) -> str:
        """Say how the weights are kept and multiplied, in a line for the log."""

    def activations(self, x: torch.Tensor, experts: torch.Tensor | None = None) -> torch.Tensor:
        """Return x [num_rows, in] as the product sees it: rounded, if the form says so.

        ``experts`` [num_rows]: which expert a row is for, if there are several.
        """
        return x

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x @ weight.T + bias, [num_rows, out]; x: [num_rows, in]. Can be traced."""
        out = x.new_empty(len(x), self.out_features)
        linear(x, self.tensors, bias, self.form, out)
        return out

    def product(self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Write x @ weight.T + bias to out [num_rows, out]; x: [num_rows, in]."""
        x = self.activations(x)
        for tile in self._tiles(x):
            torch.mm(x, self.dequantized(tile, x.dtype).T, out=out[:, tile])
        if bias is not None:
            out += bias

    def grouped(
        self, rows: torch.Tensor, ends: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """Return each row times the weights of its expert, [num_rows, out].

        rows: [num_rows, in], sorted by expert; ends [num_experts] int32: where the rows of each
        end; experts [num_rows]: the expert of each. Rows behind the last end may be anything.
        """
        rows = self.activations(rows, experts)
        return torch.cat(
            [
                F.grouped_mm(rows, self.dequantized(tile, rows.dtype).transpose(1, 2), offs=ends)
                for tile in self._tiles(rows)
            ],
            dim=1,
        )

    def _tiles(self, x: torch.Tensor) -> Iterator[slice]:
        """Yield parts of the outputs whose dequantised weights fit in TILE_BYTES."""
        first = next(one for one in self.tensors if one is not None)
        experts = len(first) if first.dim() == 3 else 1
        row = experts * x.shape[1] * x.itemsize
        size = max(1, TILE_BYTES // (row * _TILE_STEP)) * _TILE_STEP
        for start in range(0, self.out_features, size):
            yield slice(start, min(start + size, self.out_features))

    def joins(self, other: Weight) -> bool:
        """Whether the outputs of both can be kept together."""
        if type(self) is not type(other):
            return False
        for field, mine, theirs in zip(
            dataclasses.fields(self),  # type: ignore[arg-type]
            self.tensors,
            other.tensors,
            strict=True,
        ):
            if mine is None or theirs is None:
                if mine is not theirs:
                    return False
            elif field.name in self.shared:
                if mine.shape != theirs.shape or not torch.equal(mine, theirs):
                    return False
            elif mine.dtype != theirs.dtype or mine.shape[1:] != theirs.shape[1:]:
                return False
        return True

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the outputs of all parts behind each other; each joins the next."""
        fields: Tensors = []
        for field, own in zip(
            dataclasses.fields(cls),  # type: ignore[arg-type]
            zip(*(part.tensors for part in parts), strict=True),
            strict=True,
        ):
            some = [one for one in own if one is not None]
            if len(parts) == 1 or field.name in cls.shared or not some:
                fields.append(own[0])
            else:
                fields.append(join_rows(some))
        return cls(*fields)

    def padded(self, num_outputs: int) -> Self:
        """Return the same with zeros behind, for ``num_outputs`` outputs in total."""
        more = num_outputs - self.out_features
        if not more:
            return self
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        zeros = type(self)(
            *(
                one if one is None or field.name in self.shared else _zero_rows(one, more)
                for field, one in zip(fields, self.tensors, strict=True)
            )
        )
        return self.joined([self, zeros])


def join_rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the rows of all tensors behind each other; torch.cat refuses some dtypes."""
    first = tensors[0]
    out = first.new_empty(sum(map(len, tensors)), *first.shape[1:])
    for place, one in zip(out.split(list(map(len, tensors))), tensors, strict=True):
        place.copy_(one)
    return out


def _zero_rows(like: torch.Tensor, count: int) -> torch.Tensor:
    return torch.zeros(count, *like.shape[1:], dtype=like.dtype, device=like.device)


@dataclass(frozen=True, slots=True)
class DenseWeight(Weight):
    """Weights of the model's own dtype. ``values``: [..., out, in]."""

    values: torch.Tensor

    @property
    def out_features(self) -> int:
        """The number of outputs."""
        return self.values.shape[-2]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.values.dtype

    def dequantized(self, outputs: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights of some outputs."""
        return self.values[..., outputs, :].to(dtype)

    def describe(self) -> str:
        """Say which dtype it is."""
        return str(self.values.dtype).removeprefix("torch.")

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x @ weight.T + bias, by what torch.compile knows."""
        return F.linear(x, self.values, bias)

    def product(self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Write x @ weight.T + bias to out."""
        if bias is None:
            torch.mm(x, self.values.T, out=out)
        else:
            torch.addmm(bias, x, self.values.T, out=out)

    def grouped(
        self, rows: torch.Tensor, ends: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """Return each row times the weights of its expert."""
        return F.grouped_mm(rows, self.values.transpose(1, 2), offs=ends)


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
        """Return the weights of some outputs."""
        whole = [part.dequantized(slice(None), dtype) for part in self.parts]
        return torch.cat(whole, dim=-2)[..., outputs, :]

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
        kind = _FORMS[name]
        count = len(dataclasses.fields(kind))  # type: ignore[arg-type]
        parts.append(kind(*tensors[:count]))
        tensors = tensors[count:]
    return parts[0] if len(parts) == 1 else MixedWeight(tuple(parts))


def join(parts: Sequence[Weight]) -> Weight:
    """Return weights behind each other along the outputs; neighbours of one form become one."""
    runs: list[list[Weight]] = []
    for part in parts:
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


def _linear(
    x: torch.Tensor, tensors: Tensors, bias: torch.Tensor | None, form: str, out: torch.Tensor
) -> None:
    """Write to out [num_rows, out]; x: [num_rows, in]; tensors and form are a Weight's."""
    weight_of(form, tensors).product(x, out, bias)


linear = opaque_operator(
    "linear(Tensor x, Tensor?[] tensors, Tensor? bias, str form, Tensor(a!) out) -> ()", _linear
)
