"""8-bit floats with one scale for each block of 128 outputs and 128 inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F

from kiln.engine.layers.few_rows import (
    Epilogue,
    describe_product,
    multiplies_experts,
    multiply_experts,
    multiply_few,
)
from kiln.engine.layers.many_rows import (
    many_row_product,
    multiplies_many,
    multiply_many,
    multiply_many_experts,
)
from kiln.engine.layers.rounding import Rounded, Rounding
from kiln.engine.layers.scaled_products import has_blocks, multiplies_blocks, multiply_blocks
from kiln.engine.layers.weight import DEQUANTISED, Weight, join_rows, rows_at
from kiln.jit_kernels.ops.dequantize.functions import dequantize
from kiln.jit_kernels.ops.quantization.functions import quantize_per_group

BLOCK = 128  # outputs, and inputs
_ALIGNED = 4  # scales of a row, as torch's product wants them


@dataclass(frozen=True, slots=True)
class BlockWeight(Weight):
    """``codes``: [..., out, in] float8_e4m3fn; in is a multiple of 128, with zeros behind.

    ``scales`` float32: [..., out / 128, in / 128], with both rounded up, the second to a multiple
    of 4. Where parts do not begin at a block it has a row for each output: [..., out, in / 128].
    """

    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, codes: torch.Tensor, scales: torch.Tensor, first: int = 0) -> Self:
        """Return the weights of codes [out, in] and scales [out / 128, in / 128], rounded up.

        ``first``: which output of its block the first one is.
        """
        outputs, inputs = codes.shape
        columns = -(-inputs // BLOCK)
        padded = codes
        if inputs % BLOCK:
            padded = torch.zeros(outputs, columns * BLOCK, dtype=codes.dtype, device=codes.device)
            padded[:, :inputs].copy_(codes)
        scales = F.pad(scales, (0, -columns % _ALIGNED))
        if first:
            scales = scales.repeat_interleave(BLOCK, 0)[first : first + outputs]
        return cls(padded, scales)

    @property
    def out_features(self) -> int:
        """The number of outputs."""
        return self.codes.shape[-2]

    @property
    def is_by_block(self) -> bool:
        """Whether ``scales`` has a row for each 128 outputs."""
        return self.scales.shape[-2] == -(-self.out_features // BLOCK)

    def dequantized(self, outputs: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights of some outputs."""
        inputs = self.codes.shape[-1]
        return dequantize(self.codes, self.scales, outputs, dtype, inputs, groups=BLOCK)

    def describe(self) -> str:
        """Say which codes there are."""
        many = many_row_product(self.codes, DEQUANTISED)
        product = describe_product(self.form, self.codes, many)
        return f"fp8, one scale per block of 128 x 128, {product}"

    def activations(self, x: torch.Tensor, experts: torch.Tensor | None = None) -> torch.Tensor:
        """Return x with zeros behind, as many inputs as there are codes."""
        more = self.codes.shape[-1] - x.shape[1]
        return F.pad(x, (0, more)) if more else x

    def multiply_few(self, x: torch.Tensor, to: Epilogue) -> bool:
        """Multiply x by skinny_gemm, or return False."""
        whole = BlockWeight.activations(self, x)
        return multiply_few(self.form, whole, self.codes, to, self.scales)

    def product(self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Write x @ weight.T + bias to out."""
        if self.multiply_few(x, Epilogue(out, bias)):
            return
        whole = BlockWeight.activations(self, x)
        if not multiply_many(whole, self.tensors, out, bias):
            Weight.product(self, x, out, bias)

    def grouped(
        self, rows: torch.Tensor, ends: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """Return each row times the weights of its expert."""
        whole = BlockWeight.activations(self, rows)
        own = (self.form, whole, self.codes, (experts, ends), rows.dtype, self.scales)
        out = multiply_experts(*own)
        if out is None:
            out = multiply_many_experts(whole, self.tensors, ends)
        return Weight.grouped(self, rows, ends, experts) if out is None else out

    def joins(self, other: Weight) -> bool:
        """Whether the outputs of both can be kept together."""
        return isinstance(other, type(self)) and self.codes.shape[1:] == other.codes.shape[1:]

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the outputs of all parts behind each other."""
        if len(parts) == 1:
            return parts[0]
        in_blocks = all(part.is_by_block for part in parts) and not any(
            part.out_features % BLOCK for part in parts[:-1]
        )
        every = slice(None)
        scales = [part.scales if in_blocks else part._of_outputs(every) for part in parts]
        return cls(join_rows([part.codes for part in parts]), join_rows(scales))

    def padded(self, num_outputs: int) -> Self:
        """Return the same with zeros behind, for ``num_outputs`` outputs in total."""
        more = num_outputs - self.out_features
        if not more:
            return self
        codes, scales = (
            torch.zeros(more, one.shape[1], dtype=one.dtype, device=one.device)
            for one in (self.codes, self.scales)
        )
        rows = join_rows([self._of_outputs(slice(None)), scales])
        return type(self)(join_rows([self.codes, codes]), rows)

    def reordered(self, order: Sequence[int]) -> Self:
        """Return the same outputs in another order; blocks stay if no output leaves its own."""
        rows = torch.tensor(order)
        stays = bool((rows // BLOCK == torch.arange(len(rows)) // BLOCK).all())
        rows = rows.to(self.device)
        scales = self.scales
        if not (stays and self.is_by_block):
            scales = self._of_outputs(slice(None))[rows]
        return type(self)(rows_at(self.codes, rows), scales)

    def _of_outputs(self, outputs: slice) -> torch.Tensor:
        """Return the scales with a row for each of some outputs."""
        if not self.is_by_block:
            return self.scales[..., outputs, :]
        start, stop, _ = outputs.indices(self.out_features)
        first = start // BLOCK
        blocks = self.scales[..., first : -(-stop // BLOCK), :]
        begin = start - first * BLOCK
        return blocks.repeat_interleave(BLOCK, -2)[..., begin : begin + stop - start, :]


@dataclass(frozen=True, slots=True)
class BlockGroupWeight(BlockWeight):
    """The same; activations are rounded with a scale for each 128 inputs of a token."""

    def activations(self, x: torch.Tensor, experts: torch.Tensor | None = None) -> torch.Tensor:
        """Return x rounded to codes, in its own dtype."""
        return _values(*quantize_per_group(BlockWeight.activations(self, x)), x.dtype)

    def rounding(self, inputs: int) -> Rounding | None:
        """Return how x is rounded; None where it gets zeros behind."""
        if inputs != self.codes.shape[-1]:
            return None
        return Rounding(self.codes.dtype, BLOCK, by_column=self._multiplies_blocks)

    def multiply_few(self, x: torch.Tensor, to: Epilogue) -> bool:
        """Return False: no kernel has an activation behind rounded inputs."""
        return False

    def product(self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Write x @ weight.T + bias to out."""
        whole = BlockWeight.activations(self, x)
        rounded = quantize_per_group(whole, column_major_scales=self._multiplies_blocks)
        self.rounded_product(Rounded(*rounded), out, bias)

    def rounded_product(self, x: Rounded, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Write x @ weight.T + bias to out."""
        if multiply_few(self.form, x.codes, self.codes, Epilogue(out, bias), self.scales, x.scales):
            return
        if self._multiplies_blocks and multiply_blocks(*x, self.codes, self.scales, out):
            if bias is not None:
                out += bias
            return
        values = _values(*x, out.dtype)
        if self._is_torchs or not multiply_many(values, self.tensors, out, bias):
            self.dequantised_product(values, out, bias)

    def grouped(
        self, rows: torch.Tensor, ends: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """Return each row times the weights of its expert."""
        dtype = rows.dtype
        if multiplies_experts(self.form, self.codes, dtype, len(rows)):
            codes, x_scales = quantize_per_group(BlockWeight.activations(self, rows))
            own = (self.form, codes, self.codes, (experts, ends), dtype, self.scales, x_scales)
            if (out := multiply_experts(*own)) is not None:
                return out
        if multiplies_many(self.codes, dtype, len(rows)):
            out = multiply_many_experts(self.activations(rows), self.tensors, ends)
            if out is not None:
                return out
        return Weight.grouped(self, rows, ends, experts)

    @property
    def _multiplies_blocks(self) -> bool:
        """Whether torch multiplies these codes."""
        return self.is_by_block and multiplies_blocks(self.codes)

    @property
    def _is_torchs(self) -> bool:
        """Whether torch multiplies such blocks on this device, if their sizes fit.

        It dequantises others. A model would load a kernel for these alone.
        """
        return self.codes.dim() == 2 and has_blocks(self.device)

    def describe(self) -> str:
        """Say what is rounded."""
        many = DEQUANTISED if self._is_torchs else many_row_product(self.codes, DEQUANTISED)
        others = "torch's scaled_mm" if self._multiplies_blocks else many
        product = describe_product(self.form, self.codes, others)
        return f"fp8, one scale per block of 128 x 128, activations per 128 of a token, {product}"


def _values(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what codes [num_rows, in] stand for, by scales [num_rows, in / 128]."""
    values = codes.float().view(len(codes), -1, BLOCK) * scales.unsqueeze(2)
    return values.flatten(1).to(dtype)
