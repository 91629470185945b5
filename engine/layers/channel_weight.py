"""8-bit weights with one scale for each output: w = code * scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kiln.engine.layers.few_rows import (
    Epilogue,
    describe_product,
    multiplies_experts,
    multiply_experts,
    multiply_few,
)
from kiln.engine.layers.many_rows import (
    Fields,
    many_row_product,
    multiplies_many,
    multiply_many,
    multiply_many_experts,
)
from kiln.engine.layers.rounding import Rounded, Rounding
from kiln.engine.layers.scaled_products import has_rows, multiplies_rows, multiply_rows
from kiln.engine.layers.weight import DEQUANTISED, Weight
from kiln.jit_kernels.ops.dequantize.functions import dequantize
from kiln.jit_kernels.ops.quantization.codes import encode
from kiln.jit_kernels.ops.quantization.functions import quantize_per_tensor, quantize_per_token


@dataclass(frozen=True, slots=True)
class ChannelWeight(Weight):
    """``codes``: [..., out, in] float8_e4m3fn or int8; ``scales``: [..., out, 1] float32."""

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def out_features(self) -> int:
        """The number of outputs."""
        return self.codes.shape[-2]

    def dequantized(self, outputs: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights of some outputs."""
        return dequantize(self.codes, self.scales, outputs, dtype, self.codes.shape[-1])

    def multiply_few(self, x: torch.Tensor, to: Epilogue) -> bool:
        """Multiply x by skinny_gemm, or return False."""
        return multiply_few(self.form, x, self.codes, to, self.scales)

    def product(self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Write x @ weight.T + bias to out."""
        few = self.multiply_few(x, Epilogue(out, bias))
        if not few and not multiply_many(x, self._kept, out, bias):
            Weight.product(self, x, out, bias)

    def grouped(
        self, rows: torch.Tensor, ends: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """Return each row times the weights of its expert."""
        own = (self.form, rows, self.codes, (experts, ends), rows.dtype, self.scales)
        out = multiply_experts(*own)
        if out is None:
            out = multiply_many_experts(rows, self._kept, ends)
        return Weight.grouped(self, rows, ends, experts) if out is None else out

    def describe(self) -> str:
        """Say which codes there are."""
        many = many_row_product(self.codes, DEQUANTISED)
        product = describe_product(self.form, self.codes, many)
        return f"{self._codes_name}, one scale per output, {product}"

    @property
    def _kept(self) -> Fields:
        return self.codes, self.scales

    @property
    def _codes_name(self) -> str:
        return "int8" if self.codes.dtype == torch.int8 else "fp8"


class RoundedProduct(ChannelWeight):
    """The product of weights whose activations are rounded to the dtype of the codes too."""

    __slots__ = ()

    def rounded(
        self, x: torch.Tensor, experts: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes of x [num_rows, in], and their scales [num_rows, 1] float32."""
        raise NotImplementedError

    @property
    def _product_name(self) -> str:
        others = "torch._int_mm" if self.codes.dtype == torch.int8 else "torch._scaled_mm"
        if not multiplies_rows(self.codes):
            others = DEQUANTISED if self._is_torchs else many_row_product(self.codes, DEQUANTISED)
        return describe_product(self.form, self.codes, others)

    @property
    def _is_torchs(self) -> bool:
        """Whether torch multiplies such codes on this device, if their sizes fit.

        It dequantises others. A model would load a kernel for these alone.
        """
        return self.codes.dim() == 2 and has_rows(self.device, self.codes.dtype)

    def activations(self, x: torch.Tensor, experts: torch.Tensor | None = None) -> torch.Tensor:
        """Return x rounded to codes, in its own dtype."""
        codes, scales = self.rounded(x, experts)
        return (codes.float() * scales).to(x.dtype)

    def multiply_few(self, x: torch.Tensor, to: Epilogue) -> bool:
        """Return False: no kernel has an activation behind rounded inputs."""
        return False

    def product(self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Write x @ weight.T + bias to out."""
        self.rounded_product(Rounded(*self.rounded(x, None)), out, bias)

    def rounded_product(self, x: Rounded, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Write x @ weight.T + bias to out."""
        codes, scales = x.codes, x.scales.view(-1, 1).expand(len(x.codes), 1)
        if multiply_few(self.form, codes, self.codes, Epilogue(out, bias), self.scales, scales):
            return
        if multiply_rows(codes, scales, self.codes, self.scales, out):
            if bias is not None:
                out += bias
            return
        values = (codes.float() * scales).to(out.dtype)
        if self._is_torchs or not multiply_many(values, self._kept, out, bias):
            self.dequantised_product(values, out, bias)

    def grouped(
        self, rows: torch.Tensor, ends: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """Return each row times the weights of its expert."""
        dtype = rows.dtype
        if multiplies_experts(self.form, self.codes, dtype, len(rows)):
            codes, x_scales = self.rounded(rows, experts)
            own = (self.form, codes, self.codes, (experts, ends), dtype, self.scales, x_scales)
            if (out := multiply_experts(*own)) is not None:
                return out
        if multiplies_many(self.codes, dtype, len(rows)):
            out = multiply_many_experts(self.activations(rows, experts), self._kept, ends)
            if out is not None:
                return out
        return Weight.grouped(self, rows, ends, experts)


@dataclass(frozen=True, slots=True)
class TokenWeight(RoundedProduct):
    """The same; activations are rounded with a scale for each token."""

    def rounding(self, inputs: int) -> Rounding:
        """Return how x is rounded."""
        return Rounding(self.codes.dtype)

    def rounded(
        self, x: torch.Tensor, experts: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes of x, and their scales."""
        return quantize_per_token(x, self.codes.dtype)

    def describe(self) -> str:
        """Say what is rounded."""
        product = self._product_name
        return f"{self._codes_name}, one scale per output, activations per token, {product}"


@dataclass(frozen=True, slots=True)
class StaticWeight(RoundedProduct):
    """The same; activations are rounded with one scale. ``input_scale``: [..., 1] float32."""

    input_scale: torch.Tensor
    shared = frozenset(("input_scale",))

    def rounding(self, inputs: int) -> Rounding:
        """Return how x is rounded."""
        return Rounding(self.codes.dtype, scale=self.input_scale)

    def rounded(
        self, x: torch.Tensor, experts: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes of x, and their scales."""
        if experts is None:
            codes, scale = quantize_per_tensor(x, self.input_scale, self.codes.dtype)
            return codes, scale.expand(len(x), 1)
        scales = self.input_scale[experts]
        return encode(x, scales, self.codes.dtype), scales

    def describe(self) -> str:
        """Say what is rounded."""
        product = self._product_name
        return f"{self._codes_name}, one scale per output, activations with one scale, {product}"
