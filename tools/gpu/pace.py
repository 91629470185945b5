"""Progress and time: a section stops starting new work when its time is used up, and says so."""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from kiln.jit_kernels.spec import KernelSpec

_Item = TypeVar("_Item")
Row = dict[str, Any]
Rows = Iterable[Row]
Share = tuple[int, int]  # every so-manieth item from which on


def chosen(args: argparse.Namespace, specs: Iterable[KernelSpec]) -> list[KernelSpec]:
    """Return those of some specs that ``--kernels`` names, all of them where it names none."""
    return [spec for spec in specs if not args.kernels or spec.name in args.kernels]


def share_of(text: str) -> Share:
    """Return the share that "1/4" names: the second of four."""
    own, of = text.split("/")
    return int(own), int(of)


class NotMeasured(Exception):
    """A section cannot run here; the message says why. It has not failed."""


class Pace:
    """The time of one section; ``--quick`` leaves a third of it. Unit: seconds."""

    def __init__(self, args: argparse.Namespace, seconds: float) -> None:
        self._seconds = seconds / 3 if args.quick else seconds
        self._begun = time.perf_counter()
        self._kept = self._begun
        self._result: Path | None = getattr(args, "result", None)
        self._section: str = getattr(args, "section", None) or ""
        self._share: Share = getattr(args, "share", (0, 1))

    def used(self) -> float:
        """Return the part of the time that is used up; above 1 there is none left."""
        return (time.perf_counter() - self._begun) / max(self._seconds, 1e-9)

    def rows(
        self, items: Iterable[_Item], name: Callable[[_Item], str], work: Callable[[_Item], Rows]
    ) -> list[Row]:
        """Return the rows of this process's share of items, printing the name of each.

        One that fails has a row too.
        """
        rows: list[Row] = []
        first, step = self._share
        for item in [*items][first::step]:
            if self.used() >= 1:
                reason = f"not measured: the section's {self._seconds:.0f} s were used up"
                rows.append({"kernel": name(item), "status": reason})
                continue
            seconds = time.perf_counter() - self._begun
            print(f"  {seconds:6.1f} s  {self._section:18s} {name(item)}", flush=True)
            try:
                for row in work(item):
                    rows.append(row)
                    self._keep(rows)
            except Exception as error:  # the others are still measured
                traceback.print_exc()
                rows.append({"kernel": name(item), "status": first_line(error), "ok": False})
            self._keep(rows, now=True)
        return rows

    def _keep(self, rows: list[Row], *, now: bool = False) -> None:
        """Write what there is, every second, for a section that does not live to its end."""
        if self._result is not None and (now or time.perf_counter() - self._kept > 1):
            self._kept = time.perf_counter()
            so_far = {"status": "failed", "reason": "ended before it was done", "rows": rows}
            self._result.write_text(json.dumps(so_far))


def first_line(error: Exception) -> str:
    """Return an error's type and the first line of its text."""
    text = str(error).strip() or repr(error)
    return f"{type(error).__name__}: {text.splitlines()[0]}"
