"""Settings of the KV pool and of graphs that do not apply are refused, not ignored."""

from __future__ import annotations

import pytest

from kiln import LLM
from kiln.engine.cli.options import DEMO_FOLDER
from kiln.engine.config import GraphConfig, KVConfig
from kiln.engine.errors import ConfigError


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
    from kiln.engine.runner import loaded_model

    seen = []

    def refuse(needs, block_size):
        seen.append((needs, block_size))
        raise ConfigError("no such blocks")

    monkeypatch.setattr(loaded_model, "kernels_can_attend", refuse)
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


def test_graphs_are_on_by_default_with_sizes_up_to_the_largest_step():
    assert GraphConfig() == GraphConfig(True, None, None, False)


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


def test_the_settings_of_graphs_are_keywords_of_llm(monkeypatch):
    made = []
    monkeypatch.setattr(LLM, "_load", lambda self, config, *rest: made.append(config.graphs))
    LLM("m")
    LLM("m", disable_cuda_graph=True, enable_cudagraph_gc=True, cuda_graph_max_bs=7)
    LLM("m", cuda_graph_bs=[4, 1])
    assert made == [GraphConfig(), GraphConfig(False, 7, None, True), GraphConfig(bs=(4, 1))]
