"""The rows of gpu_check about products of more rows and of experts, on the CPU."""

from __future__ import annotations

import pytest
from gpu import expert_rows, more_rows
from gpu.expert_rows import Case
from gpu.few_rows import OF_4_BITS

SIZE = (24, 256)
CASES = (
    Case("bf16", 6, 24, 64, 3),
    Case("mxfp4", 6, 24, 160, 2),
    Case("fp8 block, groups of 128", 4, 24, 256, 2),
)


@pytest.fixture(autouse=True)
def kernels(environment, monkeypatch):
    """Kernels on the CPU, with few rounds."""
    environment(KILN_CPU_KERNELS="host")
    for module in (more_rows, expert_rows):
        monkeypatch.setattr(module, "_ROUNDS", 2)
    monkeypatch.setattr(expert_rows, "_BATCHES", 2)


@pytest.mark.parametrize("form", more_rows.FORMS)
def test_products_of_more_rows_are_right_and_timed(form):
    rows = more_rows.rows_of_form(form, SIZE, "cpu")
    wanted = more_rows.ROWS if form in OF_4_BITS else more_rows.FEWER_ROWS
    assert [row["rows"] for row in rows] == list(wanted)
    assert all(row["ok"] for row in rows)
    for row in rows:
        assert all(row[f"{name}_us"] > 0 for name in ("kernel", "torch", "bf16"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.form)
def test_products_of_experts_are_right_and_timed(case):
    rows = expert_rows.rows_of_case(case, "cpu")
    assert [row["tokens"] for row in rows] == list(expert_rows.TOKENS)
    assert all(row["ok"] for row in rows)
    more = {"quantized"} if case.form != "bf16" else set()
    for row in rows:
        timed = {name.removesuffix("_us") for name in row if name.endswith("_us")}
        assert timed == {"kernel", "torch"} | more
        assert all(row[f"{name}_us"] > 0 for name in timed)


def test_every_form_of_experts_is_tested():
    assert {case.form for case in CASES} == {case.form for case in expert_rows.CASES}
    assert {case.form for case in CASES} == {*expert_rows.FORMS}


def test_rows_are_sorted_by_experts_that_differ():
    case = CASES[0]
    batch = expert_rows._batch(case, 5, "cpu")
    assert len(batch.x) == int(batch.ends[-1]) == 5 * case.top_k
    begins = [0, *batch.ends.tolist()]
    for row, expert in enumerate(batch.experts.tolist()):
        assert begins[expert] <= row < begins[expert + 1]
        alone = batch.alone(row)
        assert alone.ends.tolist() == [int(number >= expert) for number in range(case.experts)]
    assert len({tuple(row) for row in batch.x.tolist()}) == 5


@pytest.mark.parametrize("fault", ["value", "bits"])
@pytest.mark.parametrize("module", [more_rows, expert_rows])
def test_what_is_wrong_is_told(monkeypatch, module, fault):
    """A value that is off, and bits of a row that depend on whether it is alone."""
    if module is more_rows:
        kernel = more_rows._kernel

        def wrong(weight, x, out):
            kernel(weight, x, out)
            if fault == "value":
                out[-1] *= 1.1
            elif len(x) == 1:
                out[0, 0] += 1e-3 * out[0, 0].abs() + 1e-3

        monkeypatch.setattr(more_rows, "_kernel", wrong)
        rows = more_rows.rows_of_form("mxfp4", SIZE, "cpu")
    else:
        few = expert_rows._few

        def wrong_few(weight, batch):
            out = few(weight, batch)
            if fault == "value":
                out[-1] *= 1.1
            elif len(out) == 1:
                out[0, 0] += 0.02 * out[0, 0].abs() + 1e-3
            return out

        monkeypatch.setattr(expert_rows, "_few", wrong_few)
        rows = expert_rows.rows_of_case(CASES[1], "cpu")
    assert not any(row["ok"] for row in rows)
