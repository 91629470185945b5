"""Schemes of 8-bit weights, which several formats share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kiln.engine.errors import ConfigError
from kiln.engine.layers.block_weight import BLOCK, BlockGroupWeight, BlockWeight
from kiln.engine.layers.channel_weight import ChannelWeight, StaticWeight, TokenWeight
from kiln.engine.layers.weight import Weight
from kiln.engine.models.scheme import DENSE, Part, Scheme, whole_rows
from kiln.jit_kernels.ops.quantization.functions import quantize_per_token

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class ChannelFP8(Scheme):
    """8-bit weights ``weight`` with a scale for each output, or one for all.

    ``strategy``: "channel" or "tensor", of the weights. ``activations``: "token" (rounded with a
    scale each), "static" (with a stored one) or "none". ``dtype`` of the codes: fp8 or int8.
    ``scale``, ``input_scale``: the suffixes of the tensors with the scales.
    """

    strategy: str
    activations: str
    dtype: torch.dtype = FP8
    scale: str = "weight_scale"
    input_scale: str = "input_scale"
    bits_per_weight = 8.0

    @property
    def suffixes(self) -> frozenset[str]:
        """The suffixes of a module's tensors."""
        more = (self.input_scale,) if self.activations == "static" else ()
        return frozenset(("weight", self.scale, *more))

    @property
    def rounds(self) -> bool:  # type: ignore[override]
        """Whether activations are rounded."""
        return self.activations != "none"

    @property
    def few_rows(self) -> tuple[str, ...]:  # type: ignore[override]
        """The variant of skinny_gemm."""
        return ("E4M3" if self.dtype == FP8 else "I8", "kByOutput")

    @property
    def shares_fields(self) -> bool:  # type: ignore[override]
        """Whether there is one scale for all activations."""
        return self.activations == "static"

    def read(self, part: Part) -> Weight:
        """Return the rank's share of a module."""
        outputs, inputs = part.outputs, part.inputs
        place = (outputs.place, inputs.place)
        codes = part.tensor("weight", (outputs.whole, inputs.whole), (self.dtype,), place)
        if self.dtype == FP8:
            part.floats("weight", codes)
        codes = with_room(codes, inputs.room)
        if self.strategy == "channel":
            scales = output_scales(part, self.scale)
        else:
            scales = one_scale(part, self.scale).expand(outputs.size, 1).contiguous()
        return self._weight(part, codes, scales)

    def quantized(self, values: torch.Tensor) -> Weight:
        """Return weights as this scheme would store them."""
        codes, scales = quantize_per_token(values, self.dtype)
        # After a norm, few activations exceed 8. The scale of int8 lets its largest code stand for
        # that; 8-bit floats reach 448 with a scale of 1.
        largest = 1.0 if self.dtype == FP8 else 8 / torch.iinfo(self.dtype).max
        own = torch.full((1,), largest, device=values.device)
        return self._made(codes, scales, own)

    def _weight(self, part: Part, codes: torch.Tensor, scales: torch.Tensor) -> Weight:
        if self.activations != "static":
            return self._made(codes, scales, None)
        own = one_scale(part, self.input_scale)
        if not bool(own > 0):
            raise part.error(self.input_scale, f"is {own.item()}: want a number above 0")
        return self._made(codes, scales, own)

    def _made(self, codes: torch.Tensor, scales: torch.Tensor, own: torch.Tensor | None) -> Weight:
        if self.activations == "static":
            assert own is not None
            return StaticWeight(codes, scales, own)
        return (TokenWeight if self.activations == "token" else ChannelWeight)(codes, scales)


