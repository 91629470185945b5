"""rope_store equals the operators that it replaces, bit for bit; copies; errors of both."""

from __future__ import annotations

import mmap

import pytest
import torch
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st

from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.ops.kv import spec as kv
from kiln.jit_kernels.ops.kv.checks import serves
from kiln.jit_kernels.ops.kv.functions import copy_blocks, rope_store
from kiln.jit_kernels.ops.kv.reference import store
from kiln.jit_kernels.ops.norm.functions import rms_norm
from kiln.jit_kernels.ops.rotary.functions import apply_rotary
from kiln.jit_kernels.ops.rotary.table import rotary_table
from kiln.jit_kernels.toolchains import host

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
E4M3 = torch.float8_e4m3fn
_MAP_NORESERVE = 0x4000  # of Linux: mmap lacks the name in Python 3.11


@pytest.fixture(scope="module")
def on_kernels():
    """Run every operator through its kernel's own source on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        for family in ("kv", "norm", "rotary"):
            patch.setattr(f"kiln.jit_kernels.ops.{family}.functions.call", run_kernel)
        yield


def run_kernel(spec, **named):
    a = spec.parameters.Arguments(**named)
    assert spec.has_variant(spec.bind(a).variant)
    host.run(spec, a, env=settings())


class Step:
    """The qkv projection of some tokens, their slots, and a pool of noise."""

    def __init__(self, dtype, tokens, heads, kv_heads, head_dim, rotary_dim, pool_dtype=None):
        self.counts = [heads, kv_heads, kv_heads]
        self.qkv = torch.randn(tokens, sum(self.counts), head_dim).to(dtype)
        self.positions = torch.randint(512, (tokens,))
        self.table = rotary_table(rotary_dim, 512, 10000.0) if rotary_dim else torch.empty(0, 0)
        blocks = -(-tokens // 16) + 2
        self.slots = torch.randperm(blocks * 16)[:tokens]
        pools = torch.randn(2, blocks, 16, kv_heads, head_dim).to(pool_dtype or dtype)
        self.pools = pools.transpose(2, 3)  # tokens outside of heads
        self.weights = [torch.randn(head_dim).add_(1).to(dtype) for _ in range(2)]

    def fused(self, norm, scales=(1.0, 1.0), out=None, **rounding):
        """The query, and the bytes of the pools."""
        qkv, pools = self.qkv.clone(), self.pools.clone()
        query, key, value = torch.split(qkv, self.counts, dim=1)
        weights = dict(zip(("query_weight", "key_weight"), self.weights, strict=True))
        result = rope_store(
            query, key, value, self.positions, self.table, self.slots, *pools,
            k_scale=scales[0], v_scale=scales[1], out=out, **(weights if norm else {}), **rounding,
        )  # fmt: skip
        if out is None:
            assert result.data_ptr() == query.data_ptr()
        untouched = (x[:, self.counts[0] :].view(torch.uint8) for x in (qkv, self.qkv))
        assert torch.equal(*untouched)
        return result, pools.view(torch.uint8)

    def chain(self, norm, scales=(1.0, 1.0), **rounding):
        """The same through separate operators."""
        pools = self.pools.clone()
        query, key, value = (part.contiguous() for part in torch.split(self.qkv, self.counts, 1))
        if norm:
            query, key = (
                rms_norm(query, self.weights[0], 1e-6, **rounding),
                rms_norm(key, self.weights[1], 1e-6, **rounding),
            )
        if self.table.shape[1]:
            apply_rotary(self.positions, query, key, self.table)
        for pool, x, scale in zip(pools, (key, value), scales, strict=True):
            store(pool, self.slots, x, scale)
        return query, pools.view(torch.uint8)


@trials(max_examples=40, deadline=None)
@given(
    kinds=st.sampled_from([(dtype, dtype) for dtype in DTYPES] + [(torch.bfloat16, E4M3)] * 2),
    tokens=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    head_dim=st.sampled_from([16, 64, 80, 96, 128, 256]),
    norm=st.booleans(),
    rounding=st.sampled_from([{}, {"round_once": True}, {"weight_offset": 1.0}]),
    rotated=st.sampled_from(["all", "some", "none"]),
    seed=st.integers(0, 2**32),
)
def test_is_norm_then_rotation_then_copy_bit_for_bit(
    on_kernels, kinds, tokens, kv_heads, group, head_dim, norm, rounding, rotated, seed
):
    torch.manual_seed(seed)
    rotary_dim = {"all": head_dim, "some": 16, "none": 0}[rotated]
    step = Step(kinds[0], tokens, kv_heads * group, kv_heads, head_dim, rotary_dim, kinds[1])
    scales = (0.31, 1.7) if kinds[1] == E4M3 else (1.0, 1.0)
    got, want = step.fused(norm, scales, **rounding), step.chain(norm, scales, **rounding)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_with_torch_and_writes_only_its_slots(on_kernels, dtype):
    step = Step(dtype, 6, 4, 2, 64, 64)
    step.slots[2] = -1
    query, pools = step.fused(norm=True)
    wanted = step.pools.clone()
    cosines, sines = step.table.index_select(0, step.positions).double().unsqueeze(1).chunk(2, -1)

    def turned(x, weight):
        x = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
        a, b = (x * weight.double()).chunk(2, -1)
        return torch.cat((a * cosines - b * sines, b * cosines + a * sines), -1)

    wide = [
        turned(x, w)
        for x, w in zip(torch.split(step.qkv, step.counts, 1), step.weights, strict=False)
    ]
    bound = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(query.double(), wide[0], rtol=bound, atol=bound)
    kept = [0, 1, 3, 4, 5]
    blocks, places = step.slots[kept] // 16, step.slots[kept] % 16
    got = pools.view(dtype)
    stored = got[0][blocks, :, places].double()
    torch.testing.assert_close(stored, wide[1][kept], rtol=bound, atol=bound)
    assert torch.equal(got[1][blocks, :, places], step.qkv[kept, 6:])
    for pool, old in zip(got, wanted, strict=True):
        pool[blocks, :, places] = old[blocks, :, places]
    assert torch.equal(got, wanted), "a slot that nobody named has changed"


def test_the_query_may_go_elsewhere(on_kernels):
    step = Step(torch.bfloat16, 3, 2, 1, 64, 64)
    out = torch.full((3, 3, 64), float("nan")).bfloat16()
    result, _ = step.fused(norm=False, out=out[:, :2])
    assert result.data_ptr() == out.data_ptr()
    assert torch.equal(out[:, :2], step.chain(norm=False)[0])
    assert out[:, 2:].isnan().all()


def test_fp8_saturates_and_keeps_nan(on_kernels):
    step = Step(torch.bfloat16, 1, 1, 1, 16, 16, E4M3)
    step.positions[0] = 0  # an angle of zero
    step.qkv[0, 1, :4] = torch.tensor([1e9, -1e9, 448.0, float("nan")])
    got = step.fused(norm=False, scales=(0.5, 1.0))[1].view(E4M3)[0]
    stored = got[step.slots[0] // 16, 0, step.slots[0] % 16, :4].float()
    assert stored[:3].tolist() == [448.0, -448.0, 448.0]
    assert stored[3].isnan()


def sparse(num_bytes):
    """Sparse memory: only accessed pages exist."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags), dtype=torch.uint8)


