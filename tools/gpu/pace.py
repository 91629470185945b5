"""Time limit of a section: after it, no new work is started and the rest is reported."""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from kiln.jit_kernels.declare.spec import KernelSpec

_Item = TypeVar("_Item")
Row = dict[str, Any]
Rows = Iterable[Row]
Share = tuple[int, int]  # (first item, step)


def chosen(args: argparse.Namespace, specs: Iterable[KernelSpec]) -> list[KernelSpec]:
    """Return the specs that ``--kernels`` names; all if it names none."""
    return [spec for spec in specs if not args.kernels or spec.name in args.kernels]


def share_of(text: str) -> Share:
    """Return the share that "1/4" names: the second of four."""
    own, of = text.split("/")
    return int(own), int(of)


class NotMeasured(Exception):
    """A section cannot run on this machine; the message gives the reason. This is no failure."""


class Pace:
    """The time limit of one section, in seconds; a third of it with ``--quick``."""

    def __init__(self, args: argparse.Namespace, seconds: float) -> None:
        self._seconds = seconds / 3 if args.quick else seconds
        self._begun = time.perf_counter()
        self._kept = self._begun
        self._result: Path | None = getattr(args, "result", None)
        self._section: str = getattr(args, "section", None) or ""
        self._share: Share = getattr(args, "share", (0, 1))

    def used(self) -> float:
        """Return the used share of the time; above 1 there is none left."""
        return (time.perf_counter() - self._begun) / max(self._seconds, 1e-9)

    def rows(
        self, items: Iterable[_Item], name: Callable[[_Item], str], work: Callable[[_Item], Rows]
    ) -> list[Row]:
        """Print the name of each item in this process's share and return the rows.

        An item that fails has a row too.
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
            except Exception as error:  # the other items are still measured
                traceback.print_exc()
                rows.append({"kernel": name(item), "status": first_line(error), "ok": False})
            self._keep(rows, now=True)
        return rows

    def _keep(self, rows: list[Row], *, now: bool = False) -> None:
        """Save the rows so far, at most once per second, in case the section is killed."""
        if self._result is not None and (now or time.perf_counter() - self._kept > 1):
            self._kept = time.perf_counter()
            so_far = {"status": "failed", "reason": "ended before it was done", "rows": rows}
            self._result.write_text(json.dumps(so_far))


def first_line(error: Exception) -> str:
    """Return an error's type and the first line of its text."""
    text = str(error).strip() or repr(error)
    return f"{type(error).__name__}: {text.splitlines()[0]}"
