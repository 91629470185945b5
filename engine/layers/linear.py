"""Linear projections, and torch.ops.kiln.linear for weights that are no plain tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kiln.engine.layers.few_rows import multiplies_few
from kiln.engine.layers.opaque import opaque_operator
from kiln.engine.layers.rounding import ROUNDED_DTYPE, Rounded, Rounding
from kiln.engine.layers.weight import DenseWeight, Tensors, Weight
from kiln.engine.layers.weight_parts import weight_of
from kiln.jit_kernels.declare.spec import KernelSpec
from kiln.jit_kernels.implementations import may_fuse
from kiln.jit_kernels.ops.linear.spec import GATED


def _linear(
    x: torch.Tensor, tensors: Tensors, bias: torch.Tensor | None, form: str, out: torch.Tensor
) -> None:
    """Write to out [num_rows, out]; x: [num_rows, in]; tensors and form are a Weight's."""
    weight_of(form, tensors).product(x, out, bias)


opaque_operator(
    "linear(Tensor x, Tensor?[] tensors, Tensor? bias, str form, Tensor(a!) out) -> ()", _linear
)


def _rounded_linear(
    codes: torch.Tensor,
    scales: torch.Tensor,
    tensors: Tensors,
    bias: torch.Tensor | None,
    form: str,
    out: torch.Tensor,
) -> None:
    """Write to out [num_rows, out]; codes [num_rows, in] and scales are those of Rounded."""
    weight_of(form, tensors).rounded_product(Rounded(codes, scales), out, bias)


opaque_operator(
    "rounded_linear(Tensor codes, Tensor scales, Tensor?[] tensors, Tensor? bias, str form,"
    " Tensor(a!) out) -> ()",
    _rounded_linear,
)


def _gated_linear(
    x: torch.Tensor,
    tensors: Tensors,
    bias: torch.Tensor | None,
    form: str,
    activation: str,
    out: torch.Tensor,
) -> None:
    """Write act(gate) * up to out [num_rows, out / 2]: of the halves of a product."""
    weight_of(form, tensors).gated_product(x, out, bias, activation)


opaque_operator(
    "gated_linear(Tensor x, Tensor?[] tensors, Tensor? bias, str form, str activation,"
    " Tensor(a!) out) -> ()",
    _gated_linear,
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
    ends_here: ClassVar[bool] = True  # nothing else is added to what the projection returns

    @classmethod
    def of(cls, weight: Weight, bias: torch.Tensor | None, dtype: torch.dtype) -> Linear:
        """Return the projection for inputs of a dtype, opaque if skinny_gemm may multiply them."""
        few = isinstance(weight, DenseWeight) and multiplies_few(weight.form, weight.values, dtype)
        return cls(weight, bias, few)

    def rounding(self, dtype: torch.dtype, size: int, front: KernelSpec) -> Rounding | None:
        """Return how the layer in front can round inputs [num_rows, size] of a dtype, if at all.

        ``front``: the kernel that computes them. If its toggle asks for another implementation than
        Kiln's, it cannot: the kernels that round are of another family.
        """
        if dtype != ROUNDED_DTYPE or not self.ends_here or not may_fuse(front.family):
            return None
        return self.weight.rounding(size)

    def __call__(self, x: torch.Tensor | Rounded) -> torch.Tensor:
        """Return x @ weight.T + bias."""
        if isinstance(x, Rounded):
            shape = len(x.codes), self.weight.out_features
            out = x.codes.new_empty(shape, dtype=ROUNDED_DTYPE)
            tensors, form = self.weight.tensors, self.weight.form
            torch.ops.kiln.rounded_linear.default(*x, tensors, self.bias, form, out)
            return out
        if self.is_opaque:
            return Weight.linear(self.weight, x, self.bias)
        return self.weight.linear(x, self.bias)

    def gated(self, x: torch.Tensor | Rounded, activation: KernelSpec) -> torch.Tensor:
        """Return act(gate) * up [num_rows, out / 2], where gate, up = self(x).chunk(2, dim=1).

        ``activation``: the kernel of act(gate) * up, a value of BY_ACTIVATION.
        """
        (name,) = activation.params["activation"]
        is_one = self.is_opaque or self.weight.is_quantised
        if isinstance(x, Rounded) or not (is_one and self.ends_here and name in GATED):
            both = self(x)
            out = both.new_empty(both.shape[0], both.shape[1] // 2)
            activation.operator(out, both)
            return out
        out = x.new_empty(len(x), self.weight.out_features // 2)
        tensors, form = self.weight.tensors, self.weight.form
        torch.ops.kiln.gated_linear.default(x, tensors, self.bias, form, name, out)
        return out