@dataclass(frozen=True, slots=True)
class BlockFP8(Scheme):
    """``weight`` with a scale for each 128 x 128, in a tensor named ``suffix``.

    ``rounds``: activations are rounded with a scale for each 128 inputs.
    """

    suffix: str
    rounds: bool = True
    bits_per_weight = 8.0
    few_rows = ("E4M3", "kByBlock")

    @property
    def suffixes(self) -> frozenset[str]:
        """The suffixes of a module's tensors."""
        return frozenset(("weight", self.suffix))

    def read(self, part: Part) -> Weight:
        """Return the rank's share of a module. Raises ConfigError if it cuts a block of inputs."""
        outputs, inputs = part.outputs, part.inputs
        if inputs.start % BLOCK or (
            (inputs.start + inputs.size) % BLOCK and inputs.start + inputs.size < inputs.whole
        ):
            raise ConfigError(
                f"{part.name}: a rank would have inputs {inputs.start} to "
                f"{inputs.start + inputs.size} of {inputs.whole}, which cuts a block of {BLOCK} "
                "that has one scale: use fewer ranks (--tensor-parallel-size)"
            )
        place = (outputs.place, inputs.place)
        codes = part.tensor("weight", (outputs.whole, inputs.whole), (FP8,), place)
        codes = with_room(part.floats("weight", codes), inputs.room)
        scales = block_scales(part, self.suffix)
        kind = BlockGroupWeight if self.rounds else BlockWeight
        return kind.of(codes, scales, outputs.start % BLOCK)

    def quantized(self, values: torch.Tensor) -> Weight:
        """Return weights as this scheme would store them."""
        outputs, inputs = values.shape
        columns = -(-inputs // BLOCK)
        padded = values.new_zeros(-(-outputs // BLOCK) * BLOCK, columns * BLOCK)
        padded[:outputs, :inputs] = values
        blocks = padded.view(-1, BLOCK, columns, BLOCK).transpose(1, 2).flatten(2)
        codes, scales = quantize_per_token(blocks, FP8)
        codes = codes.view(-1, columns, BLOCK, BLOCK).transpose(1, 2).reshape(padded.shape)
        kind = BlockGroupWeight if self.rounds else BlockWeight
        return kind.of(codes[:outputs, :inputs], scales.squeeze(2))


@dataclass(frozen=True, slots=True)
class AtLoadFP8(Scheme):
    """Floats under ``weight`` that are quantised when they are read, with a scale per output.

    The scale is that of all inputs of an output, so that any number of ranks has the same codes.
    """

    dtype: torch.dtype
    rounds = True
    few_rows = ("E4M3", "kByOutput")

    def read(self, part: Part) -> Weight:
        """Return the rank's share of a module."""
        whole = DENSE.read(replace(whole_rows(part), dtype=torch.float32))
        weight = self.quantized(whole.dequantized(slice(part.outputs.size), torch.float32))
        own = weight.codes[:, part.inputs.place].contiguous()
        return TokenWeight(with_room(own, part.inputs.room), weight.scales)

    def quantized(self, values: torch.Tensor) -> TokenWeight:
        """Return weights as this scheme stores them."""
        return TokenWeight(*quantize_per_token(values, self.dtype))


def one_scale(part: Part, suffix: str) -> torch.Tensor:
    """Return one scale [1] float32 that is stored with one element or none. Raises ModelError."""
    shape = (1,) if part.source.shape(f"{part.name}.{suffix}") else ()
    return part.scales(suffix, shape).reshape(1)


def output_scales(part: Part, suffix: str) -> torch.Tensor:
    """Return the scales of the rank's outputs, [out, 1], stored as [out, 1] or [out]."""
    whole = part.outputs.whole
    dims = len(part.source.shape(f"{part.name}.{suffix}"))
    shape = (whole,) if dims == 1 else (whole, 1)
    return part.scales(suffix, shape, (part.outputs.place,)).view(-1, 1)


def block_scales(part: Part, suffix: str) -> torch.Tensor:
    """Return the scales of the blocks that have the rank's weights, [out / 128, in / 128].

    Both are rounded up. ModelOpt stores them as [out / 128, 1, in / 128, 1].
    """
    shares = (part.outputs, part.inputs)
    grid = [-(-share.whole // BLOCK) for share in shares]
    rows, columns = (
        slice(share.start // BLOCK, -(-(share.start + share.size) // BLOCK)) for share in shares
    )
    if len(part.source.shape(f"{part.name}.{suffix}")) != 4:
        return part.scales(suffix, grid, (rows, columns))
    spread = (rows, slice(None), columns)
    return part.scales(suffix, (grid[0], 1, grid[1], 1), spread).flatten(2).flatten(0, 1)


def with_room(codes: torch.Tensor, room: int) -> torch.Tensor:
    """Return codes [out, in] with zeros behind the inputs, ``room`` in total."""
    if codes.shape[1] == room:
        return codes
    out = torch.zeros(len(codes), room, dtype=codes.dtype, device=codes.device)
    out[:, : codes.shape[1]].copy_(codes)
    return out
