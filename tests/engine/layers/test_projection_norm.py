"""Norms over the whole projection: the same for any number of ranks, and as transformers' are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2RMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from kiln.engine.distributed.connect import LOOPBACK, connect, file_store
from kiln.engine.layers import projection_norm
from kiln.engine.layers.norm import RMSNorm
from kiln.engine.layers.projection_norm import ProjectionNorm
from kiln.engine.models.split import Split

TOKENS, HEAD_DIM, EPS = 5, 16, 0.01
CPU = torch.device("cpu")
KINDS = {
    Olmo2RMSNorm: {"round_once": True},
    MiniMaxM2RMSNorm: {},
    Gemma3RMSNorm: {"weight_offset": 1.0},
}


class Projected:
    """Queries, keys and values of all heads, the norms' weights, and what transformers makes."""

    def __init__(self, heads, kv_heads, dtype, kind=Olmo2RMSNorm):
        self.heads, self.kv_heads = heads, kv_heads
        sizes = [count * HEAD_DIM for count in (heads, kv_heads, kv_heads)]
        self.parts = [torch.randn(TOKENS, size).mul_(3).to(dtype) for size in sizes]
        norms = [kind(size, eps=EPS).to(dtype) for size in sizes[:2]]
        self.form, self.weights = KINDS[kind], []
        for norm in norms:
            self.weights.append(torch.nn.init.normal_(norm.weight).detach())
        with torch.inference_mode():
            self.wanted = [norm(part) for norm, part in zip(norms, self.parts, strict=False)]
        self.wanted.append(self.parts[2])

    def places(self, rank, world):
        """The rank's columns of queries, keys and values."""
        split = Split(rank, world)
        key = split.kv_heads(self.kv_heads, HEAD_DIM, "k_proj").place
        return split.equal(self.heads * HEAD_DIM, "q_proj", "outputs").place, key, key

    def normalised(self, rank, world, group):
        """The rank's columns, after the norm, and what they are to be."""
        places = self.places(rank, world)
        qkv = torch.cat([x[:, at] for x, at in zip(self.parts, places, strict=True)], dim=1)
        weights = (w[at].clone() for w, at in zip(self.weights, places, strict=False))
        norms = (RMSNorm(weight, EPS, **self.form) for weight in weights)
        ProjectionNorm(*norms, group, max(1, world // self.kv_heads))(qkv)
        return qkv, torch.cat([x[:, at] for x, at in zip(self.wanted, places, strict=True)], dim=1)


def by_ranks(folder, world, projected):
    """What each rank gets and is to get: ranks are threads of this process."""

    def rank(number):
        group = connect(file_store(folder, world), number, world, CPU, LOOPBACK)
        try:
            return projected.normalised(number, world, group.name)
        finally:
            group.close()

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(rank, range(world)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_rank_gives_the_bits_of_transformers(dtype, kind):
    got, want = Projected(4, 2, dtype, kind).normalised(0, 1, "")
    if dtype == torch.bfloat16:
        assert torch.equal(got, want)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "world"),
    [(4, 2, 2), (4, 4, 4), (4, 2, 4), (4, 1, 4), (6, 1, 3)],  # in the last three, ranks share keys
)
def test_ranks_together_normalise_as_one_does(tmp_path, heads, kv_heads, world, kind):
    for dtype in (torch.float32, torch.bfloat16):
        folder = tmp_path / str(dtype)
        folder.mkdir()
        for got, want in by_ranks(folder, world, Projected(heads, kv_heads, dtype, kind)):
            if dtype == torch.float32:
                torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)
            else:  # Another order of the sums shows only next to a number halfway between others.
                assert (got != want).float().mean() < 0.01


class Alone:
    """A group of two ranks, whose other rank has the same columns as this one."""

    rank, size = 0, 2

    def all_reduce(self, x):
        x *= 2


@pytest.mark.parametrize("group", ["", "tp2"])
def test_it_is_traced_whole_for_any_number_of_tokens(monkeypatch, group):
    monkeypatch.setattr(projection_norm, "group_named", lambda name: Alone())
    norm = ProjectionNorm(*(RMSNorm(torch.rand(size), EPS) for size in (32, 16)), group)

    def layer(x):
        qkv = x + 1
        norm(qkv)
        return qkv * 2

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (3, 8):
        x = torch.randn(tokens, 64)
        torch.testing.assert_close(compiled(x), layer(x))


def test_norms_that_differ_in_form_are_refused():
    norms = RMSNorm(torch.ones(32), 1e-6), RMSNorm(torch.ones(16), 1e-5)
    with pytest.raises(ValueError, match=r"the whole projection: .* 1e-06.* keys .* 1e-05"):
        ProjectionNorm(*norms)
