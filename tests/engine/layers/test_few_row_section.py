"""The rows of gpu_check about products of a few rows, on the CPU."""

from __future__ import annotations

import pytest
from gpu import few_rows


@pytest.mark.parametrize("form", few_rows.FORMS)
def test_the_bits_of_a_row_alone_are_those_among_others(form, environment):
    environment(KILN_CPU_KERNELS="host")
    rows = few_rows.rows_of_form(form, (24, 256), "cpu", 1.0)
    assert [row["rows"] for row in rows] == list(few_rows.ROWS)
    assert all(row["ok"] for row in rows)


def test_bits_that_differ_are_told(environment, monkeypatch):
    environment(KILN_CPU_KERNELS="host")
    run = few_rows._run
    monkeypatch.setattr(few_rows, "_run", lambda weight, x: run(weight, x) + (len(x) == 1))
    assert not any(row["ok"] for row in few_rows.rows_of_form("bf16", (24, 256), "cpu", 1.0))
