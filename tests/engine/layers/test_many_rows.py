"""Which kernel multiplies 4-bit weights with how many rows, whatever their groups."""

from __future__ import annotations

import pytest
import torch
from depth import at_depth
from product_runs import BOUND, error_of, in_any_order, int4, mxfp4, record

from kiln.engine.layers.many_rows import MOST_ROWS, many_row_kernels
from kiln.engine.layers.weight import Weight
from kiln.jit_kernels import implementations
from kiln.jit_kernels.compile.ready import ReadyGuard
from kiln.jit_kernels.ops.quantized_linear.spec import QUANTIZED_GEMM

INPUTS = {32: 288, 64: 192, 128: 384, 0: 256}  # of groups of so many, 0: of all
INT4 = at_depth(
    [(32, True), (64, False), (128, True), (0, False)],
    [(group, zeros) for group in INPUTS for zeros in (False, True)],
)
FORMS = {
    f"int4 {group}{', zero points' * zeros}": (group, zeros, INPUTS[group]) for group, zeros in INT4
} | {"mxfp4": (288,)}
# What no kernel reads is dequantised, whatever the rows are.
OTHERS = {
    "any order": lambda: (in_any_order(256), 256),
    "mxfp4 in blocks of 16": lambda: (mxfp4(272), 272),
    "int4 in groups of 16": lambda: (int4(32, True, 272), 272),
    "int4 in one group that does not end with a chunk": lambda: (int4(0, False, 200), 200),
}
SKINNY, QUANTIZED = "skinny_gemm", "quantized_gemm"


def made(name: str) -> tuple[Weight, int]:
    """Return the weights of FORMS, and their inputs."""
    own = FORMS[name]
    return (mxfp4(*own) if name == "mxfp4" else int4(*own)), own[-1]


@pytest.fixture
def runs(monkeypatch):
    """The kernels that have multiplied, and their rows."""
    torch.manual_seed(5)
    return record(monkeypatch)


def multiply(
    weight: Weight, inputs: int, rows: int, *, bias: bool = False, dtype=torch.bfloat16
) -> torch.Tensor:
    """Return a product that is as in float64."""
    x = torch.randn(rows, inputs).to(dtype)
    added = torch.randn(weight.out_features).to(dtype) if bias else None
    out = torch.full((rows, weight.out_features), torch.nan, dtype=dtype)
    weight.product(x, out, added)
    assert error_of(weight, x, out, added) < BOUND
    return out


@pytest.mark.parametrize("name", FORMS)
def test_the_number_of_rows_chooses_the_kernel(environment, runs, name):
    environment(KILN_CPU_KERNELS="host")
    weight, inputs = made(name)
    wanted = []
    for rows, kernel in (
        *((rows, SKINNY) for rows in (1, 3, 16)),
        *((rows, QUANTIZED) for rows in (17, 40, MOST_ROWS)),
        (MOST_ROWS + 1, None),
    ):
        multiply(weight, inputs, rows, bias=rows in (3, 40, MOST_ROWS + 1))
        wanted += [(kernel, rows)] if kernel else []
        assert runs == wanted


@pytest.mark.parametrize("name", OTHERS)
def test_what_no_kernel_reads_is_dequantised(environment, runs, name):
    environment(KILN_CPU_KERNELS="host")
    weight, inputs = OTHERS[name]()
    for rows in (2, 40):
        multiply(weight, inputs, rows, bias=True)
    assert not runs


@pytest.mark.parametrize("name", ["int4 32, zero points", "mxfp4"])
def test_toggles_and_dtypes_are_kept_to(environment, runs, name):
    weight, inputs = made(name)
    sizes = (2, 40)
    for toggles, kernels in (
        ({}, (SKINNY, QUANTIZED)),
        ({"KILN_LINEAR": "torch"}, (QUANTIZED, QUANTIZED)),
        ({"KILN_QUANTIZED_LINEAR": "torch"}, (SKINNY, None)),
        ({"KILN_LINEAR": "torch", "KILN_QUANTIZED_LINEAR": "torch"}, (None, None)),
    ):
        environment(KILN_LINEAR="auto", KILN_QUANTIZED_LINEAR="auto")
        environment(KILN_CPU_KERNELS="host", **toggles)
        runs.clear()
        for rows in sizes:
            multiply(weight, inputs, rows)
        wanted = zip(kernels, sizes, strict=True)
        assert runs == [(kernel, rows) for kernel, rows in wanted if kernel], toggles
    environment(KILN_LINEAR="auto", KILN_QUANTIZED_LINEAR="auto", KILN_CPU_KERNELS="torch")
    runs.clear()
    for rows in sizes:
        multiply(weight, inputs, rows)
    environment(KILN_CPU_KERNELS="host")
    for rows in sizes:
        multiply(weight, inputs, rows, dtype=torch.float32)
    assert not runs


@pytest.mark.parametrize("rows", [2, 40])
def test_a_variant_that_was_not_chosen_before_ready_is_not_compiled_then(
    environment, monkeypatch, runs, rows
):
    environment(KILN_CPU_KERNELS="host")
    weight, inputs = made("mxfp4")
    guard = ReadyGuard("warn")
    guard.declare_ready()
    with monkeypatch.context() as patch:
        patch.setattr(implementations, "ready_guard", lambda: guard)
        multiply(weight, inputs, rows)
        assert not runs
        assert not {SKINNY, QUANTIZED} & {key[1] for key in implementations._decided}
    multiply(weight, inputs, rows)
    assert [own for _, own in runs] == [rows]
    with monkeypatch.context() as patch:
        patch.setattr(implementations, "ready_guard", lambda: guard)
        multiply(weight, inputs, rows)
    assert [own for _, own in runs] == [rows] * 2, "what was chosen before runs"


def test_the_log_says_what_multiplies_how_many_rows(environment):
    for name in FORMS:
        assert made(name)[0].describe().endswith(", dequantised for each product")
        assert "gemm" not in made(name)[0].describe()
    environment(KILN_CPU_KERNELS="host")
    for name in FORMS:
        own = "up to 16 rows by skinny_gemm, more: up to 192 rows by quantized_gemm, "
        assert own in made(name)[0].describe()
    environment(KILN_CPU_KERNELS="host", KILN_QUANTIZED_LINEAR="torch")
    for name in FORMS:
        assert "up to 16 rows by skinny_gemm, more: dequantised" in made(name)[0].describe()


def test_only_models_with_codes_have_the_kernel(environment):
    environment(KILN_CPU_KERNELS="host")
    cpu, needs = torch.device("cpu"), {"scalar_t": "kiln::bf16", "group": ["32"]}
    for own in ("U4", "E2M1"):
        assert many_row_kernels(cpu, {**needs, "weight": ["Plain", own]}) == [QUANTIZED_GEMM]
    for own in ("E4M3", "I8"):
        own_needs = {**needs, "weight": ["Plain", own], "group": ["0"]}
        assert many_row_kernels(cpu, own_needs) == [QUANTIZED_GEMM]
    assert not many_row_kernels(cpu, {**needs, "weight": ["Plain"], "group": []})
    environment(KILN_CPU_KERNELS="host", KILN_QUANTIZED_LINEAR="torch")
    assert not many_row_kernels(cpu, {**needs, "weight": ["Plain", "U4"]})
