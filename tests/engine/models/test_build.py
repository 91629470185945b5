"""Every projection of every family has one maker, a name of its own, and the heads of one shape."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from kiln.engine.compile.parameters import parts_of
from kiln.engine.errors import ConfigError
from kiln.engine.layers.linear import Linear
from kiln.engine.models.build import Builder
from kiln.engine.models.build_layer import LayerBuilder
from kiln.engine.models.dummy_weights import DummyWeights
from kiln.engine.models.norms import NormKind
from kiln.engine.models.parameters import Parameters
from kiln.engine.models.registry import known_families, read_model
from kiln.engine.models.split import Split
from kiln.engine.models.splitting import check_split

CPU = torch.device("cpu")


@pytest.fixture
def built(tmp_path, small_config):
    def build(architecture, **more):
        (tmp_path / "config.json").write_text(json.dumps(small_config(architecture, **more)))
        family, config = read_model(tmp_path)
        weights = DummyWeights(0, torch.float32)
        builder = Builder(config, weights, 64, torch.bfloat16, CPU)
        return family.build(builder, lambda done: None)

    return build


@pytest.fixture
def made(monkeypatch):
    """The projections that the one maker is asked for."""
    asked = []
    for name in ("linear", "tied", "experts"):
        method = getattr(Parameters, name)

        def spy(self, projection, *rest, method=method):
            asked.append(projection)
            return method(self, projection, *rest)

        monkeypatch.setattr(Parameters, name, spy)
    return asked


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", sorted(known_families()))
def test_one_maker_makes_every_projection_under_its_own_name(built, made, architecture, tied):
    model = built(architecture, tie_word_embeddings=tied)
    names = [projection.name for projection in made]
    stacks = [name for name in names if ".experts." in name]
    found = [*parts_of([model.blocks, model.head], Linear)]
    assert len(found) == len(names) - len(stacks)
    assert len(set(names)) == len(names)
    assert {"lm_head", "layers.0.qkv_proj", "layers.2.o_proj"} <= set(names)
    parts = [part for projection in made for part, _ in projection.parts]
    assert len(set(parts)) == len(parts)


def test_the_parts_of_a_projection_lie_in_their_order(built, made):
    model = built("LlamaForCausalLM", attention_bias=True)
    qkv, dummies = model.blocks[1].attention.qkv, DummyWeights(0, torch.float32)
    rows = qkv.weight.values.split([32, 16, 16])
    for name, own in zip("qkv", rows, strict=True):
        wanted = torch.empty(own.shape, dtype=torch.bfloat16)
        name = f"model.layers.1.self_attn.{name}_proj.weight"
        dummies.fill(name, wanted, wanted.shape)
        assert torch.equal(own, wanted)
    assert qkv.bias.shape == (64,)
    assert qkv.weight.values.dtype == torch.bfloat16


def test_every_attention_layer_has_the_soft_cap_of_its_traits(tmp_path, small_config):
    (tmp_path / "config.json").write_text(json.dumps(small_config("LlamaForCausalLM")))
    family, config = read_model(tmp_path)
    config = replace(config, traits=replace(config.traits, soft_cap=30.0))
    builder = Builder(config, DummyWeights(0, torch.float32), 64, torch.bfloat16, CPU)
    layers = family.build(builder, lambda done: None).attention_layers
    assert [layer.soft_cap for layer in layers] == [30.0] * config.num_layers


NORMS = {  # of x̂ in float32 and the weight
    NormKind.RMS: lambda x, weight: x.bfloat16() * weight,
    NormKind.RMS_ROUND_ONCE: lambda x, weight: (x * weight.float()).bfloat16(),
    NormKind.RMS_ZERO_CENTRED: lambda x, weight: (x * (1 + weight.float())).bfloat16(),
}


@pytest.mark.parametrize("kind", NORMS)
def test_the_norms_of_a_family_are_of_its_kind(tmp_path, built, kind):
    built("LlamaForCausalLM")
    config = read_model(tmp_path)[1]
    config = replace(config, traits=replace(config.traits, norm=kind))
    build = Builder(config, DummyWeights(0, torch.float32), 64, torch.bfloat16, CPU)
    x = torch.randn(50, config.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    normal = x.float() * (x.float().square().mean(-1, keepdim=True) + config.norm_eps).rsqrt()
    norm, stream = build.norm("one", config.hidden_size), build.stream_norm("other")
    for out, weight in [
        (norm(x), norm.weight), (stream(x.clone(), torch.zeros_like(x)), stream.weight)
    ]:  # fmt: skip
        differing = (out != NORMS[kind](normal, weight)).float().mean()
        assert differing < 0.002  # of another kind: at least 0.1


@pytest.mark.parametrize(("world", "heads", "kv_heads"), [(2, 2, 1), (4, 1, 1)])
def test_ranks_have_heads_of_their_own_until_there_are_too_few(
    tmp_path, built, world, heads, kv_heads
):
    whole = built("LlamaForCausalLM", attention_bias=True).blocks[1].attention
    family, config = read_model(tmp_path)
    query, key, value = whole.qkv.weight.values.split([32, 16, 16])
    for rank in range(world):
        weights, split = DummyWeights(0, torch.bfloat16), Split(rank, world)
        builder = Builder(config, weights, 64, torch.bfloat16, CPU, None, split)
        attention = family.block(LayerBuilder(builder, 1)).attention.layer
        own = rank * 2 // world  # KV heads of 8 elements
        wanted = [query.chunk(world)[rank], key[own * 8 :][:8], value[own * 8 :][:8]]
        assert torch.equal(attention.qkv.weight.values, torch.cat(wanted))
        assert torch.equal(
            attention.output.weight.values, whole.output.weight.values.chunk(world, 1)[rank]
        )
        shape = attention.attention.shape
        assert (shape.num_heads, shape.num_kv_heads) == (heads, kv_heads)


def test_sizes_that_no_rank_can_share_are_refused_with_what_fits(tmp_path, built):
    built("LlamaForCausalLM", intermediate_size=50)
    config = read_model(tmp_path)[1]
    with pytest.raises(ConfigError, match=r"=4: .*intermediate_size is 50.*split over 1, 2$"):
        check_split(config, 4)
