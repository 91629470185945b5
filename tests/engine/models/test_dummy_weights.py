"""Random weights: by name and seed, like those a training starts from."""

from __future__ import annotations

import pytest
import torch

from kiln.engine.models.dummy_weights import DummyWeights
from kiln.engine.models.parameters import Parameters
from kiln.engine.models.quantization import UNQUANTIZED

CPU = torch.device("cpu")


def draw(name, *shape, seed=0, dtype=torch.float32):
    return Parameters(DummyWeights(seed, dtype), UNQUANTIZED, dtype, CPU).tensor(name, *shape)


def test_weights_are_small_norms_one_and_biases_zero():
    weight = draw("model.layers.0.mlp.up_proj.weight", 200, 300)
    assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert abs(weight.mean().item()) < 0.001
    assert (draw("model.layers.0.input_layernorm.weight", 7) == 1).all()
    assert (draw("model.layers.0.self_attn.q_norm.weight", 7) == 1).all()
    assert (draw("model.layers.0.self_attn.q_proj.bias", 7) == 0).all()


def test_a_tensor_depends_on_name_and_seed_alone():
    weights = Parameters(DummyWeights(5, torch.float32), UNQUANTIZED, torch.float32, CPU)
    first, second = weights.tensor("a.weight", 4, 4), weights.tensor("b.weight", 4, 4)
    assert not torch.equal(first, second)
    assert torch.equal(draw("b.weight", 4, 4, seed=5), second)
    assert not torch.equal(draw("b.weight", 4, 4, seed=6), second)


def test_the_dtype_is_the_one_asked_for():
    assert draw("a.weight", 3, dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["a.weight", "a_norm.weight", "a.bias"])
@pytest.mark.parametrize("index", [(slice(2, 5),), (slice(None), slice(1, 3)), (slice(0, 0),)])
def test_a_part_is_that_of_the_whole(name, index):
    whole = draw(name, 6, 4)
    part = torch.full_like(whole[index], float("nan"))
    DummyWeights(0, torch.float32).fill(name, part, (6, 4), index)
    assert torch.equal(part, whole[index])
