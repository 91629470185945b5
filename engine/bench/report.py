"""The one form of a benchmark's result: JSON, a Markdown page, and plots."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kiln.engine.bench import machine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
Plots = Mapping[str, Callable[["Figure"], None]]  # file name -> what draws on an empty figure


def command_line(program: str) -> str:
    """Return the command that started this process, where ``program`` is the name to call it by."""
    return shlex.join([program, *sys.argv[1:]])


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True)
class Report:
    """What a benchmark measured, and what is needed to judge it and to repeat it.

    ``rows``: one measurement each. ``load``: the settings of the run, such as the number of
    prompts. ``details``: further fields of the JSON, such as a machine's ceilings. ``remark``: a
    warning that must be read with every number. ``date``: UTC, ISO 8601.
    """

    benchmark: str
    command: str
    rows: Sequence[Row] = ()
    load: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    remark: str = ""
    hardware: Mapping[str, Any] = field(default_factory=machine.hardware)
    versions: Mapping[str, str] = field(default_factory=machine.versions)
    date: str = field(default_factory=_now)

    def to_json(self) -> dict[str, Any]:
        """Return the fields, ``details`` spread among them; load, remark and rows if not empty."""
        optional = {"load": self.load, "remark": self.remark, "rows": self.rows}
        return {
            "benchmark": self.benchmark,
            **self.details,
            **{name: value for name, value in optional.items() if value},
            "hardware": self.hardware,
            "versions": self.versions,
            "command": self.command,
            "date": self.date,
        }

    def markdown(self, title: str, *blocks: str) -> str:
        """Return a page: title and remark, where the numbers come from, then blocks of text."""
        cores = self.hardware["cores"]
        parts = (self.hardware["cpu"], cores and f"{cores} cores", f"GPU: {self.hardware['gpu']}")
        where = ", ".join(filter(None, parts))  # a record may lack the CPU
        packages = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        provenance = f"{where}. {packages}. {self.date}: `{self.command}`"
        head = f"# {title}" + (f": {self.remark}" if self.remark else "")
        return "\n\n".join(filter(None, [head, provenance, *blocks]))

    def write(
        self, folder: Path, name: str, text: str = "", plots: Plots | None = None
    ) -> list[Path]:
        """Write NAME.json, NAME.md if there is a text, and the plots; return the paths.

        Without matplotlib there are no plots, and a line on stderr says so.
        """
        paths = [folder / f"{name}.json"]
        write_json(paths[0], self.to_json())
        if text:
            paths.append(folder / f"{name}.md")
            paths[-1].write_text(text + "\n", encoding="utf-8")
        if plots and importlib.util.find_spec("matplotlib") is None:
            print("no plots: matplotlib is not installed", file=sys.stderr)
            return paths
        for file, draw in (plots or {}).items():
            from matplotlib.figure import Figure

            figure = Figure(layout="constrained")
            draw(figure)
            paths.append(folder / file)
            figure.savefig(paths[-1], dpi=110)
        return paths


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON in the layout of every record, into a folder that need not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def table(columns: Mapping[str, str], rows: Iterable[Row]) -> str:
    """Return rows as a Markdown table.

    ``columns``: title -> a format of a row's fields, such as ``{"wall s": "{seconds:.3f}"}``; the
    cell is "–" where the row has no such field, or None.
    """
    return grid(list(columns), [[_cell(form, row) for form in columns.values()] for row in rows])


def grid(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return cells as a Markdown table, columns of numbers to the right; "" without lines."""
    if not lines:
        return ""
    rules = [
        "---:" if all(cell[:1].isdigit() or cell in ("–", "") for cell in column) else "---"
        for column in zip(*lines, strict=True)
    ]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (titles, rules, *lines))


def _cell(form: str, row: Row) -> str:
    try:
        return form.format_map({name: value for name, value in row.items() if value is not None})
    except KeyError:
        return "–"
