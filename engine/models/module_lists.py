"""Lists of modules as compressed-tensors writes them, and what modules' tensors say themselves."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from kiln.engine.errors import ModelError
from kiln.engine.models.expressions import Expression
from kiln.engine.models.fields import Fields
from kiln.engine.models.scheme import FLOATS
from kiln.engine.models.weights import Weights

_PREFIX, _MOST = "re:", 1000
_SUFFIXES = (  # of the tensors of a quantised module, in any format that has a ``weight_scale``
    *("weight_packed", "weight_shape", "weight_scale", "weight_scale_inv", "weight_scale_2"),
    *("weight_zero_point", "weight_g_idx", "weight_global_scale", "pre_quant_scale"),
    *("input_scale", "input_zero_point", "input_global_scale"),
)


@dataclass(frozen=True)
class ModuleList:
    """Names of modules, expressions behind "re:", and names of classes.

    An expression must match from the start of a name, but not up to its end.
    """

    entries: frozenset[str]
    expressions: tuple[tuple[str, Expression], ...] = field(compare=False)

    @classmethod
    def read(cls, fields: Fields, name: str) -> ModuleList:
        """Read a list. Raises ModelError for a text that is not an expression."""
        entries = fields.texts(name)
        made = []
        for entry in dict.fromkeys(entries):
            if entry.startswith(_PREFIX):
                try:
                    made.append((entry, Expression(entry.removeprefix(_PREFIX))))
                except ValueError as error:
                    problem = f"{entry[:80]!r} is not an expression: {error}"
                    raise fields.error(name, problem) from error
        if len(made) > _MOST:
            raise fields.error(name, f"it has {len(made)} expressions, at most {_MOST} are read")
        return cls(frozenset(entries), tuple(made))

    def by_names(self, names: Sequence[str]) -> str | None:
        """Return the entry that is, or whose expression matches, one of a module's names."""
        for name in names:
            if name in self.entries:
                return name
        return next(
            (entry for entry, one in self.expressions if any(map(one.matches, names))), None
        )

    def by_class(self, name: str) -> str | None:
        """Return the entry that names the class of a module."""
        return name if name in self.entries else None


def check_module(source: Weights, name: str, suffixes: Collection[str] | None, reason: str) -> None:
    """Compare a module's tensors with what quantization_config says of it.

    ``suffixes``: of the tensors that it must have; None if it is not quantised. ``reason`` says
    why. Raises ModelError with both if the module has others, or a ``weight`` of floats in spite of
    ``suffixes``, or of codes without them.
    """
    if source.random:
        return
    own = ("weight",) if suffixes is None else suffixes
    for suffix in ("weight", *_SUFFIXES):
        tensor = f"{name}.{suffix}"
        if not source.has(tensor):
            continue
        dtype = source.dtype(tensor)
        is_odd = suffix == "weight" and (dtype in FLOATS) != (suffixes is None)
        if suffix not in own or is_odd:
            found = str(dtype).removeprefix("torch.")
            raise ModelError(
                f"{name}: {reason}, but tensor {source.stored_name(tensor)} is there, in {found}: "
                "does quantization_config belong to these weights?"
            )
