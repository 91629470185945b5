"""The default budget of a step follows from the model and the card: always the same number."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from kiln import LLM
from kiln.engine.cli.options import DEMO_FOLDER
from kiln.engine.config import EngineConfig, KVConfig, LoRAConfig, ModelConfig, SchedulerConfig
from kiln.engine.kv.pool import KVShape
from kiln.engine.kv.shape import Window
from kiln.engine.models.costs import step_bytes, step_flops
from kiln.engine.models.hf_config import Traits
from kiln.engine.models.registry import read_model
from kiln.engine.runner import budget
from kiln.engine.runner.budget import (
    BUDGETS,
    Card,
    default_budget,
    estimated_ms,
    limits_of,
    most_prefill_in_graphs,
)

ROOMY = 1 << 40
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "vocab_size": 151936}
MODELS = {
    "0.6B": {
        **QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "1.7B": {
        **QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "8B": {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128256, "max_position_embeddings": 8192,
    },
    "30B-A3B": {
        **QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4,
    },
}  # fmt: skip
CARDS = {  # with the peak of NVIDIA's data sheets, in 10^12 operations a second
    "H100": (Card("NVIDIA H100 80GB HBM3", 90, 132, 85 * 10**9), 989),
    "H100 PCIe": (Card("NVIDIA H100 PCIe", 90, 114, 85 * 10**9), 756),
    "H200": (Card("NVIDIA H200", 90, 132, 150 * 10**9), 989),
    "A100": (Card("NVIDIA A100-SXM4-80GB", 80, 108, 85 * 10**9), 312),
    "L40S": (Card("NVIDIA L40S", 89, 142, 48 * 10**9), 362),
    "L4": (Card("NVIDIA L4", 89, 58, 24 * 10**9), 121),
    "A10": (Card("NVIDIA A10", 86, 72, 24 * 10**9), 125),
    "T4": (Card("Tesla T4", 75, 40, 16 * 10**9), 65),
    "4090": (Card("NVIDIA GeForce RTX 4090", 89, 128, 25 * 10**9), 165),
    "3090": (Card("NVIDIA GeForce RTX 3090", 86, 82, 25 * 10**9), 71),
    "B200": (Card("NVIDIA B200", 100, 148, 190 * 10**9), 2250),
    "5090": (Card("NVIDIA GeForce RTX 5090", 120, 170, 34 * 10**9), 210),
}
# Measured on one H100: prompts of 2,048 tokens, four in a step of 8,192; milliseconds of a step.
MEASURED = {("0.6B", 2048): 5.7, ("8B", 2048): 2048 / 40.8, ("8B", 8192): 8192 / 35.9}


@pytest.fixture
def config_of(tmp_path):
    def config(name, **more):
        text = json.dumps({"torch_dtype": "bfloat16", **MODELS[name], **more})
        (tmp_path / "config.json").write_text(text)
        return read_model(tmp_path)[1]

    return config


@pytest.mark.parametrize(("name", "least", "most"), [("0.6B", 2048, 4096), ("8B", 512, 512)])
def test_steps_run_in_graphs_while_launches_take_the_host_longer_than_the_gpu(
    config_of, monkeypatch, name, least, most
):
    monkeypatch.setattr(budget, "card_of", lambda device: CARDS["H100"][0])
    config = config_of(name)
    assert least <= most_prefill_in_graphs(config, torch.device("cuda"), 1) <= most
    assert most_prefill_in_graphs(config, torch.device("cpu"), 1) == 512


@pytest.mark.parametrize("name", CARDS)
def test_the_peak_of_a_card_is_right_within_a_third(name):
    card, peak = CARDS[name]
    assert 1 / 1.3 < card.flops / 1e12 / peak < 1.3


@pytest.mark.parametrize(("capability", "like"), [(70, 75), (87, 86), (103, 100), (121, 120)])
def test_cards_that_are_not_listed_count_as_the_generation_before(capability, like):
    cards = [Card("NVIDIA X", one, 100, 10**10) for one in (capability, like)]
    assert cards[0].flops == cards[1].flops


@pytest.mark.parametrize(("name", "tokens"), MEASURED)
def test_the_estimate_of_a_step_is_right_within_a_third(config_of, name, tokens):
    found = estimated_ms(config_of(name), CARDS["H100"][0], 1, tokens)
    assert 1 / 1.3 < found / MEASURED[name, tokens] < 1.3


@pytest.mark.parametrize(
    ("model", "card", "world", "wanted"),
    [
        ("0.6B", "H100", 1, 8192),
        ("0.6B", "H200", 1, 8192),
        ("0.6B", "A100", 1, 4096),
        ("0.6B", "4090", 1, 3072),
        ("0.6B", "L4", 1, 2048),
        ("1.7B", "H100", 1, 6144),
        ("8B", "H100", 1, 2048),
        ("8B", "H200", 1, 2048),
        ("8B", "H100", 2, 3072),
        ("8B", "H100", 8, 8192),
        ("8B", "T4", 1, 2048),
        ("30B-A3B", "H100", 1, 3072),
        ("30B-A3B", "B200", 1, 6144),
    ],
)
def test_it_is_the_largest_whose_step_takes_less_than_50_ms(config_of, model, card, world, wanted):
    config, own = config_of(model), CARDS[card][0]
    tokens, reason = default_budget(config, torch.bfloat16, own, world, ROOMY)
    assert tokens == wanted
    assert reason == f"{estimated_ms(config, own, world, tokens):.0f} ms by estimate"
    larger = [one for one in BUDGETS if one > tokens]
    assert all(estimated_ms(config, own, world, one) >= 50 for one in larger)


def test_models_in_float32_keep_the_least(config_of):
    found = default_budget(config_of("0.6B"), torch.float32, CARDS["H100"][0], 1, ROOMY)
    assert found == (2048, "the default in float32")


def test_windows_and_experts_cost_what_they_compute(config_of):
    plain = step_flops(config_of("8B"), 4096)
    layers, inner, hidden = 32, 14336, 4096
    weights = layers * (hidden * 128 * (2 * 32 + 2 * 8) + 3 * hidden * inner)
    attention = layers * 4 * 4096 * 4096**2 / 2
    assert plain == pytest.approx(2 * weights * 4096 + attention, rel=1e-3)
    mistral = {"architectures": ["MistralForCausalLM"], "sliding_window": 1024}
    seen = 1024 * (4096 - 1024 / 2)
    windowed = step_flops(config_of("8B", **mistral), 4096)
    assert windowed - plain == pytest.approx(layers * 4 * 4096 * seen - attention, rel=1e-3)
    chunked = replace(
        config_of("8B"), traits=Traits(windows=(Window(1000, chunked=True),) * layers)
    )
    pairs = sum(position % 1000 + 1 for position in range(4096))
    found = step_flops(chunked, 4096) - plain
    assert found == pytest.approx(layers * 4 * 4096 * pairs - attention, rel=1e-3)
    few, all_experts = (
        step_flops(config_of("30B-A3B", num_experts_per_tok=k), 64) for k in (8, 32)
    )
    assert 2 < all_experts / few < 4


class Ranks:
    """A group whose other ranks ask for a budget of their own."""

    def __init__(self, kind="cuda", size=1, others=8192):
        self.device, self.size, self.others = torch.device(kind), size, others

    def minimum(self, numbers):
        return [min(number, self.others) for number in numbers]


@pytest.fixture
def decided(config_of, monkeypatch):
    """Return a function from settings to the budget and the reason, for the 0.6B."""

    def decide(card="H100", group=None, max_model_len=40960, memory=None, **groups):
        own = CARDS[card][0]
        own = Card(own.name, own.capability, own.num_multiprocessors, memory or own.memory)
        monkeypatch.setattr(budget, "card_of", lambda device: own)
        config = EngineConfig(ModelConfig("m"), **groups)
        hf = config_of("0.6B")
        kv = KVShape(hf.attention, torch.bfloat16)
        limits, reason = limits_of(config, hf, torch.bfloat16, kv, max_model_len, group or Ranks())
        assert limits.max_num_seqs == (config.scheduler.max_num_seqs or 256)
        return limits.budget, reason

    return decide


def test_a_flag_decides(decided):
    limits = SchedulerConfig(max_num_batched_tokens=77, max_num_seqs=3)
    assert decided(scheduler=limits) == (77, "as set")
    assert decided() == (8192, "30 ms by estimate")


def test_all_ranks_take_the_smallest(decided):
    assert decided(group=Ranks(size=2)) == (8192, "15 ms by estimate")
    assert decided(group=Ranks(size=2, others=3072)) == (3072, "the smallest of all ranks")


def test_a_budget_that_leaves_the_pool_no_room_is_not_taken(decided, config_of):
    """One request of the full context must fit, or the blocks or the adapters that were set."""
    config = config_of("0.6B")
    weights = 1.2 * 10**9
    step = {tokens: step_bytes(config, torch.bfloat16, tokens) for tokens in BUDGETS}
    per_token = KVShape(config.attention, torch.bfloat16).bytes_per_token
    pool = 40960 * per_token
    for memory, wanted in [
        (weights + pool + 1.1 * step[8192], 8192),
        (weights + pool + 0.5 * (step[4096] + step[6144]), 4096),
        (weights + pool, 2048),
        (0, 2048),
    ]:
        assert decided(memory=int(memory / 0.9) + 1)[0] == wanted
    tight = int((weights + pool + 1.1 * step[8192]) / 0.9)
    assert decided(memory=tight, kv=KVConfig(gpu_memory_utilization=0.5))[0] == 2048
    assert decided(memory=tight, kv=KVConfig(num_blocks=2 * 40960 // 16))[0] == 2048
    assert decided(memory=tight, lora=LoRAConfig(root="/a", memory_gib=8.0))[0] == 2048


def test_on_a_cpu_it_is_the_least_whatever_the_model():
    llm = LLM(str(DEMO_FOLDER), device="cpu", num_kv_blocks=160, load_format="dummy")
    assert llm.core.config.scheduler.budget == llm.core.scheduler.config.budget == 2048
    assert llm.core.runner.loaded.budget_reason == "the default on a CPU"
    llm.close()
