"""The rows of gpu_check about products of a few rows, on the CPU."""

from __future__ import annotations

import pytest
import torch
from gpu import few_rows

from kiln.jit_kernels.implementations import run_reference
from kiln.jit_kernels.ops.linear.spec import SKINNY_GEMM

SIZE = (24, 256)


@pytest.fixture(autouse=True)
def compilers(environment, monkeypatch):
    """Kernels on the CPU; torch's operations in the place of what Triton and Inductor compile."""

    def by_row(a):
        for row in range(len(a.x)):
            own = {
                name: getattr(a, name)[row : row + 1]
                for name in ("x", "x_scales", "out")
                if getattr(a, name) is not None
            }
            run_reference(SKINNY_GEMM, a._replace(**own))

    compiled = []
    environment(KILN_CPU_KERNELS="host")
    monkeypatch.setattr(few_rows, "triton_form", lambda family, name, variant: by_row)
    monkeypatch.setattr(torch, "compile", lambda run, **how: compiled.append(how) or run)
    monkeypatch.setattr(few_rows, "COMPILED", (SIZE,))
    monkeypatch.setattr(few_rows, "_ROUNDS", 2)
    few_rows._compiled.cache_clear()
    yield compiled
    few_rows._compiled.cache_clear()


@pytest.mark.parametrize("form", few_rows.FORMS)
def test_the_bits_of_a_row_alone_are_those_among_others(form, compilers):
    rows = few_rows.rows_of_form(form, SIZE, "cpu", 1.0)
    assert [row["rows"] for row in rows] == list(few_rows.ROWS)
    assert all(row["ok"] for row in rows)
    for row in rows:
        timed = {name.removesuffix("_us") for name in row if name.endswith("_us")}
        more = {"triton", "inductor"} if form == "bf16" else {"triton"}
        more = set() if form in few_rows.OF_4_BITS else more
        assert timed == {"kernel", "torch"} | (more if row["rows"] in (1, 8) else set())
        assert all(row[f"{name}_us"] > 0 for name in timed)
    assert bool(compilers) == (form == "bf16")
    assert all(how["options"]["coordinate_descent_tuning"] for how in compilers)


@pytest.mark.parametrize("name", ["kernel", "triton"])
def test_bits_that_differ_are_told(monkeypatch, name):
    run = few_rows._run
    monkeypatch.setattr(
        few_rows, "_run", lambda *call: run(*call) + (len(call[1]) == 1 and call[2] == name)
    )
    assert not any(row["ok"] for row in few_rows.rows_of_form("bf16", SIZE, "cpu", 1.0))
