"""Weight schemes: how a checkpoint stores the weights of a module, and what Kiln makes of them.

A scheme owns the names, dtypes and shapes of a module's tensors, and which part of them belongs to
a rank. It returns a Weight, which owns the product. Each format of checkpoints is one module of
``formats`` and has schemes of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kiln.engine.errors import ModelError
from kiln.engine.layers.weight import DenseWeight, Weight
from kiln.engine.layers.weight_parts import MixedWeight, join, stack
from kiln.engine.models.split import Share, all_of
from kiln.engine.models.weights import Index, Weights

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Part:
    """A linear layer of the checkpoint, and the share of it that this rank keeps.

    ``name`` is the checkpoint's, without the suffix of a tensor; ``layer`` is Kiln's name of the
    projection that it is a part of, for errors. The model computes in ``dtype`` on ``device``;
    ``bias``: whether the model has a bias here, which is no scheme's to read.
    """

    source: Weights
    layer: str
    name: str
    outputs: Share
    inputs: Share
    dtype: torch.dtype
    device: torch.device
    bias: bool = False

    def has(self, suffix: str) -> bool:
        """Whether the checkpoint has a tensor of this name and suffix."""
        return self.source.has(f"{self.name}.{suffix}")

    def error(self, suffix: str, problem: str) -> ModelError:
        """Return a ModelError about one tensor."""
        name = self.source.stored_name(f"{self.name}.{suffix}")
        return ModelError(f"{self.layer}: tensor {name} {problem}")

    def tensor(
        self, suffix: str, shape: Sequence[int], dtypes: Sequence[torch.dtype], place: Index = ()
    ) -> torch.Tensor:
        """Return a tensor of a known shape, or the part at ``place``, on the device as stored.

        Raises ModelError if it is missing, or has another shape or none of the dtypes.
        """
        name = f"{self.name}.{suffix}"
        stored = self.source.dtype(name)
        if stored not in dtypes:
            wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            found = str(stored).removeprefix("torch.")
            raise self.error(suffix, f"is {found}, but quantization_config implies {wanted}")
        index = (*place, *(slice(None) for _ in shape[len(place) :]))
        sizes = [len(range(*one.indices(size))) for one, size in zip(index, shape, strict=True)]
        out = torch.empty(sizes, dtype=stored, device=self.device)
        if out.numel():
            self.source.fill(name, out, shape, place)
        else:  # the last ranks may have no token of a small vocabulary
            self.source.ignore(name)
        return out

    def scales(
        self, suffix: str, shape: Sequence[int], place: Index = (), *, signed: bool = False
    ) -> torch.Tensor:
        """Return scales of any float dtype as float32.

        Raises ModelError unless they are finite and, if they are not ``signed``, at least 0.
        """
        stored = self.tensor(suffix, shape, FLOATS, place)
        scales = stored.float()
        fine = torch.isfinite(scales)
        fine = fine if signed else fine & (scales >= 0)
        if not bool(fine.all()):
            wanted = "finite ones" if signed else "finite ones of 0 or more"
            raise self.error(suffix, f"has the scale {scales[~fine][0].item()}: want {wanted}")
        return scales

    def floats(self, suffix: str, codes: torch.Tensor) -> torch.Tensor:
        """Return 8-bit floats [...] that were read. Raises ModelError if one is no number."""
        if bool((codes.view(torch.uint8) & 0x7F == 0x7F).any()):
            raise self.error(suffix, "has codes that are no numbers (NaN): is the file damaged?")
        return codes


class Scheme(ABC):
    """How the weights of a module are stored. Equal schemes read equal modules.

    ``shares_fields``: whether a Weight of it has fields that belong to all outputs. ``rounds``:
    whether activations are rounded. ``few_rows``: WEIGHT and SCALED of the variant of skinny_gemm
    that multiplies its weights; empty: none does.
    """

    shares_fields = False
    rounds = False
    few_rows: tuple[str, ...] = ()

    @abstractmethod
    def read(self, part: Part) -> Weight:
        """Return the rank's share of a module, ``outputs.size`` by ``inputs.room``.

        Raises ModelError if a tensor is missing or wrong, ConfigError if the share cannot be cut.
        """

    @abstractmethod
    def quantized(self, values: torch.Tensor) -> Weight:
        """Return weights [out, in] as this scheme would store them, for random weights."""

    def linear(self, parts: Sequence[Part]) -> Weight:
        """Return the parts behind each other along the outputs."""
        return join([self.read(part).padded(part.outputs.room) for part in parts])

    def experts(self, parts: Sequence[Part], count: int) -> Weight:
        """Return ``count`` experts of equally many parts. Raises ValueError if experts differ.

        Parts with a field for all of their outputs stay apart, because each has its own.
        """
        per_expert = len(parts) // count
        if per_expert > 1 and self.shares_fields:
            columns = [parts[index::per_expert] for index in range(per_expert)]
            stacks = [stack((self.linear([one]) for one in column), count) for column in columns]
            return MixedWeight(tuple(stacks))
        groups = (parts[first : first + per_expert] for first in range(0, len(parts), per_expert))
        return stack((self.linear(own) for own in groups), count)


class Dense(Scheme):
    """Float weights under ``weight``, converted to the model's dtype."""

    def read(self, part: Part) -> Weight:
        """Return the rank's share of a module."""
        return self.linear([part])

    def quantized(self, values: torch.Tensor) -> Weight:
        """Return the weights as they are."""
        return DenseWeight(values)

    def linear(self, parts: Sequence[Part]) -> Weight:
        """Return the parts behind each other, each written to its place at once."""
        first, rooms = parts[0], [part.outputs.room for part in parts]
        size = (sum(rooms), first.inputs.room)
        out = torch.empty(size, dtype=first.dtype, device=first.device)
        for part, own in zip(parts, out.split(rooms), strict=True):
            shares = (part.outputs, part.inputs)
            fill_shares(part.source, f"{part.name}.weight", own, part.layer, shares)
        return DenseWeight(out)

    def experts(self, parts: Sequence[Part], count: int) -> Weight:
        """Return the experts, each written to its place at once."""
        together = self.linear(parts)
        assert isinstance(together, DenseWeight)
        return DenseWeight(together.values.view(count, -1, parts[0].inputs.room))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dense)

    def __hash__(self) -> int:
        return hash(Dense)


