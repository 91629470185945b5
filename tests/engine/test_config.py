"""Every setting has one place; those that do not apply are refused, not ignored."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from kiln import LLM
from kiln.engine import config
from kiln.engine.cli.options import DEMO_FOLDER
from kiln.engine.config import (
    EngineConfig,
    GraphConfig,
    KVConfig,
    LoRAModule,
    ModelConfig,
    SpeculativeConfig,
)
from kiln.engine.config_forms import Settings, config_of, config_text, read_config_text
from kiln.engine.errors import ConfigError
from kiln.jit_kernels.ops.speculative import spec


def test_each_kind_of_device_has_its_setting_and_its_default():
    assert KVConfig().pool_memory("cpu") == 1.0
    assert KVConfig().pool_memory("cuda") == 0.9
    assert KVConfig(kv_memory_gib=3.0).pool_memory("cpu") == 3.0
    assert KVConfig(gpu_memory_utilization=0.5).pool_memory("cuda") == 0.5


@pytest.mark.parametrize(
    ("device", "other", "own"),
    [
        ("cpu", {"gpu_memory_utilization": 0.9}, "kv_memory_gib"),
        ("cuda", {"kv_memory_gib": 1.0}, "gpu_memory_utilization"),
    ],
)
def test_the_setting_of_the_other_kind_is_refused_even_at_its_default(device, other, own):
    (name,) = other
    with pytest.raises(ConfigError, match=rf"{name}=.*on {device}; set {own} instead"):
        KVConfig(**other).pool_memory(device)


@pytest.mark.parametrize("other", [{"gpu_memory_utilization": 0.5}, {"kv_memory_gib": 2.0}])
def test_memory_is_refused_where_the_number_of_blocks_is_set(other):
    with pytest.raises(ConfigError, match="must be unset if num_kv_blocks is set"):
        KVConfig(num_blocks=7, **other)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("half", "float16"), ("fp16", "float16"), ("FP16", "float16"), ("bf16", "bfloat16")),
        *(("float", "float32"), ("fp32", "float32"), (torch.bfloat16, "bfloat16")),
        *((name, name) for name in ("auto", "float32", "float16", "bfloat16")),
    ],
)
def test_a_dtype_has_all_its_usual_names(name, dtype):
    assert ModelConfig("m", dtype=name).dtype == dtype
    assert config_of({"model": {"model": "m", "dtype": name}}).model.dtype == dtype


@pytest.mark.parametrize("name", ["int8", "", None, "float64", "float_16", torch.int8])
def test_what_is_no_dtype_is_refused_with_those_that_there_are(name):
    with pytest.raises(ConfigError, match=r"dtype=.*must be auto, float32, .*fp16.*bf16"):
        ModelConfig("m", dtype=name)


def test_an_engine_refuses_it_before_it_loads_weights():
    loaded = []
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization=0\.5"):
        LLM(
            str(DEMO_FOLDER),
            device="cpu",
            gpu_memory_utilization=0.5,
            progress=lambda *stage: loaded.append(stage),
        )
    assert loaded == []


def test_an_engine_refuses_a_toggle_that_its_blocks_do_not_allow(monkeypatch):
    from kiln.engine.runner import kernels

    seen = []

    def refuse(needs, block_size):
        seen.append((needs, block_size))
        raise ConfigError("no such blocks")

    monkeypatch.setattr(kernels, "kernels_can_attend", refuse)
    with pytest.raises(ConfigError, match="no such blocks"):
        LLM(str(DEMO_FOLDER), device="cpu", num_kv_blocks=64, block_size=32)
    assert seen[0][0]["scalar_t"] == "float"
    assert seen[0][1] == 32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_bs": 0}, r"cuda_graph_max_bs=0: must be >= 1"),
        ({"max_bs": -4}, r"cuda_graph_max_bs=-4"),
        ({"bs": ()}, r"cuda_graph_bs=\(\): must be a list of sizes of 1 or more"),
        ({"bs": (4, 0)}, r"cuda_graph_bs=\(4, 0\)"),
        ({"bs": (4,), "max_bs": 8}, r"cuda_graph_max_bs=8: must be unset if cuda_graph_bs is set"),
    ],
)
def test_sizes_of_graphs_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        GraphConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_offload_gib": -0.5}, r"kv_offload_gib=-0\.5: must be 0 or more GiB"),
        ({"kv_offload_gib": math.inf}, r"kv_offload_gib=inf"),
        ({"kv_offload_gib": math.nan}, r"kv_offload_gib=nan"),
        (
            {"kv_offload_gib": 1.0, "enable_prefix_caching": False},
            r"kv_offload_gib=1\.0: must be 0 without enable_prefix_caching",
        ),
    ],
)
def test_host_memory_that_makes_no_sense_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        KVConfig(**settings)


def test_graphs_are_on_by_default_with_sizes_up_to_the_largest_step():
    assert GraphConfig() == GraphConfig(enabled=True, max_bs=None, bs=None)


@pytest.mark.parametrize(
    "settings", [{"cuda_graph_max_bs": 5}, {"cuda_graph_bs": [1, 5]}, {"cuda_graph_bs": (5,)}]
)
def test_a_graph_larger_than_a_step_is_refused_before_weights_are_loaded(settings):
    loaded = []
    (name,) = settings
    with pytest.raises(ConfigError, match=rf"{name}: 5 rows, but a step has at most 4"):
        LLM(
            str(DEMO_FOLDER),
            device="cpu",
            max_num_seqs=4,
            progress=lambda *stage: loaded.append(stage),
            **settings,
        )
    assert loaded == []


# A value of each keyword of LLM that is none of its defaults, and the field that it sets.
KEYWORDS = {
    "revision": ("v2", "model.revision"),
    "tokenizer": ("c", "model.tokenizer"),
    "tokenizer_revision": ("v3", "model.tokenizer_revision"),
    "hf_overrides": ({"rope_theta": 1.0}, "model.hf_overrides"),
    "device": ("cpu", "model.device"),
    "dtype": ("float16", "model.dtype"),
    "load_format": ("dummy", "model.load_format"),
    "quantization": ("fp8", "model.quantization"),
    "task": ("embed", "model.task"),
    "max_model_len": (11, "model.max_model_len"),
    "seed": (12, "model.seed"),
    "block_size": (13, "kv.block_size"),
    "num_kv_blocks": (14, "kv.num_blocks"),
    "gpu_memory_utilization": (0.15, "kv.gpu_memory_utilization"),
    "kv_memory_gib": (1.6, "kv.kv_memory_gib"),
    "kv_cache_dtype": ("fp8", "kv.kv_cache_dtype"),
    "enable_prefix_caching": (False, "kv.enable_prefix_caching"),
    "kv_offload_gib": (2.5, "kv.kv_offload_gib"),
    "max_num_seqs": (17, "scheduler.max_num_seqs"),
    "max_num_batched_tokens": (18, "scheduler.max_num_batched_tokens"),
    "max_chunk_tokens": (19, "scheduler.max_chunk_tokens"),
    "scheduling_policy": ("priority", "scheduler.scheduling_policy"),
    "disable_overlap_schedule": (True, "scheduler.overlap"),
    "disable_cuda_graph": (True, "graphs.enabled"),
    "cuda_graph_max_bs": (20, "graphs.max_bs"),
    "cuda_graph_bs": ((2, 1), "graphs.bs"),
    "enable_cudagraph_gc": (True, "graphs.garbage_collection"),
    "lora_modules": ({"a": "b"}, "lora.modules"),
    "max_loras": (21, "lora.max_loras"),
    "max_lora_rank": (22, "lora.max_lora_rank"),
    "lora_memory_gib": (2.3, "lora.memory_gib"),
    "tensor_parallel_size": (24, "parallel.tensor_parallel_size"),
}
STORED = {  # where the field's value is not the keyword's
    "hf_overrides": '{"rope_theta": 1.0}',
    "disable_overlap_schedule": False,
    "disable_cuda_graph": False,
    "lora_modules": (LoRAModule("a", "b"),),
}
SPECULATIVE = {  # one keyword, whose value is a mapping, fills a group
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 6,
    "prompt_lookup_min": 2,
}
# Settings that only a server has (a limit of its queue, adapters that are loaded and unloaded,
# torchrun, a log).
NOT_OFFLINE = {"scheduler.max_waiting", "lora.host_memory_gib", "lora.root", "parallel.launcher"}
NOT_OFFLINE |= {"logs.level", "logs.format"}


def fields_of(config):
    return {
        f"{group.name}.{field.name}": getattr(getattr(config, group.name), field.name)
        for group in dataclasses.fields(config)
        for field in dataclasses.fields(getattr(config, group.name))
    }


@pytest.fixture
def config_of_llm(monkeypatch):
    made = []
    monkeypatch.setattr(LLM, "_load", lambda self, config, *rest: made.append(config))

    def config(**keywords):
        LLM("m", **keywords)
        return made.pop()

    return config


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_a_keyword_of_llm_sets_its_field_and_no_other(config_of_llm, keyword):
    value, field = KEYWORDS[keyword]
    adapters = {"lora_modules": {"a": "b"}} if field.startswith("lora") else {}
    plain, config = config_of_llm(), config_of_llm(**{**adapters, keyword: value})
    before, after = fields_of(plain), fields_of(config)
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {field, *(["lora.modules"] if adapters else [])}
    assert after[field] == STORED.get(keyword, value)


def test_every_field_has_a_keyword_of_llm_and_every_keyword_a_field():
    assert {*KEYWORDS, "speculative_config"} == set(Settings.__annotations__)
    fields = [field for _, field in KEYWORDS.values()]
    fields += [f"speculative.{name}" for name in SPECULATIVE]
    every = fields_of(EngineConfig(ModelConfig("m")))
    assert sorted([*fields, *NOT_OFFLINE, "model.model"]) == sorted(every)
    names = [field.partition(".")[2] for field in every]
    assert len(set(names)) == len(names), "a keyword finds its group by the field's name"


def test_the_speculative_config_fills_its_group(config_of_llm):
    assert config_of_llm(speculative_config=SPECULATIVE).speculative == SpeculativeConfig(
        "ngram", num_speculative_tokens=3, prompt_lookup_max=6, prompt_lookup_min=2
    )
    assert config_of_llm(speculative_config=None).speculative == SpeculativeConfig()
    assert config.MAX_LOOKUP == spec.MAX_LOOKUP  # what the kernel can look up
    given = {**SPECULATIVE, "prompt_lookup_max": config.MAX_LOOKUP + 1}
    with pytest.raises(ConfigError, match="prompt_lookup_max=32: must be 1 to 31 tokens"):
        config_of_llm(speculative_config=given)


@pytest.mark.parametrize(
    ("given", "lookup"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_max": 3}, (3, 3)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
    ],
)
def test_a_limit_of_the_lookup_is_the_others_default(given, lookup):
    assert SpeculativeConfig("ngram", num_speculative_tokens=1, **given).lookup == lookup


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"num_speculative_tokens": 3}, "method: is missing: give one of ngram"),
        (
            {"method": "eagle3", "num_speculative_tokens": 3},
            "method='eagle3': must be one of ngram",
        ),
        ({"method": "ngram"}, "num_speculative_tokens=0: must be 1 to 15"),
        ({"method": "ngram", "num_speculative_tokens": 16}, "num_speculative_tokens=16"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens=True"),
        ({**SPECULATIVE, "prompt_lookup_max": 0}, "prompt_lookup_max=0: must be 1 to 31 tokens"),
        ({**SPECULATIVE, "prompt_lookup_min": "2"}, "prompt_lookup_min='2': must be 1 to 31"),
        ({**SPECULATIVE, "prompt_lookup_min": 7}, "prompt_lookup_min=7: must be at most prompt_"),
        ({**SPECULATIVE, "model": "m"}, "'model': is not supported; there are method, num_spec"),
    ],
)
def test_bad_settings_of_speculative_decoding_are_refused_by_name(given, problem):
    with pytest.raises(ConfigError, match=f"^speculative_config: {problem}"):
        LLM("m", speculative_config=given)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"hf_overrides": "[1]"}, r"^hf_overrides='\[1\]': must be a JSON object, such as"),
        ({"hf_overrides": "{"}, r"^hf_overrides='\{': must be a JSON object"),
        ({"hf_overrides": "[" * 10**5}, r"^hf_overrides='\[{80}': must be a JSON object"),
        ({"hf_overrides": {"a": {1, 2}}}, r"^hf_overrides=.*\{1, 2\}.*: cannot be written as JSON"),
        ({"revision": ""}, "^revision='': must be unset, or not empty"),
        ({"tokenizer": " "}, "^tokenizer=' ': must be unset, or not empty"),
    ],
)
def test_settings_of_the_files_that_make_no_sense_are_refused(given, problem):
    with pytest.raises(ConfigError, match=problem):
        LLM("m", **given)


def test_an_unknown_keyword_of_llm_is_refused_by_name():
    with pytest.raises(TypeError, match="LLM has no setting 'max_seqs': there are device, dtype"):
        LLM("m", max_seqs=3)


def test_a_configuration_survives_as_text_with_every_field():
    values = {field: STORED.get(name, value) for name, (value, field) in KEYWORDS.items()} | {
        "model.model": "other",
        "lora.root": "/adapters",
        "lora.host_memory_gib": 3.5,
        "parallel.launcher": "torchrun",
        "logs.level": "error",
        "logs.format": "json",
        "scheduler.max_waiting": 2**63 - 1,
        **{f"speculative.{name}": value for name, value in SPECULATIVE.items()},
    }
    exclusive = {"kv.num_blocks": 14, "graphs.bs": (2, 1)}
    offload = {"kv.kv_offload_gib": 2.5}  # not without prefix caching
    plain, seen = EngineConfig(ModelConfig("m")), set()
    first = {**values, **dict.fromkeys(exclusive), **dict.fromkeys(offload, 0.0)}
    for given in (first, {"model.model": "m", **exclusive, **offload}):
        groups = {}
        for field, value in given.items():
            group, _, name = field.partition(".")
            groups.setdefault(group, {})[name] = value
        config = config_of(groups)
        seen |= fields_of(config).items() - fields_of(plain).items()
        assert read_config_text(config_text(config)) == config
    assert {field for field, _ in seen} == set(fields_of(plain))
