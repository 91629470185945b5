"""LoRA kernels on the host toolchain: exact ranks, and bits that depend on no other token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kiln.jit_kernels.declare.spec import DTYPES
from kiln.jit_kernels.ops.lora import cases
from kiln.jit_kernels.ops.lora.functions import (
    PoolTables,
    lora_expand,
    lora_shrink,
    lora_shrink_embedding,
)
from kiln.jit_kernels.ops.lora.spec import (
    COLUMNS,
    LORA_EXPAND,
    LORA_SHRINK,
    TILE,
    shrink_threads,
    tile_of,
)
from kiln.jit_kernels.parity import expected, poisoned_inputs
from kiln.jit_kernels.settings import settings
from kiln.jit_kernels.toolchains import host

ROOT = Path(__file__).resolve().parents[2]
DTYPE_NAMES = list(DTYPES)
# Of all tokens together: the rounding of a bf16 sum, and of float32.
MOST = {torch.float32: 1e-5, torch.float16: 5e-4, torch.bfloat16: 2.5e-3}
PER_TOKEN = ("out", "h", "x", "token_slots")


def run(spec, a):
    kernel = host.load(spec, spec.bind(a).variant, checked=False, env=settings())
    host.launch(kernel, spec, a)


def test_the_cases_have_every_kind_of_rank():
    assert {0, 1, 3, 5, 16, 64, 128} == set(cases.RANKS[0][0])
    for sizes in (*cases.SHRINK_SIZES, *cases.EXPAND_SIZES):
        if sizes["ranks"] == 0:
            a = cases._of_tokens(sizes, "cpu")["token_slots"].tolist()
            assert {-1, *range(7)} == set(a)
            assert a[-1] == -1
    assert any(sizes["input_size"] % 2 for sizes in cases.SHRINK_SIZES)


@pytest.mark.parametrize("scalar_t", DTYPE_NAMES)
def test_shrink_and_expand_are_within_the_rounding_of_their_dtype(scalar_t):
    for sizes in cases.EXPAND_SIZES[1:]:
        a = poisoned_inputs(LORA_EXPAND, {"scalar_t": scalar_t}, sizes, "cpu")
        want = expected(LORA_EXPAND, a)["out"]
        run(LORA_EXPAND, a)
        error = (a.out.double() - want).norm() / want.norm()
        assert float(error) <= MOST[DTYPES[scalar_t]], sizes
    for sizes in cases.SHRINK_SIZES[1:]:
        a = poisoned_inputs(LORA_SHRINK, {"scalar_t": scalar_t}, sizes, "cpu")
        want = expected(LORA_SHRINK, a)["h"]
        run(LORA_SHRINK, a)
        written = ~want.isnan()
        error = (a.h.double() - want)[written].norm() / want[written].norm()
        assert float(error) <= 1e-5, sizes
        assert bool(a.h[~written].isnan().all()), "an element without a rank was written"


def test_steps_with_prompts_have_several_tokens_a_block():
    for sizes in (cases.SHRINK_SIZES, cases.EXPAND_SIZES):
        assert {tile_of(one["tokens"]) for one in sizes} == {1, TILE}
    header = (ROOT / "kernel_sources/lora/runs.cuh").read_text()
    assert f"kRunTokens = {TILE};" in header
    source = (ROOT / "kernel_sources/lora/lora_shrink.cu").read_text()
    assert f"kColumns = {COLUMNS}," in source
    assert f"kMostWarps = {shrink_threads(10**6, 4) // 32}," in source


@pytest.mark.parametrize("scalar_t", DTYPE_NAMES)
@pytest.mark.parametrize("spec", [LORA_SHRINK, LORA_EXPAND], ids=lambda spec: spec.name)
def test_a_token_has_the_same_bits_alone_and_in_any_batch(spec, scalar_t):
    for sizes in spec.sizes[2:]:
        a = poisoned_inputs(spec, {"scalar_t": scalar_t}, sizes, "cpu")
        (result,) = spec.parameters.results
        before = {name: getattr(a, name).clone() for name in PER_TOKEN if name in a._fields}
        run(spec, a)
        together = getattr(a, result)
        several = tile_of(sizes["tokens"]) > 1  # tokens a block, but one when they are alone
        orders = [[token] for token in range(0, sizes["tokens"], 11 if several else 1)]
        orders.append(torch.randperm(sizes["tokens"]).tolist())
        for order in orders:
            own = a._replace(**{name: tensor[order] for name, tensor in before.items()})
            run(spec, own)
            got, want = getattr(own, result), together[order]
            bits = torch.int16 if got.dtype.itemsize == 2 else torch.int32
            assert torch.equal(got.contiguous().view(bits), want.contiguous().view(bits)), sizes


def one_adapter(dtype=torch.float32):
    """A pool with one adapter of rank 2 for 4 inputs and 3 outputs, and its A and B."""
    a, b = torch.randn(2, 4).to(dtype), torch.randn(2, 3).to(dtype)
    tables = PoolTables(
        torch.cat((a.flatten(), b.flatten())),
        torch.tensor([[2]], dtype=torch.int32),
        torch.tensor([[0.5]]),
        torch.tensor([[0]]),
        torch.tensor([[8]]),
    )
    return tables, a, b


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def test_the_functions_compute_the_formula_on_strided_tensors():
    pool, a, b = one_adapter()
    x, base, h = torch.randn(4, 3).T, torch.randn(3, 5)[:, :3], torch.zeros(3, 2)
    out, slots = base.clone(), int32(0, -1, 0)
    lora_shrink(x, pool, slots, int32(0), h)
    lora_expand(h, pool, slots, int32(0), int32(0, 3), out)
    want = base + 0.5 * (x @ a.T @ b) * torch.tensor([1.0, 0.0, 1.0])[:, None]
    torch.testing.assert_close(out, want)
    lora_shrink_embedding(torch.tensor([3, 0, 1]), pool, slots, int32(0), h)  # A as [4, 2]
    torch.testing.assert_close(h[[0, 2]], a.view(4, 2)[[3, 1]])


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"x": torch.zeros(3, 4).double()}, TypeError, "x is torch.float64"),
        ({"x": torch.zeros(3, 4).half()}, TypeError, "pool is torch.float32 but x is torch.float1"),
        ({"token_slots": int32(0, 0)}, ValueError, r"token_slots is \[2\], want \[3\]"),
        ({"token_slots": torch.zeros(3).long()}, TypeError, "token_slots is torch.int64"),
        ({"rows": torch.zeros(1).long()}, TypeError, "rows is torch.int64"),
        ({"h": torch.zeros(2, 2)}, ValueError, r"h is \[2, 2\], want \[3, 2\]"),
        ({"h": torch.zeros(3, 2).half()}, TypeError, "h is torch.float16"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(change, error, says):
    arguments = {
        "x": torch.zeros(3, 4), "pool": one_adapter()[0], "token_slots": int32(0, 0, 0),
        "rows": int32(0), "h": torch.zeros(3, 2),
    }  # fmt: skip
    with pytest.raises(error, match=f"lora_shrink: {says}"):
        lora_shrink(**{**arguments, **change})


def test_what_expand_cannot_write_is_refused():
    pool, h, slots = one_adapter()[0], torch.zeros(3, 2), int32(0, 0, 0)
    with pytest.raises(ValueError, match=r"part_starts is \[3\], want \[2\]"):
        lora_expand(h, pool, slots, int32(0), int32(0, 2, 3), torch.zeros(3, 3))
    with pytest.raises(ValueError, match="dense rows"):
        lora_expand(h, pool, slots, int32(0), int32(0, 3), torch.zeros(3, 3).T)
    with pytest.raises(TypeError, match="int64"):
        lora_shrink_embedding(int32(0, 0, 0), pool, slots, int32(0), h)
