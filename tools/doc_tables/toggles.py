"""The table of the KILN_ variables, from ``kiln.cache.env``."""

from __future__ import annotations

from doc_tables.markdown import code, sentence, table
from kiln.cache.env import Env, Variable, describe
from kiln.jit_kernels.declare.families import families


def toggles() -> str:
    """Return every variable: its default, and its values and meaning."""
    return table(("variable", "default", "meaning"), map(_row, describe([], Env())))


def family_toggles() -> str:
    """Return the toggle of each kernel family, and the values that it takes."""
    rows = [row for row in describe(families(), Env()) if row.name not in _own_names()]
    return table(
        ("variable", "kernels", "values"),
        ((code(row.name), row.name.removeprefix("KILN_").lower(), _values(row)) for row in rows),
    )


def _own_names() -> set[str]:
    return {row.name for row in describe([], Env())}


def _row(row: Variable) -> tuple[str, str, str]:
    values = f" Values: {_values(row)}." if row.values else ""
    return code(row.name), code(row.default) if row.default else "", sentence(row.help) + values


def _values(row: Variable) -> str:
    return code(*row.values.split(" | "))
