"""Format measured rows: a line for each kernel and size, a column for each other form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kiln.jit_kernels.bench.forms import OWN

Row = dict[str, Any]
HEAD = ("kernel", "sizes", "µs", "±", "achieved", "of floor")
MEASURED = "measured"


def side_by_side(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the column titles and the lines.

    The first columns are about Kiln's own kernel. Each other form has a column with its time
    divided by Kiln's: above 1.00 Kiln's is faster. "–": not measured.
    """
    others = [name for name in names_in(rows) if name not in OWN.values()]
    lines = []
    for case in cases_in(rows):
        by_name = {row["implementation"]: row for row in case}
        own = next((by_name[name] for name in OWN.values() if name in by_name), case[0])
        sizes = " ".join(f"{key}={value}" for key, value in own["sizes"].items())
        lines.append([own["kernel"], sizes, *_own_cells(own), *(
            _ratio(by_name.get(name, {})) for name in others
        )])  # fmt: skip
    return [*HEAD, *(f"{name} ÷ ours" for name in others)], lines


def remarks(rows: Iterable[Row]) -> list[str]:
    """Return notes on the rows, each once: what was not measured, and unusual conditions."""
    found = []
    for row in rows:
        what = f"{row['kernel']}, {row['implementation']}"
        if row["status"] != MEASURED:
            found.append(f"{what}: {row['status']}")
        elif row["implementation"] in OWN.values() and row["captured"] and not row["cold"]:
            found.append(f"{row['kernel']} at its small sizes: inputs warm in the L2 cache")
        elif row["implementation"] != "host" and not row["captured"] and row["cold"]:
            found.append(f"{what}: waits for the device, timed without a graph")
    return list(dict.fromkeys(found))


def names_in(rows: Iterable[Row]) -> list[str]:
    """Return the names of the forms in the rows, in order."""
    return list(dict.fromkeys(row["implementation"] for row in rows))


def cases_in(rows: Iterable[Row]) -> list[list[Row]]:
    """Return the rows grouped by kernel and size."""
    cases: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        cases.setdefault((row["kernel"], str(row["sizes"])), []).append(row)
    return list(cases.values())


def _own_cells(row: Row) -> list[str]:
    if row["status"] != MEASURED:
        return ["–", "–", "–", "–"]
    value, unit = (row["gb_s"], "GB/s") if row["bound"] == "memory" else (row["tflop_s"], "TFLOP/s")
    rate = f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    spread = f"{row['spread_us'] / row['median_us']:.1%}"
    return [f"{row['median_us']:.2f}", spread, rate, f"{row['share_of_floor']:.1%}"]


def _ratio(row: Row) -> str:
    ratio = row.get("times_ours")
    return "–" if ratio is None else f"{ratio:.2f}"
