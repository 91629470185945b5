"""Chunked LoRA kernels on the host toolchain: rounding, chunk tables, and bits of a token alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from depth import at_depth

from kiln.jit_kernels.declare.parity import expected, poisoned_inputs
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import DTYPES, HOST_GPU
from kiln.jit_kernels.ops.lora.functions import PoolTables
from kiln.jit_kernels.ops.lora_chunked import cases
from kiln.jit_kernels.ops.lora_chunked.chunks import LARGE, SMALL, chunk_size, num_chunks
from kiln.jit_kernels.ops.lora_chunked.functions import (
    ChunkTable,
    lora_chunked_expand,
    lora_chunked_shrink,
    make_chunks,
)
from kiln.jit_kernels.ops.lora_chunked.spec import (
    LORA_CHUNKED_EXPAND,
    LORA_CHUNKED_SHRINK,
    shrink_warps,
)
from kiln.jit_kernels.toolchains import host

ROOT = Path(__file__).resolve().parents[2]
# Of all tokens together: the rounding of a bf16 sum, and of float32.
MOST = {torch.float32: 1e-5, torch.float16: 5e-4, torch.bfloat16: 2.5e-3}
SPECS = (LORA_CHUNKED_SHRINK, LORA_CHUNKED_EXPAND)
VARIANTS = list(LORA_CHUNKED_EXPAND.variants())


def named(variant):
    return "-".join(variant.values()).removeprefix("kiln::")


def run(spec, a):
    kernel = host.load(spec, spec.bind(a).variant, checked=False, env=settings())
    host.launch(kernel, spec, a)


@pytest.mark.parametrize("variant", VARIANTS, ids=named)
def test_shrink_and_expand_are_within_the_rounding_of_their_dtype(variant):
    for sizes in cases.EXPAND_SIZES[1:]:
        a = poisoned_inputs(LORA_CHUNKED_EXPAND, variant, sizes, "cpu")
        want = expected(LORA_CHUNKED_EXPAND, a)["out"]
        run(LORA_CHUNKED_EXPAND, a)
        error = (a.out.double() - want).norm() / want.norm()
        assert float(error) <= MOST[DTYPES[variant["scalar_t"]]], sizes
    for sizes in cases.SHRINK_SIZES[1:]:
        a = poisoned_inputs(LORA_CHUNKED_SHRINK, variant, sizes, "cpu")
        want = expected(LORA_CHUNKED_SHRINK, a)["h"]
        run(LORA_CHUNKED_SHRINK, a)
        written = ~want.isnan()
        error = (a.h.double() - want)[written].norm() / want[written].norm()
        assert float(error) <= 1e-5, sizes
        assert bool(a.h[~written].isnan().all()), "an element without a rank was written"


@pytest.mark.parametrize("lift", [0, 20, -20])
@pytest.mark.parametrize("scalar_t", ["kiln::fp16", "kiln::bf16"])
def test_h_keeps_sixteen_bits_of_what_it_has_in_float32(scalar_t, lift):
    """The sums before they are rounded: those of fp16 neither overflow nor lose small numbers."""
    sizes = {**cases.EXPAND_SIZES[3], "lift": lift}
    a = poisoned_inputs(LORA_CHUNKED_EXPAND, {"scalar_t": scalar_t, "chunk": "16"}, sizes, "cpu")
    a.out.zero_()
    a.scale_table.mul_(2.0**-10)
    a.adapter_pool.copy_(a.adapter_pool.sign())  # exact sums of h alone
    want = expected(LORA_CHUNKED_EXPAND, a)["out"]
    run(LORA_CHUNKED_EXPAND, a)
    of_one_rounding = 2.0**-11 if scalar_t == "kiln::fp16" else 2.0**-8
    error = ((a.out.double() - want).abs() / want.abs().clamp(min=2.0**-13)).max()
    assert float(error) <= of_one_rounding * 1.05


def per_token(a):
    """The arguments that have a row for each token, and the adapter slot of each token."""
    slots = torch.full((len(a.h),), -1, dtype=torch.int32)
    chunks = a.sorted_token_ids.view(len(a.chunk_slots), -1)
    for ids, slot in zip(chunks, a.chunk_slots.tolist(), strict=True):
        if slot >= 0:
            slots[ids[ids < len(slots)].long()] = slot
    own = {name: getattr(a, name).clone() for name in ("out", "h", "x") if name in a._fields}
    return own, slots


@pytest.mark.parametrize("scalar_t", list(DTYPES))
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_token_has_the_same_bits_alone_and_in_any_batch(spec, scalar_t):
    """And in chunks of any size, in any place of them."""
    chunks = [variant["chunk"] for variant in spec.variants({"scalar_t": scalar_t})]
    for sizes in spec.sizes[2 :: at_depth(3, 1)]:
        a = poisoned_inputs(spec, {"scalar_t": scalar_t, "chunk": chunks[-1]}, sizes, "cpu")
        (result,) = spec.parameters.results
        before, slots = per_token(a)
        run(spec, a)
        together = getattr(a, result)
        tokens = sizes["tokens"]
        orders = [[token] for token in range(0, tokens, 1 + tokens // 20)]
        orders += [torch.randperm(tokens).tolist() for _ in chunks]
        for order, chunk in zip(orders, [chunks[0]] * (len(orders) - 1) + chunks[-1:], strict=True):
            table = cases.chunks_of(slots[order], sizes["slots"], int(chunk))
            own = a._replace(
                **{name: tensor[order] for name, tensor in before.items()},
                sorted_token_ids=table[0],
                chunk_slots=table[1],
            )
            run(spec, own)
            got, want = getattr(own, result), together[order]
            bits = torch.int16 if got.dtype.itemsize == 2 else torch.int32
            assert torch.equal(got.contiguous().view(bits), want.contiguous().view(bits)), sizes


def test_the_spec_knows_the_constants_of_the_sources():
    source = (ROOT / "kernel_sources/lora_chunked/lora_chunked_shrink.cu").read_text()
    assert "kGroups = CHUNK == 16 ? 1 : 2;" in source
    for chunk, columns in ((SMALL, 8), (LARGE, 16)):
        sizes = {"tokens": 1, "slots": 1, "input_size": 1, "width": columns + 1}
        variant = {"scalar_t": "kiln::bf16", "chunk": str(chunk)}
        grid = LORA_CHUNKED_SHRINK.geometry(variant, sizes, HOST_GPU).grid
        assert grid == (1, 2, 1)
    assert f"kMostWarps = {shrink_warps(10**6, 2)};" in source
    assert "kStep = kMma ? 32 : 4;" in source
    source = (ROOT / "kernel_sources/lora_chunked/lora_chunked_expand.cu").read_text()
    assert "kWarps = 4," in source
    assert "kBlockColumns = 128," in source


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def table_of(slots, num_slots, chunk=SMALL):
    memory = ChunkTable.holding(len(slots), num_slots, torch.device("cpu"))
    table = memory.of(len(slots), chunk)
    make_chunks(slots, table)
    return table


def test_a_chunk_has_tokens_of_one_adapter_in_their_order():
    slots = int32(2, -1, 0, 2, *[1] * 17, 2)
    table = table_of(slots, 4)
    assert table.chunk == SMALL
    assert table.chunk_slots.tolist() == [0, 1, 1, 2, -1]
    ids = [
        [i for i in row if i < len(slots)] for row in table.sorted_token_ids.view(-1, 16).tolist()
    ]
    assert ids == [[2], list(range(4, 20)), [20], [0, 3, 21], []]
    assert torch.equal(table.sorted_token_ids, cases.chunks_of(slots, 4, SMALL)[0])


def test_the_grid_is_bounded_by_the_tokens_and_not_by_the_slots_alone():
    assert [num_chunks(tokens, 64, SMALL) for tokens in (0, 1, 2, 64, 256)] == [1, 1, 2, 64, 76]
    assert num_chunks(2048, 8, LARGE) == 39
    assert chunk_size(256, 2) == SMALL
    assert chunk_size(257, 2) == LARGE
    assert chunk_size(257, 4) == SMALL


def test_memory_for_many_tokens_holds_tables_of_fewer():
    memory = ChunkTable.holding(300, 3, torch.device("cpu"))
    for tokens, chunk in ((300, LARGE), (300, SMALL), (1, LARGE)):
        assert memory.of(tokens, chunk).chunk == chunk
    table = memory.of(5, SMALL)
    make_chunks(int32(0, 1, 0, 2, 1), table)
    assert table.chunk_slots.tolist() == [0, 1, 2]
    assert table.slot_ends.tolist() == [16, 32, 48]
    assert table.sorted_token_ids.data_ptr() == memory.sorted_token_ids.data_ptr()
    with pytest.raises(ValueError, match="sorted_token_ids"):
        memory.of(2000, LARGE)
    with pytest.raises(ValueError, match="chunk_slots"):
        memory.of(350, SMALL)


def one_adapter(dtype=torch.float32):
    """A pool with one adapter of rank 2 for 4 inputs and 3 outputs, and its A and B."""
    a, b = torch.randn(2, 4).to(dtype), torch.randn(2, 3).to(dtype)
    values = torch.cat((a.flatten(), b.flatten()))
    offsets = torch.tensor([[0]]), torch.tensor([[8]])
    return PoolTables(values, int32(2)[None], torch.tensor([[0.5]]), *offsets), a, b


def test_the_functions_compute_the_formula_on_strided_tensors():
    pool, a, b = one_adapter()
    x, base, h = torch.randn(4, 3).T, torch.randn(3, 5)[:, :3], torch.zeros(3, 2)
    out, table = base.clone(), table_of(int32(0, -1, 0), 1)
    lora_chunked_shrink(x, pool, table, h)
    lora_chunked_expand(h, pool, table, [3], out)
    want = base + 0.5 * (x @ a.T @ b) * torch.tensor([1.0, 0.0, 1.0])[:, None]
    torch.testing.assert_close(out, want)


TABLE = table_of(int32(0, 0, 0), 1)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"x": torch.zeros(3, 4).double()}, TypeError, "x is torch.float64"),
        ({"x": torch.zeros(3, 4).half()}, TypeError, "pool is torch.float32 but x is torch.float1"),
        ({"x": torch.zeros(20, 4)}, ValueError, r"sorted_token_ids is \[16\], want \[32\]"),
        ({"table": table_of(int32(0, 0, 0), 2)}, ValueError, r"sorted_token_ids is \[32\]"),
        ({"table": table_of(int32(0, 0, 0), 1, LARGE)}, ValueError, "64 tokens in float32"),
        ({"table": TABLE._replace(chunk_slots=int32(0, 0))}, ValueError, "chunks of 8 tokens"),
        ({"table": TABLE._replace(chunk_slots=torch.zeros(1))}, TypeError, "torch.int32 and torch"),
        ({"h": torch.zeros(2, 2)}, ValueError, r"h is \[2, 2\], want \[3, 2\]"),
        ({"h": torch.zeros(3, 2).half()}, TypeError, "h is torch.float16"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(change, error, says):
    arguments = {
        "x": torch.zeros(3, 4), "pool": one_adapter()[0], "table": TABLE, "h": torch.zeros(3, 2),
    }  # fmt: skip
    with pytest.raises(error, match=f"lora_chunked_shrink: .*{says}"):
        lora_chunked_shrink(**{**arguments, **change})


def test_what_expand_cannot_write_and_a_table_of_other_tokens_are_refused():
    pool, h = one_adapter()[0], torch.zeros(3, 2)
    for ends in ([], [2], [2, 3]):
        with pytest.raises(ValueError, match=r"lora_chunked_expand: part_ends are .* the last 3"):
            lora_chunked_expand(h, pool, TABLE, ends, torch.zeros(3, 3))
    with pytest.raises(ValueError, match="dense rows"):
        lora_chunked_expand(h, pool, TABLE, [3], torch.zeros(3, 3).T)
    four = pool._replace(ranks=int32(0, 0, 0, 2)[:, None])
    with pytest.raises(ValueError, match="at most 3 parts; rank_table has 4 rows"):
        lora_chunked_expand(h, four, TABLE, [0, 0, 0, 3], torch.zeros(3, 3))
    with pytest.raises(TypeError, match="int64"):
        make_chunks(torch.zeros(3).long(), TABLE)
    with pytest.raises(ValueError, match="want"):
        make_chunks(int32(*[0] * 17), TABLE)
