"""Products of 17 to 64 rows with 8-bit weights: by quantized_gemm where torch would dequantise."""

from __future__ import annotations

import pytest
import torch
from product_runs import BOUND, error_of, record, stacked

from kiln.engine.layers import block_weight, channel_weight
from kiln.engine.layers.block_weight import BlockGroupWeight, BlockWeight
from kiln.engine.layers.channel_weight import ChannelWeight, StaticWeight, TokenWeight
from kiln.engine.layers.many_rows import MOST_ROWS_OF_BYTES

OUTPUTS, INPUTS = 136, 208
QUANTIZED = "quantized_gemm"
FP8, INT8 = torch.float8_e4m3fn, torch.int8
PATCHED = ((channel_weight, "has_rows"), (block_weight, "has_blocks"))


def _codes(dtype: torch.dtype, inputs: int) -> torch.Tensor:
    if dtype == INT8:
        return torch.randint(-128, 128, (OUTPUTS, inputs), dtype=INT8)
    return torch.randn(OUTPUTS, inputs).to(FP8)


def _scales(*size: int) -> torch.Tensor:
    return 0.01 + 0.1 * torch.rand(size)


def channel(kind, dtype, inputs=INPUTS):
    """Return random weights with a scale for each output."""
    more = (0.01 + 0.02 * torch.rand(1),) if kind is StaticWeight else ()
    return kind(_codes(dtype, inputs), _scales(OUTPUTS, 1), *more)


def block(kind, first=0, inputs=INPUTS):
    """Return random weights with a scale for each block; first: where in a block they begin."""
    return kind.of(_codes(FP8, inputs), _scales(3 if first else 2, 2), first)


FORMS = {
    "fp8": lambda: channel(ChannelWeight, FP8),
    "fp8 token": lambda: channel(TokenWeight, FP8),
    "fp8 static": lambda: channel(StaticWeight, FP8),
    "int8": lambda: channel(ChannelWeight, INT8),
    "int8 token": lambda: channel(TokenWeight, INT8),
    "int8 static": lambda: channel(StaticWeight, INT8),
    "block": lambda: block(BlockWeight),
    "block from the middle": lambda: block(BlockWeight, 100),
    "block group": lambda: block(BlockGroupWeight),
    "block group from the middle": lambda: block(BlockGroupWeight, 100),
}


@pytest.fixture
def runs(monkeypatch, environment):
    """The kernels that have multiplied, and their rows."""
    torch.manual_seed(7)
    environment(KILN_CPU_KERNELS="host")
    return record(monkeypatch)


def multiply(weight, rows, *, bias=False, dtype=torch.bfloat16, inputs=INPUTS):
    """Return a product that is as in float64, of activations that are rounded as they should be."""
    x = torch.randn(rows, inputs).to(dtype)
    added = torch.randn(OUTPUTS).to(dtype) if bias else None
    out = torch.full((rows, OUTPUTS), torch.nan, dtype=dtype)
    weight.product(x, out, added)
    assert error_of(weight, x, out, added) < BOUND
    return x, out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMS)
def test_rows_up_to_the_limit_run_the_kernel(runs, name, dtype):
    weight = FORMS[name]()
    sizes = (17, 40, MOST_ROWS_OF_BYTES)
    for rows in sizes:
        multiply(weight, rows, bias=rows == 40, dtype=dtype)
    assert runs == [(QUANTIZED, rows) for rows in sizes]
    multiply(weight, MOST_ROWS_OF_BYTES + 1, bias=True, dtype=dtype)
    assert len(runs) == len(sizes)


@pytest.mark.parametrize("name", FORMS)
def test_a_rows_bits_depend_on_no_other_row(environment, runs, name):
    environment(KILN_LINEAR="torch")
    weight = FORMS[name]()
    x, out = multiply(weight, 40)
    own = torch.empty(1, OUTPUTS, dtype=out.dtype)
    for row in (0, 17, 39):
        weight.product(x[row : row + 1].clone(), own, None)
        assert torch.equal(own.view(torch.int16), out[row : row + 1].view(torch.int16))
    assert runs == [(QUANTIZED, rows) for rows in (40, 1, 1, 1)]


@pytest.mark.parametrize("name", FORMS)
def test_toggle_and_float32_are_kept_to(environment, runs, name):
    weight = FORMS[name]()
    multiply(weight, 40, dtype=torch.float32)
    environment(KILN_QUANTIZED_LINEAR="torch")
    multiply(weight, 40)
    assert not runs


@pytest.mark.parametrize("dtype", [FP8, INT8])
def test_rows_that_the_kernel_cannot_read_are_dequantised(runs, dtype):
    weight = channel(ChannelWeight, dtype, inputs=200)
    multiply(weight, 40, inputs=200)
    assert not runs
    assert QUANTIZED not in weight.describe()


@pytest.mark.parametrize("name", FORMS)
def test_where_torch_has_the_product_the_kernel_is_for_experts_and_plain_activations(
    monkeypatch, runs, name
):
    for module, function in PATCHED:
        monkeypatch.setattr(module, function, lambda *given: True)
    weight = FORMS[name]()
    is_rounded = isinstance(weight, TokenWeight | StaticWeight | BlockGroupWeight)
    multiply(weight, 40)
    assert runs == ([] if is_rounded else [(QUANTIZED, 40)])
    assert (QUANTIZED in weight.describe()) != is_rounded
    together, _ = stacked(FORMS[name], 2)
    assert QUANTIZED in together.describe()


@pytest.mark.parametrize("name", FORMS)
def test_the_log_says_what_multiplies_how_many_rows(environment, runs, name):
    told = "up to 64 rows by quantized_gemm, more: dequantised for each product"
    assert FORMS[name]().describe().endswith(told)
    environment(KILN_QUANTIZED_LINEAR="torch")
    assert QUANTIZED not in FORMS[name]().describe()
    environment(KILN_QUANTIZED_LINEAR="auto", KILN_CPU_KERNELS="torch")
    assert FORMS[name]().describe().endswith(", dequantised for each product")