DENSE = Dense()


@dataclass(frozen=True, slots=True)
class AtLoad(Scheme):
    """Float weights that a scheme quantises when they are read, such as random ones."""

    scheme: Scheme

    @property
    def shares_fields(self) -> bool:  # type: ignore[override]
        """Whether a Weight of it has fields that belong to all outputs."""
        return self.scheme.shares_fields

    def read(self, part: Part) -> Weight:
        """Return the rank's share of a module."""
        dense = DENSE.read(part)
        return self.scheme.quantized(dense.dequantized(slice(part.outputs.size), part.dtype))

    def quantized(self, values: torch.Tensor) -> Weight:
        """Return weights as the scheme would store them."""
        return self.scheme.quantized(values)


def fill_shares(
    weights: Weights, name: str, out: torch.Tensor, layer: str, shares: Sequence[Share]
) -> None:
    """Write a rank's share of a tensor to the first elements of ``out``, and zeros behind.

    Raises ModelError if the tensor is missing, is not of floats or has another shape.
    """
    dtype = weights.dtype(name)
    if dtype not in FLOATS:
        raise ModelError(
            f"{layer}: tensor {weights.stored_name(name)} is {dtype}, but config.json has no "
            f"quantization_config for it: want one of {', '.join(map(str, FLOATS))}"
        )
    shape = [share.whole for share in shares]
    sizes = [share.size for share in shares]
    if list(out.shape) != sizes:
        out.zero_()
    if 0 in sizes and 0 not in shape:  # the last ranks may have no token of a small vocabulary
        weights.ignore(name)
        return
    index = () if sizes == shape else tuple(share.place for share in shares)
    weights.fill(name, out[tuple(slice(size) for size in sizes)], shape, index)


def whole_rows(part: Part) -> Part:
    """Return the part with all inputs."""
    return replace(part, inputs=all_of(part.inputs.whole))
