"""LoRA kernels on the host toolchain: exact ranks, and bits that depend on no other token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from depth import at_depth

from kiln.jit_kernels.declare.parity import error_of, expected, poisoned_inputs
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import DTYPES, HOST_GPU
from kiln.jit_kernels.ops.lora import cases, spec
from kiln.jit_kernels.ops.lora.functions import (
    PoolTables,
    lora_expand,
    lora_shrink,
    lora_shrink_embedding,
)
from kiln.jit_kernels.ops.lora.spec import LORA_EXPAND, LORA_SHRINK
from kiln.jit_kernels.ops.lora.split import COLUMNS, SLICES, make_workspace
from kiln.jit_kernels.ops.lora.tiles import (
    LARGE,
    MOST_SMALL,
    SMALL,
    Tiles,
    fill_tiles,
    num_elements,
    tile_of,
    tiles_in,
)
from kiln.jit_kernels.toolchains import host

SOURCES = Path(__file__).resolve().parents[2] / "kernel_sources/lora"
DTYPE_NAMES = list(DTYPES)
# Of all tokens together: the rounding of a bf16 sum, and of float32.
MOST = {torch.float32: 1e-5, torch.float16: 5e-4, torch.bfloat16: 2.5e-3}


def run(kernel, a, *, checked=False):
    host.run(kernel, a, checked=checked, env=settings())
    if kernel is LORA_SHRINK:
        assert not a.arrivals.any(), "counters must be zero for the next launch"


def result_of(kernel, a):
    (name,) = kernel.parameters.results
    return getattr(a, name)


def bits_of(tensor):
    return tensor.contiguous().view(torch.int16 if tensor.dtype.itemsize == 2 else torch.int32)


def slots_by_token(a, tokens):
    """The adapter slot of each token, -1 for none."""
    slots = torch.full((tokens,), -1, dtype=torch.int32)
    for slot, of_tile in zip(a.tile_slots.tolist(), a.tile_tokens, strict=True):
        slots[of_tile[of_tile >= 0].long()] = slot
    return slots


def test_the_cases_have_every_kind_of_rank_and_of_tile():
    assert {0, 1, 3, 5, 16, 64, 128} == set(cases.RANKS[0][0])
    counts = {SMALL: set(), LARGE: set()}
    for sizes in (*LORA_SHRINK.sizes, *LORA_EXPAND.sizes):
        slots = cases.token_slots(sizes)
        if sizes["ranks"] == 0 and sizes["tokens"] > 16:
            assert {-1, *range(7)} == set(slots)
        assert not slots or slots[-1] == -1 or len(slots) == 1
        counts[tile_of(len(slots))] |= {slots.count(slot) for slot in set(slots) - {-1}}
    assert {1, 16, 17, 33} <= counts[SMALL]
    assert max(counts[LARGE]) > LARGE
    inputs = [sizes["input_size"] for sizes in LORA_SHRINK.sizes]
    assert any(size % 2 for size in inputs)
    assert {1, 24} <= set(inputs)
    assert max(inputs) > 2 * 32 * 2 * 8 * SLICES  # batches of loads of a warp


@pytest.mark.parametrize("scalar_t", DTYPE_NAMES)
def test_shrink_and_expand_are_within_the_rounding_of_their_dtype(scalar_t):
    for sizes in LORA_EXPAND.sizes[1 :: at_depth(2, 1)]:
        a = poisoned_inputs(LORA_EXPAND, {"scalar_t": scalar_t}, sizes, "cpu")
        before, want = a.out.double(), expected(LORA_EXPAND, a)["out"]
        run(LORA_EXPAND, a)
        whole = want if "cancels" not in sizes else before  # of which the sums are a part
        error = (a.out.double() - want).norm() / whole.norm()
        assert float(error) <= MOST[DTYPES[scalar_t]], sizes
    for sizes in LORA_SHRINK.sizes[1 :: at_depth(2, 1)]:
        a = poisoned_inputs(LORA_SHRINK, {"scalar_t": scalar_t}, sizes, "cpu")
        want = expected(LORA_SHRINK, a)["h"]
        run(LORA_SHRINK, a)
        written = ~want.isnan()
        error = (a.h.double() - want)[written].norm() / want[written].norm()
        assert float(error) <= 1e-5, sizes
        assert bool(a.h[~written].isnan().all()), "an element without a rank was written"


@pytest.mark.parametrize("lift", [0, 20, -20])
@pytest.mark.parametrize("scalar_t", ["kiln::fp16", "kiln::bf16"])
def test_h_keeps_sixteen_bits_of_what_it_has_in_float32(scalar_t, lift):
    """The sums before they are rounded: those of fp16 neither overflow nor lose small numbers."""
    sizes = {**LORA_EXPAND.sizes[16], "lift": lift}
    a = poisoned_inputs(LORA_EXPAND, {"scalar_t": scalar_t}, sizes, "cpu")
    a.out.zero_()
    a.scale_table.mul_(2.0**-10)
    a.adapter_pool.copy_(a.adapter_pool.sign())  # exact sums of h alone
    want = expected(LORA_EXPAND, a)["out"]
    run(LORA_EXPAND, a)
    of_one_rounding = 2.0**-11 if scalar_t == "kiln::fp16" else 2.0**-8
    error = ((a.out.double() - want).abs() / want.abs().clamp(min=2.0**-13)).max()
    assert float(error) <= of_one_rounding * 1.05


def orders_of(kernel, scalar_t, sizes):
    """Batches of a step's tokens: alone, in another order, and in tiles of the other size."""
    tokens, large = sizes["tokens"], sizes["tokens"] > MOST_SMALL
    orders = [[token] for token in range(0, tokens, 11 if large else 1 + tokens // 20)]
    orders.append(torch.randperm(tokens).tolist())
    if large:
        orders.append(torch.randperm(tokens)[:MOST_SMALL].tolist())
    # In float32 the CPU takes seconds for a large step of a large shrink.
    elif scalar_t != "float" or kernel is LORA_EXPAND or sizes["input_size"] < 50:
        orders.append((torch.arange(MOST_SMALL + 1) % tokens).tolist())
    return orders


def with_rows(tensor, order):
    """Those rows of a tensor, with its stride between them."""
    rows = tensor.new_empty(len(order), tensor.stride(0))[:, : tensor.shape[1]]
    return rows.copy_(tensor[list(order)])


@pytest.mark.parametrize("scalar_t", DTYPE_NAMES)
@pytest.mark.parametrize("kernel", [LORA_SHRINK, LORA_EXPAND], ids=lambda kernel: kernel.name)
def test_a_token_has_the_same_bits_alone_and_in_any_batch(kernel, scalar_t):
    """Steps of up to 256 tokens use small tiles, with a block for each slice; others large ones."""
    for sizes in kernel.sizes[2 :: at_depth(3, 1)]:
        a = poisoned_inputs(kernel, {"scalar_t": scalar_t}, sizes, "cpu")
        every = range(sizes["tokens"])
        before = {n: with_rows(getattr(a, n), every) for n in ("out", "h", "x") if hasattr(a, n)}
        slots, num_slots = slots_by_token(a, sizes["tokens"]), cases.slots_of(sizes)
        run(kernel, a)
        together = result_of(kernel, a)
        for order in orders_of(kernel, scalar_t, sizes):
            own = {name: with_rows(tensor, order) for name, tensor in before.items()}
            own |= cases.tiles_of(slots[order].tolist(), num_slots, "cpu")
            if kernel is LORA_SHRINK:
                tiles = len(own["tile_slots"])
                own |= make_workspace(tiles, sizes["width"], "cpu")._asdict()
            alone = a._replace(**own)
            run(kernel, alone)
            got, want = result_of(kernel, alone), together[order]
            assert torch.equal(bits_of(got), bits_of(want)), (sizes, len(order))


def shifted(tensor, by=1):
    """A copy that begins ``by`` elements behind an aligned address, with rows of that stride."""
    rows = tensor.new_zeros((*tensor.shape[:-1], tensor.shape[-1] + 2 * by))
    view = rows.flatten()[by:].as_strided(tensor.shape, rows.stride())
    return view.copy_(tensor)


def second_part_moved(a):
    """The second part's A of each slot, one element behind an aligned address."""
    ranks, offsets, pool = a.rank_table[1].tolist(), a.a_table.clone(), [a.adapter_pool]
    end, size = len(a.adapter_pool), a.x.shape[1]
    for slot, rank in enumerate(ranks):
        if rank:
            start = int(offsets[1, slot])
            pool += [torch.zeros(1 + -end % 8), a.adapter_pool[start : start + rank * size]]
            offsets[1, slot] = end + 1 + -end % 8
            end += sum(map(len, pool[-2:]))
    return {"a_table": offsets, "adapter_pool": torch.cat(pool).to(a.adapter_pool.dtype)}


@pytest.mark.quick(3)
@pytest.mark.parametrize("scalar_t", ["kiln::fp16", "kiln::bf16"])
@pytest.mark.parametrize("index", [4, 6, 12])
def test_alignment_changes_no_bits(index, scalar_t):
    sizes = LORA_SHRINK.sizes[index]
    a = poisoned_inputs(LORA_SHRINK, {"scalar_t": scalar_t}, sizes, "cpu")
    run(LORA_SHRINK, a)
    changes = [
        {"x": shifted(a.x)},
        {"x": shifted(a.x, 4)},  # aligned rows at addresses that are not
        {"adapter_pool": shifted(a.adapter_pool)},
    ]
    if index == 4:
        changes.append(second_part_moved(a))
    for change in changes:
        other = a._replace(h=torch.full_like(a.h, float("nan")), **change)
        run(LORA_SHRINK, other, checked=True)
        assert torch.equal(bits_of(other.h), bits_of(a.h)), list(change)


@pytest.mark.parametrize("scalar_t", ["kiln::fp16", "kiln::bf16"])
def test_expand_adds_to_rows_at_any_address(scalar_t):
    """Rows that cannot be loaded in vectors take another path, with other sums."""
    variant = {"scalar_t": scalar_t}
    for sizes in (LORA_EXPAND.sizes[4], LORA_EXPAND.sizes[11]):
        a = poisoned_inputs(LORA_EXPAND, variant, sizes, "cpu")
        for change in ({}, {"out": shifted(a.out)}, {"adapter_pool": shifted(a.adapter_pool)}):
            other = a._replace(**{"out": a.out.clone(), **change})
            want = expected(LORA_EXPAND, other)
            run(LORA_EXPAND, other, checked=True)
            assert error_of(LORA_EXPAND, variant, other, want).holds, list(change)


def test_a_workspace_serves_launch_after_launch():
    a = poisoned_inputs(LORA_SHRINK, {"scalar_t": "kiln::bf16"}, LORA_SHRINK.sizes[7], "cpu")
    run(LORA_SHRINK, a)
    again = a._replace(h=torch.full_like(a.h, float("nan")), x=a.x.flip(0).contiguous())
    want = expected(LORA_SHRINK, again)["h"]
    run(LORA_SHRINK, again)
    assert torch.allclose(again.h.double(), want, 1e-5, 1e-5, equal_nan=True)


def test_the_spec_knows_the_constants_of_the_sources():
    text = {path.name: path.read_text() for path in SOURCES.iterdir()}
    assert f"kColumns = {COLUMNS};" in text["parts.cuh"]
    assert f"kMostParts = {spec.MOST_PARTS};" in text["parts.cuh"]
    assert f"kSlices = {SLICES};" in text["lora_shrink.cu"]
    assert f"kWarpColumns = {spec.WARP_COLUMNS};" in text["expand_fma.cuh"]
    sizes = {"outputs": 1, "parts": 1, "tiles": 1}
    threads = LORA_EXPAND.geometry({}, sizes, HOST_GPU).block[0]
    assert f"__launch_bounds__({threads}, " in text["lora_expand.cu"]


def test_a_block_of_shrink_keeps_to_its_threads_and_shared_memory():
    most_threads, most_bytes = 0, 0
    for input_size in (*range(1, 20_000, 31), 28672, 10**6):
        for tile in (SMALL, LARGE):
            sizes = {"input_size": input_size, "width": 48, "tiles": 2, "tile": tile}
            geometry = LORA_SHRINK.geometry({}, sizes, HOST_GPU)
            most_threads = max(most_threads, geometry.block[0])
            most_bytes = max(most_bytes, geometry.shared_bytes)
    assert most_bytes <= 48 * 1024
    assert f"__launch_bounds__({most_threads}, " in (SOURCES / "lora_shrink.cu").read_text()


@pytest.mark.parametrize("tokens", [1, 15, 256, 257, 600])
def test_tiles_have_each_token_once_with_its_adapter(tokens):
    rng = np.random.default_rng(tokens)
    for num_slots in (1, 3, 64):
        slots = rng.integers(-1, num_slots, tokens).astype(np.int32)
        numbers = np.empty(num_elements(tokens, num_slots), np.int32)
        fill_tiles(numbers, slots, tokens, num_slots)
        tiles = tiles_in(torch.from_numpy(numbers), tokens, num_slots)
        assert tiles.tokens.shape[1] == tile_of(tokens)
        seen = tiles.tokens[tiles.tokens >= 0]
        assert sorted(seen.tolist()) == np.flatnonzero(slots >= 0).tolist()
        for slot, of_tile in zip(tiles.slots.tolist(), tiles.tokens, strict=True):
            there = of_tile >= 0
            assert bool((there[:-1] >= there[1:]).all()), "padding is behind the tokens"
            assert set(slots[of_tile[there].numpy()]) == ({slot} if slot >= 0 else set())


def one_adapter(dtype=torch.float32):
    """A pool with one adapter of rank 2 for 4 inputs and 3 outputs, and its A and B."""
    a, b = torch.randn(2, 4).to(dtype), torch.randn(2, 3).to(dtype)
    tables = PoolTables(
        torch.cat((a.flatten(), b.flatten())),
        int32(2)[None],
        torch.tensor([[0.5]]),
        torch.tensor([[0]]),
        torch.tensor([[8]]),
    )
    return tables, a, b


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def tiles_with(*slots):
    return Tiles(*cases.tiles_of([*slots], 1, "cpu").values())


def test_the_functions_compute_the_formula_on_strided_tensors():
    pool, a, b = one_adapter()
    x, base, h = torch.randn(4, 3).T, torch.randn(3, 5)[:, :3], torch.zeros(3, 2)
    out, tiles = base.clone(), tiles_with(0, -1, 0)
    lora_shrink(x, pool, tiles, h, make_workspace(1, 2, "cpu"))
    lora_expand(h, pool, tiles, [3], out)
    want = base + 0.5 * (x @ a.T @ b) * torch.tensor([1.0, 0.0, 1.0])[:, None]
    torch.testing.assert_close(out, want)
    lora_shrink_embedding(torch.tensor([3, 0, 1]), pool, tiles, h)  # A as [4, 2]
    torch.testing.assert_close(h[[0, 2]], a.view(4, 2)[[3, 1]])


TILES = tiles_with(0, 0, 0)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"x": torch.zeros(3, 4).double()}, TypeError, "x is torch.float64"),
        ({"x": torch.zeros(3, 4).half()}, TypeError, "pool is torch.float32 but x is torch.float1"),
        ({"tiles": TILES._replace(tokens=torch.zeros(1, 32).int())}, ValueError,
         r"tiles.tokens is \[1, 32\], want \[1, 16\]"),
        ({"tiles": TILES._replace(slots=int32(0, 0))}, ValueError,
         r"tiles.tokens is \[1, 16\], want \[2, 16\]"),
        ({"tiles": TILES._replace(slots=torch.zeros(1).long())}, TypeError,
         "tiles.slots is torch.int64; want torch.int32"),
        ({"tiles": TILES._replace(tokens=TILES.tokens.long())}, TypeError,
         "tiles.tokens is torch.int64; want torch.int32"),
        ({"h": torch.zeros(2, 2)}, ValueError, r"h is \[2, 2\], want \[3, 2\]"),
        ({"h": torch.zeros(3, 2).half()}, TypeError, "h is torch.float16"),
        ({"workspace": make_workspace(1, 2, "cpu"), "h": torch.zeros(3, 17)}, ValueError,
         "the workspace has 1 arrivals; 1 tiles and 17 columns of h need 2"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_refused_by_name(change, error, says):
    arguments = {
        "x": torch.zeros(3, 4), "pool": one_adapter()[0], "tiles": TILES,
        "h": torch.zeros(3, 2), "workspace": make_workspace(1, 2, "cpu"),
    }  # fmt: skip
    with pytest.raises(error, match=f"lora_shrink: {says}"):
        lora_shrink(**{**arguments, **change})


def test_what_expand_cannot_write_is_refused():
    pool, h, out = one_adapter()[0], torch.zeros(3, 2), torch.zeros(3, 3)
    for ends in ([2, 3], [2], [4], []):
        with pytest.raises(ValueError, match="want 1 numbers in order, the last 3"):
            lora_expand(h, pool, TILES, ends, out)
    two = pool._replace(ranks=int32(2, 0)[:, None])
    with pytest.raises(ValueError, match=r"part_ends are \[4, 3\]"):
        lora_expand(h, two, TILES, [4, 3], out)
    with pytest.raises(ValueError, match="dense rows"):
        lora_expand(h, pool, TILES, [3], out.T)


def test_ids_and_sites_that_no_kernel_takes_are_refused():
    pool, h = one_adapter()[0], torch.zeros(3, 2)
    with pytest.raises(TypeError, match="int64"):
        lora_shrink_embedding(int32(0, 0, 0), pool, TILES, h)
    two = pool._replace(ranks=int32(2, 0)[:, None])
    with pytest.raises(ValueError, match=r"ranks is \[2, 1\], want \[1, 1\]"):
        lora_shrink_embedding(torch.zeros(3).long(), two, TILES, h)
    sizes = LORA_EXPAND.sizes[4]
    a = LORA_EXPAND.make_arguments({"scalar_t": "float"}, sizes, "cpu")
    with pytest.raises(ValueError, match="at most 3 parts; rank_table has 6 rows"):
        LORA_EXPAND.bind(a._replace(rank_table=torch.cat((a.rank_table, a.rank_table))))
