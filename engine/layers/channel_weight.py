"""8-bit weights with one scale for each output: w = code * scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kiln.engine.layers.few_rows import (
    Epilogue,
    describe_product,
    multiplies_experts,
    multiplies_few,
    multiply_experts,
    multiply_few,
)
from kiln.engine.layers.scaled_products import multiplies_rows, multiply_rows
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
        if not self.multiply_few(x, Epilogue(out, bias)):
            Weight.product(self, x, out, bias)

    def grouped(
        self, rows: torch.Tensor, ends: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """Return each row times the weights of its expert."""
        own = (self.form, rows, self.codes, (experts, ends), rows.dtype, self.scales)
        out = multiply_experts(*own)
        return Weight.grouped(self, rows, ends, experts) if out is None else out

    def describe(self) -> str:
        """Say which codes there are."""
        product = describe_product(self.form, self.codes, DEQUANTISED)
        return f"{self._codes_name}, one scale per output, {product}"

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
        others = others if multiplies_rows(self.codes) else DEQUANTISED
        return describe_product(self.form, self.codes, others)

    def activations(self, x: torch.Tensor, experts: torch.Tensor | None = None) -> torch.Tensor:
        """Return x rounded to codes, in its own dtype."""
        codes, scales = self.rounded(x, experts)
        return (codes.float() * scales).to(x.dtype)

    def multiply_few(self, x: torch.Tensor, to: Epilogue) -> bool:
        """Multiply x, rounded, by skinny_gemm; or return False."""
        if not multiplies_few(self.form, self.codes, to.out.dtype, len(x)):
            return False
        rounded, x_scales = self.rounded(x, None)
        return multiply_few(self.form, rounded, self.codes, to, self.scales, x_scales)

    def product(self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Write x @ weight.T + bias to out."""
        if self.multiply_few(x, Epilogue(out, bias)):
            return
        rounded, x_scales = self.rounded(x, None)
        if not multiply_rows(rounded, x_scales, self.codes, self.scales, out):
            Weight.product(self, x, out, None)
        if bias is not None:
            out += bias

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
        return Weight.grouped(self, rows, ends, experts)


@dataclass(frozen=True, slots=True)
class TokenWeight(RoundedProduct):
    """The same; activations are rounded with a scale for each token."""

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

    def rounded(
        self, x: torch.Tensor, experts: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes of x, and their scales."""
        if experts is None:
            codes, scale = quantize_per_tensor(x, self.input_scale, self.codes.dtype)
            return codes, scale.expand(len(x), 1).contiguous()
        scales = self.input_scale[experts]
        return encode(x, scales, self.codes.dtype), scales

    def describe(self) -> str:
        """Say what is rounded."""
        product = self._product_name
        return f"{self._codes_name}, one scale per output, activations with one scale, {product}"
