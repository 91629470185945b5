"""The result of every benchmark: JSON, a Markdown page, and plots."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kiln.engine.bench import machine, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
Plots = Mapping[str, Callable[["Figure"], None]]  # file name -> how to draw the figure
Draw = Callable[["Report", str, "Figure"], None]  # of a report, and the processor's name


def command_line(program: str) -> str:
    """Return the command line of this process, with ``program`` as the program's name."""
    return shlex.join([program, *sys.argv[1:]])


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True)
class Report:
    """The measurements of a benchmark, and the facts needed to repeat it.

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
        """Return the fields, those of ``details`` at the top level; empty ones are left out."""
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
        """Return a page: title, remark, provenance of the numbers, then ``blocks``."""
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
        """Write NAME.json, the plots, and NAME.md if there is a text; return the paths.

        Without matplotlib it writes no plots and says so on stderr.
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
            paths.append(folder / file)
            style.save(draw, paths[-1])
        return paths

    def write_named(self, folder: Path, text: str, draw: Draw) -> list[Path]:
        """Write JSON, page and plot, named for model, device and ranks; return the paths."""
        name = f"{self.benchmark}-{self.details['model']}-{self.place}"
        name += f"-tp{self.ranks}" * (self.ranks > 1)
        name = re.sub(r"[^\w.-]+", "-", name)
        return self.write(folder, name, text, {f"{name}.png": partial(draw, self, self.processor)})

    @property
    def place(self) -> str:
        """Where the model ran: "cpu" or "gpu"."""
        on_cpu = self.details.get("device") == "cpu" or self.hardware["gpu"] == "none"
        return "cpu" if on_cpu else "gpu"

    @property
    def ranks(self) -> int:
        """How many processes shared the model."""
        return int(self.details.get("limits", {}).get("tensor_parallel_size", 1))

    @property
    def processor(self) -> str:
        """The name of the processor that the model ran on, with their number."""
        name = str(self.hardware[self.place])
        return f"{self.ranks} × {name}" if self.ranks > 1 and self.place == "gpu" else name

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Report:
        """Return the report that ``to_json`` gave."""
        names = [field.name for field in fields(cls) if field.name != "details"]
        own = {name: content[name] for name in names if name in content}
        return cls(**own, details={name: content[name] for name in content if name not in own})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON in the layout of every record; create the folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def over(above: float | None, below: float | None) -> float | None:
    """Return a quotient, if both numbers are known."""
    return None if above is None or below is None else above / below


def grouped(rows: Iterable[Row], name: str) -> dict[Any, list[Row]]:
    """Return the rows by the value of a field, both in order."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[name], []).append(row)
    return groups


def with_ratio(rows: Iterable[Row], *case: str, speed: str = "output_tokens_per_s") -> list[Row]:
    """Return the rows with ``ratio``: the first engine's speed divided by that of another.

    ``case``: the fields in which the two rows must be equal. The ratio is None in the first
    engine's own rows, and where a speed is not known.
    """

    def case_of(row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in case)

    rows = list(rows)
    first = rows[0]["engine"]
    speeds = {case_of(row): row[speed] for row in rows if row["engine"] == first}

    def ratio(row: Row) -> float | None:
        return None if row["engine"] == first else over(speeds.get(case_of(row)), row[speed])

    return [{**row, "ratio": ratio(row)} for row in rows]


def table(columns: Mapping[str, str], rows: Iterable[Row]) -> str:
    """Return rows as a Markdown table.

    ``columns``: title -> format of a row's fields, such as ``{"wall s": "{seconds:.3f}"}``. A
    cell is "–" if the row's field is missing or None.
    """
    return grid(list(columns), [[_cell(form, row) for form in columns.values()] for row in rows])


def grid(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, numbers right-aligned; "" without lines."""
    if not lines:
        return ""
    rules = [
        "---:"
        if all(cell.lstrip("+-")[:1].isdigit() or cell in ("–", "") for cell in column)
        else "---"
        for column in zip(*lines, strict=True)
    ]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (titles, rules, *lines))


def _cell(form: str, row: Row) -> str:
    try:
        return form.format_map({name: value for name, value in row.items() if value is not None})
    except KeyError:
        return "–"
