"""What the ranks tell each other before they sum: a mapping as JSON, in one all-gather.

Whatever one rank knows and the others do not becomes a decision of all: either every rank goes on
in the same way, or every rank raises the same error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kiln.engine.distributed.group import Group
from kiln.engine.errors import ConfigError

Exchange = Callable[[bytes], list[bytes]]
_MESSAGE = 8192  # bytes; the same on every rank, as an all-gather needs
_LONGEST = 1000  # characters of a problem
PROBLEM = "problem"


def exchange_of(group: Group) -> Exchange:
    """Return a function that sends bytes to all ranks, as many on each, and returns all ranks'."""

    def exchange(sent: bytes) -> list[bytes]:
        own = torch.frombuffer(bytearray(sent), dtype=torch.uint8).to(group.device)
        together = group.all_gather(own.unsqueeze(0)).cpu().numpy()
        return [row.tobytes() for row in together]

    return exchange


def tell_all(exchange: Exchange, told: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what all ranks tell, in their order. Every rank must call it at the same time."""
    told = dict(told)
    if PROBLEM in told:
        told[PROBLEM] = told[PROBLEM][:_LONGEST]
    content = json.dumps(told).encode()
    if len(content) > _MESSAGE:
        raise ValueError(f"ranks tell each other at most {_MESSAGE} bytes, not {len(content)}")
    return [json.loads(one) for one in exchange(content.ljust(_MESSAGE))]


def check_equal(all_told: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Raise ConfigError, on every rank, that names each of these fields on which ranks differ."""
    different = []
    for name in names:
        ranks: dict[str, list[str]] = {}
        for rank, told in enumerate(all_told):
            ranks.setdefault(str(told.get(name)), []).append(str(rank))
        if len(ranks) > 1:
            values = "; ".join(f"{value} on rank {', '.join(own)}" for value, own in ranks.items())
            different.append(f"{name} is {values}")
    if different:
        raise ConfigError(
            f"the ranks of an all-reduce differ: {'. '.join(different)}. Give all ranks the same "
            "version of Kiln, the same environment and the same settings"
        )


def problem_of_all(exchange: Exchange, problem: str) -> str:
    """Tell this rank's problem, "" if it has none; return those of all ranks as one text."""
    return problems_of(tell_all(exchange, {PROBLEM: problem}))


def problems_of(all_told: Sequence[Mapping[str, Any]]) -> str:
    """Return the problems of all ranks as one text, "" if there are none."""
    ranks: dict[str, list[str]] = {}
    for rank, told in enumerate(all_told):
        if told.get(PROBLEM):
            ranks.setdefault(told[PROBLEM], []).append(str(rank))
    return "; ".join(f"rank {', '.join(own)}: {problem}" for problem, own in ranks.items())
