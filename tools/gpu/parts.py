"""gpu_check in several calls: which sections each part runs, and one report of all parts."""

from __future__ import annotations

import argparse
import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.room import Room
from gpu.sections import ALL
from kiln.engine.bench.report import Report

# The machine on which the usual seconds were recorded. A plan must not depend on where it is made.
_RECORDED_ON = (78.0, 16)  # GiB, cores


@dataclass(frozen=True, slots=True)
class Part:
    """One of several calls that together run all sections; numbered from 1."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def all(self) -> list[Part]:
        """Return all parts."""
        return [Part(number, self.of) for number in range(1, self.of + 1)]

    def file(self, title: str) -> str:
        """Return the name of the part's report, without its ending."""
        return f"{title}_part{self.number}of{self.of}"


def part_of(text: str) -> Part:
    """Return the part that "2/3" names. Raises ArgumentTypeError."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text!r}: want K/N, such as 1/2 and then 2/2")
    return Part(int(number), int(of))


def split(names: Sequence[str], of: int) -> list[list[str]]:
    """Divide sections among parts that take about as long; the same for every call.

    The longest come first, each to the part that is then the shortest.
    """
    parts: list[list[str]] = [[] for _ in range(of)]
    for name in longest_first(names):
        min(parts, key=lambda part: planned_seconds([*part, name])).append(name)
    return [[name for name in names if name in part] for part in parts]


def longest_first(names: Sequence[str]) -> list[str]:
    """Return sections by their usual seconds."""
    return sorted(names, key=lambda name: -ALL[name].usual)


def planned_seconds(names: Sequence[str]) -> float:
    """Return how long some sections usually take, those that run at once and then the others."""
    room, clock = Room(*_RECORDED_ON), 0.0
    waiting = longest_first([name for name in names if ALL[name].beside_others])
    running: list[tuple[float, str]] = []
    while waiting or running:
        for name in [*waiting]:
            if room.start(name, ALL[name]):
                waiting.remove(name)
                heapq.heappush(running, (clock + ALL[name].usual, name))
        clock, name = heapq.heappop(running)
        room.end(name)
    return clock + sum(ALL[name].usual for name in names if not ALL[name].beside_others)


def join(files: Sequence[Path]) -> Report:
    """Return one report of all parts.

    Raises ValueError if a part is missing, or if they are not of one machine and one version.
    """
    records = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    parts = [Part(**record["part"]) for record in records if "part" in record]
    first, of = records[0], {part.of for part in parts}
    if len(parts) < len(files) or len(of) != 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"want the reports of parts that were divided in one way, got {names}")
    if missing := [part for part in parts[0].all() if part not in parts]:
        raise ValueError(f"the report of part {missing[0]} is missing")
    sections: dict[str, Any] = {}
    for file, record in zip(files, records, strict=True):
        for field in ("benchmark", "hardware", "versions"):
            if record[field] != first[field]:
                raise ValueError(f"{file.name} is of another {field} than {files[0].name}")
        if twice := sections.keys() & record["sections"].keys():
            raise ValueError(f"{file.name}: {min(twice)} is in another part too")
        sections |= record["sections"]
    return Report(
        first["benchmark"],
        "; ".join(record["command"] for record in records),
        details={
            "parts": {str(Part(**record["part"])): record["date"] for record in records},
            "sections": {name: sections[name] for name in ALL if name in sections},
        },
        hardware=first["hardware"],
        versions=first["versions"],
        date=max(record["date"] for record in records),
    )