def test_slots_beyond_2_to_the_31_elements(on_kernels):
    blocks, dim = 2**20, 128
    pools = sparse(blocks * 2 * 16 * dim * 2).view(torch.bfloat16).view(blocks, 2, 1, 16, dim)
    step = Step(torch.bfloat16, 2, 1, 1, dim, dim)
    step.slots = torch.tensor([17, (blocks - 1) * 16 + 5])
    step.positions[:] = 0
    query, key, value = torch.split(step.qkv.clone(), step.counts, dim=1)
    rope_store(query, key, value, step.positions, step.table, step.slots, pools[:, 0], pools[:, 1])
    for token, block, place in ((0, 1, 1), (1, blocks - 1, 5)):
        assert torch.equal(pools[block, 0, 0, place], step.qkv[token, 1])
        assert torch.equal(pools[block, 1, 0, place], step.qkv[token, 2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, E4M3])
def test_blocks_are_copied_in_every_pool_and_nowhere_else(on_kernels, dtype):
    whole = torch.randn(3, 2, 6, 4, 16, 8).to(dtype)  # layers, key or value, blocks, ...
    before = whole.clone().view(torch.uint8)
    copy_blocks(whole.flatten(0, 1), torch.tensor([[5, 0], [-1, 3], [2, 1]]))
    after = whole.view(torch.uint8)
    for target, source in enumerate([5, 2, 2, 3, 4, 5]):
        assert torch.equal(after[:, :, target], before[:, :, source])


