"""``kiln doctor --model`` says what a model needs and what the KV pool holds."""

from pathlib import Path

import pytest
from safetensors import safe_open

from kiln.engine.cli.memory_plan import count_parameters, plan_memory
from kiln.engine.config import KVConfig
from kiln.engine.models.registry import read_model

DEMO = Path(__file__).resolve().parents[3] / "engine" / "demo"


def test_the_weights_are_those_of_the_checkpoint():
    of_heads = ("q_norm.weight", "k_norm.weight")
    with safe_open(DEMO / "model.safetensors", framework="pt") as file:
        names = [name for name in file.keys() if not name.endswith(of_heads)]  # noqa: SIM118
        stored = sum(file.get_tensor(name).numel() for name in names)
    assert count_parameters(read_model(DEMO)[1]) == stored


def test_the_pool_holds_what_its_memory_says():
    plan = plan_memory(DEMO, KVConfig(kv_memory_gib=0.001))
    per_token = 2 * 5 * 2 * 32 * 4  # keys and values, layers, heads, dimensions, float32
    assert plan.pool_tokens == int(0.001 * 2**30) // (16 * per_token) * 16
    assert not plan.fits
    assert plan_memory(DEMO).fits


@pytest.mark.parametrize(("model", "says"), [(DEMO, "tokens"), ("/no/such/model", "error")])
def test_doctor_plans_for_the_model_it_is_given(kiln, model, says):
    result = kiln("doctor", "--model", model, COLUMNS="200")
    assert says in result.stdout + result.stderr
    assert ("Memory plan of demo" in result.stdout) == (model == DEMO)
    assert "NVIDIA driver" in result.stdout or model != DEMO
