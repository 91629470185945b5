"""``kiln doctor --model`` says what a model needs and what the KV pool holds."""

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from kiln.engine.cli.memory_plan import measure_memory, plan_memory
from kiln.engine.config import KVConfig
from kiln.engine.graphs.counts import GraphCounts
from kiln.engine.models.costs import count_parameters
from kiln.engine.models.registry import read_model

DEMO = Path(__file__).resolve().parents[3] / "engine" / "demo"


def test_the_weights_are_those_of_the_checkpoint():
    of_heads = ("q_norm.weight", "k_norm.weight")
    with safe_open(DEMO / "model.safetensors", framework="pt") as file:
        names = [name for name in file.keys() if not name.endswith(of_heads)]  # noqa: SIM118
        stored = sum(file.get_tensor(name).numel() for name in names)
    assert count_parameters(read_model(DEMO)[1]) == stored


EXPERTS = {
    "Mixtral": {"num_local_experts": 5},
    "Qwen2Moe": {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56, "qkv_bias": False,
    },
    "Qwen3Moe": {
        "num_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
        "mlp_only_layers": [1],
    },
}  # fmt: skip


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_counted_where_they_are(family, tmp_path):
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, **EXPERTS[family],
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    of_heads = ("q_norm.weight", "k_norm.weight")
    kept = [p for name, p in model.named_parameters() if not name.endswith(of_heads)]
    counted = count_parameters(read_model(tmp_path)[1])
    assert counted == sum(parameter.numel() for parameter in kept)


def test_the_pool_holds_what_its_memory_says():
    plan = plan_memory(DEMO, KVConfig(kv_memory_gib=0.001))
    per_token = 2 * 5 * 2 * 32 * 4  # keys and values, layers, heads, dimensions, float32
    assert plan.pool_tokens == int(0.001 * 2**30) // (16 * per_token) * 16
    assert not plan.fits
    assert plan_memory(DEMO).fits


def test_a_measured_plan_has_the_graphs_of_the_engine():
    stages = []
    plan = measure_memory(DEMO, lambda stage, *_: stages.append(stage))
    assert plan.weight_bytes == 4 * count_parameters(read_model(DEMO)[1])
    assert plan.pool_bytes == plan_memory(DEMO).pool_bytes // plan.pool_tokens * plan.pool_tokens
    assert (plan.step_bytes, plan.graphs.captured) == (0, 0)
    assert {"random weights", "first step"} <= {*stages}
    graphs = GraphCounts(captured=30, seconds=1.25, num_bytes=2**29)
    text = replace(plan, step_bytes=2**30, graphs=graphs).sentence()
    assert "1 GiB for the largest step, of 2,048 tokens, 0.5 GiB for 30 CUDA graphs" in text
    assert " (1.2 s) and a KV pool" in text


def test_doctor_measures_on_request(kiln):
    result = kiln("doctor", "--measure", COLUMNS="200")
    assert "first step" in result.stderr
    assert "tokens" in result.stdout


@pytest.mark.parametrize(("model", "says"), [(DEMO, "tokens"), ("/no/such/model", "error")])
def test_doctor_plans_for_the_model_it_is_given(kiln, model, says):
    result = kiln("doctor", "--model", model, COLUMNS="200")
    assert says in result.stdout + result.stderr
    assert ("Memory plan of demo" in result.stdout) == (model == DEMO)
    assert "NVIDIA driver" in result.stdout or model != DEMO