def test_more_pairs_than_a_grid_takes_are_copied(on_kernels, monkeypatch):
    monkeypatch.setattr(kv, "_MOST_PAIRS", 2)
    pool = torch.randn(2, 10, 16).bfloat16()
    before = pool.clone()
    copy_blocks(pool, torch.tensor([[i + 5, i] for i in range(5)]))
    assert torch.equal(pool[:, :5], before[:, 5:])


def test_copies_far_apart(on_kernels):
    pools = sparse(2**33).view(torch.bfloat16).view(2, 2**16, 2**15)
    pools[:, 7] = torch.randn(2, 2**15).bfloat16()
    copy_blocks(pools, torch.tensor([[7, 2**16 - 1]]))
    assert torch.equal(pools[:, -1], pools[:, 7])


def test_copies_nothing_of_nothing(on_kernels):
    pairs = torch.empty(0, 2, dtype=torch.int64)
    copy_blocks(torch.empty(0, 3, 16), pairs)
    pool = torch.ones(1, 2, 16)
    copy_blocks(pool, pairs)
    assert torch.equal(pool, torch.ones(1, 2, 16))


def test_says_which_heads_it_serves():
    assert serves(128, 128)
    assert serves(80, 32)
    assert not serves(128, 24), "a vector would straddle the halves"
    assert not serves(100, 32)
    assert not serves(512, 512)


def call_with(**changed):
    step = Step(torch.float32, 2, 2, 1, 32, 32)
    query, key, value = torch.split(step.qkv, step.counts, dim=1)
    given = {
        "query": query, "key": key, "value": value, "positions": step.positions,
        "cos_sin_table": step.table, "slot_mapping": step.slots, "key_pool": step.pools[0],
        "value_pool": step.pools[1],
    }  # fmt: skip
    given |= {name: change(given.get(name)) for name, change in changed.items()}
    rope_store(**given)


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"value": lambda x: x[:, :, :16]}, ValueError, "value is"),
        ({"query": lambda x: x[1:]}, ValueError, "query is"),
        ({"query": lambda x: x.half()}, TypeError, "float16"),
        ({"key": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2)}, ValueError, "key"),
        ({"positions": lambda x: x.int()}, TypeError, "positions is torch.int32"),
        ({"slot_mapping": lambda x: x[:1]}, ValueError, "slot_mapping"),
        ({"cos_sin_table": lambda x: x.double()}, TypeError, "cos_sin_table is torch.float64"),
        ({"cos_sin_table": lambda x: x[:, :24]}, ValueError, "rotary_dim"),
        ({"key_pool": lambda x: x.half()}, TypeError, "key_pool is torch.float16"),
        ({"key_pool": lambda x: x.to(E4M3)}, TypeError, "pools are"),
        ({"value_pool": lambda x: x[:, :, :8]}, ValueError, "value_pool"),
        ({"key_pool": lambda x: x[:0, [0, 0]]}, ValueError, "key_pool"),
        ({name: lambda x: x[:1, :, :3].expand(2**31, -1, -1, -1)
          for name in ("key_pool", "value_pool")}, ValueError, "power of two"),
        ({"k_scale": lambda _: 2.0}, ValueError, "takes no scale"),
        ({"query_weight": lambda _: torch.ones(32)}, ValueError, "or neither"),
        ({name: lambda _: torch.ones(8) for name in ("query_weight", "key_weight")},
         ValueError, "query_weight is"),
    ],
)  # fmt: skip
def test_wrong_input_is_refused_by_name(changed, error, says):
    with pytest.raises(error, match=says):
        call_with(**changed)


@pytest.mark.parametrize(
    ("pool", "pairs", "error", "says"),
    [
        (torch.ones(2, 3, 16), torch.ones(1, 2), TypeError, "int64"),
        (torch.ones(2, 3, 16), torch.ones(1, 3, dtype=torch.int64), ValueError, "pairs"),
        (torch.ones(2, 3, 3), torch.ones(1, 2, dtype=torch.int64), ValueError, "multiple of 16"),
        (torch.ones(2, 8, 4).mT, torch.ones(1, 2, dtype=torch.int64), ValueError, "dense"),
    ],
)
def test_what_cannot_be_copied_is_refused(pool, pairs, error, says):
    with pytest.raises(error, match=says):
        copy_blocks(pool, pairs)
