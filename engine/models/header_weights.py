"""What a checkpoint has, against what a model asks for, by the headers of its files alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kiln.engine.errors import ModelError
from kiln.engine.models.weights import Index, Weights

_DIGITS = re.compile(r"\d+")
_FEW = 2  # elements: such tensors of integers hold the shape of others


class HeaderWeights(Weights):
    """A source for models on the meta device that notes what is wrong and goes on.

    ``problems`` are what the source says of missing tensors and wrong shapes. A missing tensor has
    the dtype and the shape of one of the same name in another layer.
    """

    def __init__(self, source: Weights) -> None:
        self._source = source
        self.problems: list[str] = []
        self._like: dict[str, str] = {}
        for name in sorted(source.names):
            self._like.setdefault(_DIGITS.sub("*", name), name)
            self._like.setdefault(name.rpartition(".")[2], name)

    @property
    def names(self) -> Set[str]:
        """The names of all tensors as they are stored."""
        return self._source.names

    def module(self, name: str) -> str:
        """Return the stored name of a module."""
        return self._source.module(name)

    def has(self, name: str) -> bool:
        """Whether the source has a tensor."""
        return self._source.has(name)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor. Raises ModelError if not even another layer has it."""
        return self._source.dtype(self._known(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises ModelError if not even another layer has it."""
        return self._source.shape(self._known(name))

    def fill(self, name: str, out: torch.Tensor, shape: Sequence[int], index: Index = ()) -> None:
        """Check the name and the shape. A tensor of few integers gets their ``few_values``."""
        try:
            self._source.fill(name, out, shape, index)
        except ModelError as error:
            self._note(error)
            self._source.ignore(name)
            return
        if out.is_meta and out.numel() <= _FEW and not out.is_floating_point():
            real = torch.empty_like(out, device="cpu")
            self._source.fill(name, real, shape, index)
            out.few_values = real.tolist()  # type: ignore[attr-defined]

    def ignore(self, name: str) -> None:
        """Do not report a tensor as left over."""
        self._source.ignore(name)

    def finish(self) -> None:
        """Note which tensors are left over."""
        try:
            self._source.finish()
        except ModelError as error:
            self._note(error)

    def _known(self, name: str) -> str:
        """Return the name of a tensor that exists, and note if it is another."""
        if self._source.has(name):
            return name
        for key in (_DIGITS.sub("*", name), name.rpartition(".")[2]):
            if key in self._like:
                self._try(lambda: self._source.dtype(name))
                return self._like[key]
        return name

    def _try(self, ask: Callable[[], Any]) -> None:
        try:
            ask()
        except ModelError as error:
            self._note(error)

    def _note(self, error: ModelError) -> None:
        if str(error) not in self.problems:
            self.problems.append(str(error))


class NoValues(ModelError):
    """A part cannot be built because of a problem that was noted before."""


class SoundValues(TorchFunctionMode):
    """While it is active, tensors on the meta device answer as those of a sound checkpoint.

    Schemes check what they read: that all scales are finite, no code is out of range, and so on. So
    ``any`` is false and other conditions are true, and a mask selects nothing.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and first.is_meta:
            if func is torch.Tensor.__bool__:
                return not getattr(first, "is_any", False)
            if func is torch.Tensor.tolist:
                if not hasattr(first, "few_values"):
                    raise NoValues("a tensor that describes others is wrong itself")
                return first.few_values
            if func is torch.equal:
                return True
            if func is torch.bincount:
                return torch.empty(0, dtype=torch.int64)
            if func is torch.Tensor.__getitem__ and _is_mask(args[1]):
                return first.new_empty(0)
        out = func(*args, **(kwargs or {}))
        if func in (torch.Tensor.any, torch.any) and out.is_meta:
            out.is_any = True
        return out


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool
