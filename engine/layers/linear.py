"""Linear projections, and torch.ops.kiln.linear for weights that are no plain tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kiln.engine.layers.few_rows import multiplies_few
from kiln.engine.layers.opaque import opaque_operator
from kiln.engine.layers.weight import DenseWeight, Tensors, Weight
from kiln.engine.layers.weight_parts import weight_of


def _linear(
    x: torch.Tensor, tensors: Tensors, bias: torch.Tensor | None, form: str, out: torch.Tensor
) -> None:
    """Write to out [num_rows, out]; x: [num_rows, in]; tensors and form are a Weight's."""
    weight_of(form, tensors).product(x, out, bias)


opaque_operator(
    "linear(Tensor x, Tensor?[] tensors, Tensor? bias, str form, Tensor(a!) out) -> ()", _linear
)


@dataclass(frozen=True, slots=True)
class Linear:
    """x [num_rows, in] -> [num_rows, out], whatever its weights. ``bias``: [out] or None.

    ``is_opaque``: torch.compile sees one operator of Kiln's instead of torch's product. That is
    needed where skinny_gemm may multiply; quantised weights have such an operator in any case.
    """

    weight: Weight
    bias: torch.Tensor | None = None
    is_opaque: bool = False

    @classmethod
    def of(cls, weight: Weight, bias: torch.Tensor | None, dtype: torch.dtype) -> Linear:
        """Return the projection for inputs of a dtype, opaque if skinny_gemm may multiply them."""
        few = isinstance(weight, DenseWeight) and multiplies_few(weight.form, weight.values, dtype)
        return cls(weight, bias, few)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T + bias."""
        if self.is_opaque:
            return Weight.linear(self.weight, x, self.bias)
        return self.weight.linear(x, self.bias)
