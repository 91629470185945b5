"""Adapters in the pool: exact ranks, and nothing of another adapter within reach."""

from __future__ import annotations

import pytest
import torch
from adapter_pools import pool_of, write
from projections import dense, whole_projection

from kiln.engine.lora.adapter import Adapter, LoRAPair
from kiln.engine.lora.batch_info import make_batch_info
from kiln.engine.lora.packing import pack
from kiln.engine.lora.sites import Kind, Sites
from kiln.engine.lora.torch_native import TorchNativeLoRA
from kiln.engine.models.split import all_of

CPU = torch.device("cpu")


@pytest.fixture
def model_sites():
    """The sites of an embedding and a qkv projection whose sizes are not multiples of 16 bytes."""
    from kiln.engine.layers.embedding import Embedding

    sites = Sites()
    sites.embedding("embed", all_of(11), Embedding(torch.zeros(11, 5)))
    qkv = whole_projection("layers.0.qkv_proj", {"q": 7, "k": 3, "v": 3}, 5)
    sites.linear(qkv, dense(torch.zeros(13, 5)))
    sites.linear(whole_projection("layers.0.router", {"gate": 4}, 5), dense(torch.zeros(4, 5)))
    return sites


def pair(part, rank, dtype):
    """A pair of the sizes of a part."""
    a, b = torch.randn(rank, part.input_size), torch.randn(part.output_size, rank)
    return LoRAPair(a.to(dtype), b.to(dtype), float(torch.rand(())) + 0.5)


def adapter(sites, ranks, dtype=torch.float32):
    """An adapter with a rank a part; None: it lacks the part."""
    parts = zip(sites.parts, ranks, strict=True)
    return Adapter("a", {p.row: pair(p, rank, dtype) for p, rank in parts if rank})


RANKS = ((4, 3, 1, 2), (None, None, 5, None), (2, 1, None, 6), (None, 64, None, None))


def reference(adapters, site, x, slots):
    """Add scale * B A x token by token, in float64."""
    out = torch.zeros(len(x), site.parts[-1].output_start + site.parts[-1].output_size)
    out = out.double()
    for token, slot in enumerate(slots):
        for part in site.parts if slot >= 0 else ():
            own = adapters[slot].pairs.get(part.row)
            if own is None:
                continue
            a, b = own.a.double(), own.b.double()
            h = a[:, x[token]] if site.kind is Kind.EMBEDDING else a @ x[token].double()
            end = part.output_start + part.output_size
            out[token, part.output_start : end] += own.scale * (b @ h)
    return out


def compute(backend, site, x, slots, base):
    info = backend.prepare_lora_batch(slots, [1] * len(slots), [True] * len(slots))
    out = base.clone()
    if site.kind is Kind.EMBEDDING:
        backend.run_lora_b_sgemm(backend.run_lora_a_embedding(x, site, info), site, out, info)
    else:
        backend.run_qkv_lora(x, site, out, info)
    return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_oracle_computes_the_formula(model_sites, dtype):
    adapters = [adapter(model_sites, ranks, dtype) for ranks in RANKS]
    backend = TorchNativeLoRA(pool_of(adapters, model_sites.all, dtype, CPU))
    slots = [0, 0, -1, 3, 2, 1, 1, -1, 0]
    for site in model_sites.all:
        embeds = site.kind is Kind.EMBEDDING
        x = torch.randint(0, 11, (9,)) if embeds else torch.randn(9, 5).to(dtype)
        delta = reference(adapters, site, x, slots)
        base = torch.randn(delta.shape).to(dtype)
        wanted = base.double() + delta
        found = compute(backend, site, x, slots, base).double()
        # One rounding at the end; scales are float32.
        error = 2.0**-8 if dtype == torch.bfloat16 else 1e-6
        assert bool(((found - wanted).abs() <= error * (wanted.abs() + 0.1)).all())
        untouched = [token for token, slot in enumerate(slots) if slot < 0]
        assert torch.equal(found[untouched], base[untouched].double())


def test_a_slot_reaches_nothing_of_the_adapter_before(model_sites):
    full, few = adapter(model_sites, (9, 9, 9, 9)), adapter(model_sites, (None, None, 2, None))
    pool = pool_of([full, full], model_sites.all, torch.float32, CPU)
    pool.values.fill_(float("nan"))  # what a slot holds behind its own adapter
    packed = pack(few, model_sites.all, torch.float32)
    write(pool, packed, 0)
    pool.place(packed, 1, 0)
    backend, site = TorchNativeLoRA(pool), model_sites.all[1]
    x, base = torch.randn(3, 5), torch.randn(3, 13)
    found = compute(backend, site, x, [1, -1, 1], base)
    assert bool(torch.isfinite(found).all())
    wanted = base.double() + reference([full, few], site, x, [1, -1, 1])
    assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-5)
    ids, base = torch.randint(0, 11, (3,)), torch.randn(3, 5)
    assert torch.equal(compute(backend, model_sites.all[0], ids, [1, 1, 1], base), base)
    pool.clear(1)
    assert not pool.ranks[:, 1].any()


def test_the_pool_has_the_size_of_the_ranks_and_aligned_pairs(model_sites):
    for dtype in (torch.float32, torch.bfloat16):
        adapters = [adapter(model_sites, ranks, dtype) for ranks in RANKS]
        pool = pool_of(adapters, model_sites.all, dtype, CPU)
        numbers = sum(own.a.numel() + own.b.numel() for a in adapters for own in a.pairs.values())
        pairs = sum(len(a.pairs) for a in adapters)
        align = 16 // dtype.itemsize
        assert numbers <= pool.values.numel() < numbers + 2 * align * pairs
        assert pool.b_offsets.dtype == "int64"
        assert not (pool.b_offsets % align).any()
        q, k = model_sites.all[1].parts[:2]
        assert not (pool.a_offsets[q.row] % align).any()
        behind = pool.a_offsets[q.row, 0] + adapters[0].pairs[q.row].a.numel()
        assert pool.a_offsets[k.row, 0] == behind


def test_a_router_is_no_site(model_sites):
    assert [site.kind for site in model_sites.all] == [Kind.EMBEDDING, Kind.QKV]
    assert model_sites.refused == {"gate": "a router"}


def test_no_row_of_a_segment_has_an_adapter(model_sites):
    """As for the LM head, where the requests with adapters are in the middle of their prompts."""
    pool = pool_of([adapter(model_sites, RANKS[0])], model_sites.all, torch.float32, CPU)
    base = torch.randn(2, 13)
    for slots in ([-1, -1], []):
        x, own = torch.randn(len(slots), 5), base[: len(slots)]
        assert torch.equal(compute(TorchNativeLoRA(pool), model_sites.all[1], x, slots, own), own)


def test_segments_of_other_rows_are_caught(model_sites):
    pool = pool_of([adapter(model_sites, RANKS[0])], model_sites.all, torch.float32, CPU)
    backend = TorchNativeLoRA(pool)
    info = make_batch_info([0], [3], [True])
    with pytest.raises(AssertionError, match="other rows"):
        backend.run_lora_a_sgemm(torch.zeros(2, 5), model_sites.all[1], info)
