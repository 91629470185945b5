"""The weights of a projection in any form, and their products.

A form is a frozen dataclass of tensors. An operator takes the tensors and the name of the form, and
makes the object again, so that ``torch.compile`` sees one operator whatever the form. What a
checkpoint calls its tensors, and how a form is made of them, is up to the schemes in ``models``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import is_fake

from kiln.engine.layers.few_rows import Epilogue, multiply_experts, multiply_few
from kiln.engine.layers.rounding import Rounded, Rounding
from kiln.jit_kernels.ops.activation.spec import BY_ACTIVATION

DEQUANTISED = "dequantised for each product"  # in what ``describe`` says
TILE_BYTES = 2**27  # of dequantised weights at once
_TILE_STEP = 128  # outputs
FORMS: dict[str, type[Weight]] = {}  # by the name of the class
Tensors = list[torch.Tensor | None]


class Weight(ABC):
    """Weights [..., out, in], with the experts in front if there are any.

    Every field of a subclass is a tensor or None, and its rows belong to outputs, in their order;
    fields in ``shared`` belong to all outputs. Zeros in every field are weights of zero.
    """

    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]] = ()  # the names of the fields, from dataclass()
    shared: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        """Register a form by the name of its class."""
        known = FORMS.setdefault(cls.__name__, cls)
        if known.__module__ != cls.__module__:
            raise TypeError(f"{known.__module__} and {cls.__module__} declare {cls.__name__}")
        FORMS[cls.__name__] = cls  # dataclass() makes each class twice

    @property
    def form(self) -> str:
        """The name of the form, for operators."""
        return type(self).__name__

    @property
    def tensors(self) -> Tensors:
        """The fields, for operators."""
        return [getattr(self, name) for name in self.__match_args__]

    @property
    def is_quantised(self) -> bool:
        """Whether any of the weights are not floats of the model's dtype."""
        return True

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
        torch.ops.kiln.linear.default(x, self.tensors, bias, self.form, out)
        return out

    def product(self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Write x @ weight.T + bias to out [num_rows, out]; x: [num_rows, in]."""
        self.dequantised_product(self.activations(x), out, bias)

    def dequantised_product(
        self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """Do the same with floats; x: as ``activations`` returns it."""
        for tile in self._tiles(x):
            torch.mm(x, self.dequantized(tile, x.dtype).T, out=out[:, tile])
        if bias is not None:
            out += bias

    def multiply_few(self, x: torch.Tensor, to: Epilogue) -> bool:
        """Multiply x [num_rows, in] by skinny_gemm, where it is as fast; or return False."""
        return False

    def gated_product(
        self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, activation: str
    ) -> None:
        """Write act(gate) * up to out [num_rows, out / 2]: of the product's halves."""
        if self.multiply_few(x, Epilogue(out, bias, activation)):
            return
        both = x.new_empty(len(x), self.out_features)
        self.product(x, both, bias)
        BY_ACTIVATION[activation].operator(out, both)

    def rounding(self, inputs: int) -> Rounding | None:
        """Return how the product rounds x [num_rows, inputs], if ``rounded_product`` is there."""
        return None

    def rounded_product(self, x: Rounded, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Do what ``product`` does, for x as ``rounding`` rounds it. Raises TypeError without."""
        raise TypeError(f"{self.form} does not round its inputs")

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
        fields = zip(self.__match_args__, self.tensors, other.tensors, strict=True)
        for name, mine, theirs in fields:
            if mine is None or theirs is None:
                if mine is not theirs:
                    return False
            elif name in self.shared:
                if mine.shape != theirs.shape or not _equal(mine, theirs):
                    return False
            elif mine.dtype != theirs.dtype or mine.shape[1:] != theirs.shape[1:]:
                return False
        return True

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the outputs of all parts behind each other; each joins the next."""
        fields: Tensors = []
        of_parts = zip(*(part.tensors for part in parts), strict=True)
        for name, own in zip(cls.__match_args__, of_parts, strict=True):
            some = [one for one in own if one is not None]
            if len(parts) == 1 or name in cls.shared or not some:
                fields.append(own[0])
            else:
                fields.append(join_rows(some))
        return cls(*fields)

    def padded(self, num_outputs: int) -> Self:
        """Return the same with zeros behind, for ``num_outputs`` outputs in total."""
        more = num_outputs - self.out_features
        if not more:
            return self
        zeros = (
            one if one is None or name in self.shared else _zero_rows(one, more)
            for name, one in zip(self.__match_args__, self.tensors, strict=True)
        )
        return self.joined([self, type(self)(*zeros)])

    def reordered(self, order: Sequence[int]) -> Self:
        """Return the same outputs in another order: ``order[i]`` becomes output i.

        A form whose fields cannot be indexed by outputs overrides this.
        """
        rows = torch.tensor(order, device=self.device)
        fields = (
            one if one is None or name in self.shared else rows_at(one, rows)
            for name, one in zip(self.__match_args__, self.tensors, strict=True)
        )
        return type(self)(*fields)


def join_rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the rows of all tensors behind each other; torch.cat refuses some dtypes."""
    first = tensors[0]
    out = first.new_empty(sum(map(len, tensors)), *first.shape[1:])
    for place, one in zip(out.split(list(map(len, tensors))), tensors, strict=True):
        place.copy_(one)
    return out


def rows_at(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return some rows; torch cannot index some dtypes of 8 bits."""
    return (
        tensor.view(torch.uint8)[rows].view(tensor.dtype) if tensor.itemsize == 1 else tensor[rows]
    )


def _equal(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two tensors are equal; those without values count as such."""
    return mine.is_meta or is_fake(mine) or torch.equal(mine, theirs)


def _zero_rows(like: torch.Tensor, count: int) -> torch.Tensor:
    return torch.zeros(count, *like.shape[1:], dtype=like.dtype, device=like.device)


@dataclass(frozen=True, slots=True)
class DenseWeight(Weight):
    """Weights of the model's own dtype. ``values``: [..., out, in]."""

    values: torch.Tensor

    @property
    def is_quantised(self) -> bool:
        """No."""
        return False

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

    def multiply_few(self, x: torch.Tensor, to: Epilogue) -> bool:
        """Multiply x by skinny_gemm, or return False."""
        return multiply_few(self.form, x, self.values, to)

    def product(self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Write x @ weight.T + bias to out."""
        if self.multiply_few(x, Epilogue(out, bias)):
            return
        if bias is None:
            torch.mm(x, self.values.T, out=out)
        else:
            torch.addmm(bias, x, self.values.T, out=out)

    def grouped(
        self, rows: torch.Tensor, ends: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """Return each row times the weights of its expert."""
        out = multiply_experts(self.form, rows, self.values, (experts, ends), rows.dtype)
        if out is not None:
            return out
        return F.grouped_mm(rows, self.values.transpose(1, 2), offs=ends)
