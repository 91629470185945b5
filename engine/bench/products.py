"""Time products on a GPU as an engine runs them: in CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kiln.jit_kernels.bench.timing import Call, GpuWork, time_side_by_side

_ROUNDS = 30


def microseconds(choices: Mapping[str, Sequence[Call]]) -> dict[str, float]:
    """Return the median time of a call of each choice, from rounds in which all run in turn.

    The calls of a choice do the same, on weights of their own.
    """
    works = {name: GpuWork(calls) for name, calls in choices.items()}
    return {
        name: one.median_us for name, one in time_side_by_side(works, max_rounds=_ROUNDS).items()
    }
