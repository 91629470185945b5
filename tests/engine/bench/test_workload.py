"""Every engine gets the same tokens in every run: nano-vllm's load, and prompts of one length."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kiln.engine.bench.shapes import SHAPES, write_shape
from kiln.engine.bench.side_by_side import decode_bytes
from kiln.engine.bench.workload import MixedLoad, equal_prompts, warm_up_load
from kiln.engine.config import ModelConfig
from kiln.engine.kv.shape import Window
from kiln.engine.models.costs import count_parameters, parameters_read
from kiln.engine.models.hf_config import Traits
from kiln.engine.models.registry import read_model

VOCAB = 151_936


def test_the_default_load_is_that_of_other_reports():
    prompts, lengths = MixedLoad().draw(VOCAB)
    assert len(prompts) == len(lengths) == 256
    assert [prompt[:4] for prompt in prompts[:2]] == [
        [6314, 6893, 666, 4245],
        [3299, 4863, 7241, 8424],
    ]
    assert lengths[:6] == [724, 798, 161, 536, 760, 701]
    assert (sum(map(len, prompts)), sum(lengths)) == (138_739, 145_809)


def test_the_prompts_of_one_length_are_those_of_other_reports():
    prompts = equal_prompts(64, 128, VOCAB)
    assert {len(prompt) for prompt in prompts} == {128}
    assert [prompt[:4] for prompt in prompts[:2]] == [[2204, 9328, 1036, 4182], prompts[1][:4]]
    assert prompts[0] != prompts[1]
    assert prompts[:2] == equal_prompts(2, 128, VOCAB)


def test_a_load_stays_in_its_bounds_and_in_a_small_vocabulary():
    load = MixedLoad(50, (2, 5), (3, 3))
    prompts, lengths = load.draw(vocab_size=40)
    assert {len(prompt) for prompt in prompts} == {2, 3, 4, 5}
    assert set(lengths) == {3}
    assert load.longest == 8
    assert {token for prompt in prompts for token in prompt} <= set(range(3, 40))
    assert equal_prompts(1, 3, vocab_size=1) == [[0, 0, 0]]
    few, short = warm_up_load(2, 3, vocab_size=40)
    assert ([len(prompt) for prompt in few], short) == ([2, 2], [3, 3])


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen3-0.6b", 0.596), ("llama3-8b", 8.03), ("llama3-70b", 70.55)]
)
def test_a_built_in_shape_is_a_config_that_kiln_serves(name, billions, tmp_path):
    folder = write_shape(name, tmp_path)
    assert folder == tmp_path / name
    assert json.loads((folder / "config.json").read_text()) == SHAPES[name]
    family, config = read_model(folder)
    assert set(SHAPES[name]["architectures"]) <= set(family.architectures)
    assert str(config.dtype) == "torch.bfloat16"
    assert count_parameters(config) / 1e9 == pytest.approx(billions, rel=0.001)
    assert ModelConfig(str(folder), load_format="dummy").max_model_len is None


def test_a_step_reads_the_weights_once_and_the_keys_and_values_of_every_request(tmp_path):
    _, config = read_model(write_shape("llama3-8b", tmp_path))
    bf16 = config.dtype
    one, two = (decode_bytes(config, bf16, bf16, requests, 200) for requests in (1, 2))
    table = 128_256 * 4096  # of the embedding a step reads a row per token
    assert one - 200 * 131_072 == 2 * (count_parameters(config) - table)
    assert two - one == 200 * 131_072  # 128 KiB per token: 2 * 32 layers * 8 heads * 128 * 2 bytes


def test_a_table_that_is_also_the_head_is_read_and_a_window_bounds_the_context(tmp_path):
    folder = write_shape("qwen3-0.6b", tmp_path)
    assert parameters_read(read_model(folder)[1], 1) == count_parameters(read_model(folder)[1])
    mistral = SHAPES["llama3-8b"] | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 50,
    }
    del mistral["attention_bias"], mistral["mlp_bias"]
    (folder / "config.json").write_text(json.dumps(mistral))
    _, config = read_model(folder)
    read = [decode_bytes(config, config.dtype, config.dtype, 1, length) for length in (20, 50, 99)]
    assert read[1] - read[0] == 30 * 131_072
    assert read[2] == read[1]
    chunks = Traits(windows=(Window(50, chunked=True),) * config.num_layers)
    config = replace(config, traits=chunks)
    read += [decode_bytes(config, config.dtype, config.dtype, 1, length) for length in (50, 51)]
    assert read[3] - read[4] == 49 * 131_072


def test_a_step_reads_the_experts_that_its_tokens_choose(tmp_path):
    experts = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    shape = SHAPES["llama3-8b"] | experts
    del shape["attention_bias"], shape["mlp_bias"]
    (tmp_path / "config.json").write_text(json.dumps(shape))
    _, config = read_model(tmp_path)
    of_an_expert = config.num_layers * 3 * 4096 * 14336
    embedding = 128_256 * 4096
    everything = count_parameters(config) - embedding
    assert parameters_read(config, 1) == everything - 6 * of_an_expert
    assert parameters_read(config, 10_000) == everything
    assert everything - 4 * of_an_expert < parameters_read(config, 4) < everything
