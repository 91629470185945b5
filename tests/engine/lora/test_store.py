"""The adapter pool's size, the limit of host memory, and what is copied beside the steps."""

from __future__ import annotations

import pytest
import torch

from kiln.engine.config import LoRAConfig, LoRAModule
from kiln.engine.errors import AdapterError, ConfigError
from kiln.engine.llm import LLM
from kiln.engine.lora.store import RankStore
from kiln.engine.requests.sampling_params import SamplingParams

FORMS = ["rank-1", "rank-64", "patterns"]


@pytest.fixture
def store(made, sites):
    """Return a function from the settings of LoRAConfig to a store of three adapters."""
    own = made("llama")

    def make(*forms, **settings):
        modules = tuple(LoRAModule(form, str(own.adapters[form])) for form in forms)
        config = LoRAConfig(modules, **settings)
        cpu = torch.device("cpu")
        return RankStore(config, sites(own.folder), torch.float32, cpu, lambda *_: None)

    return make


def test_the_pool_has_room_for_the_largest_that_may_run(store, tmp_path):
    whole = store(*FORMS)
    sizes = whole.sizes
    assert (whole.num_slots, whole.size) == (3, sum(sizes.values()))
    two = store(*FORMS, max_loras=2)
    assert (two.num_slots, two.size) == (2, sizes["rank-64"] + sizes["patterns"])
    rooted = store("rank-1", root=str(tmp_path))
    assert (rooted.num_slots, rooted.size) == (8, 2**30 // 4)
    given = store("rank-1", memory_gib=2**-10, max_lora_rank=1)
    assert given.size == given.pool.values.numel() == 2**20 // 4


def test_memory_that_is_too_small_is_refused_with_the_adapter(store, tmp_path):
    with pytest.raises(ConfigError, match=r"lora_memory_gib=0\.0001: LoRA adapter 'rank-64' takes"):
        store(*FORMS, memory_gib=1e-4)
    with pytest.raises(AdapterError, match=r"'rank-64': .* above lora_host_memory_gib=0\.0001"):
        store(*FORMS, host_memory_gib=1e-4)
    with pytest.raises(AdapterError, match=r"'rank-64': .* has rank 64, above max_lora_rank=63"):
        store(*FORMS, max_lora_rank=63)
    with pytest.raises(ConfigError, match="is not a folder"):
        store(root=str(tmp_path / "nothing"))


def test_an_adapter_is_published_when_its_copy_has_ended(store):
    own = store("rank-1")
    own.begin("rank-1", 0, 0)
    while not own.copied():
        assert not own.pool.ranks.any()
    assert own.pool.ranks.any()
    assert own.pool.values.any()
    assert own.copied(wait=True) == []


@pytest.mark.parametrize("name", ["max_loras", "max_lora_rank", "memory_gib"])
def test_settings_without_adapters_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name}=1: must be unset without lora_modules"):
        LoRAConfig(**{name: 1})
    with pytest.raises(ConfigError, match=f"{name}=0: must be above 0"):
        LoRAConfig(root="here", **{name: 0})


def test_more_adapters_than_slots_take_turns(made, answers):
    own = made("llama")
    prompts, lora, wanted = answers("llama")
    modules = {form: str(folder) for form, folder in own.adapters.items()}
    settings = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 64, "max_loras": 2}
    llm = LLM(str(own.folder), lora_modules=modules, **settings)
    llm.core.scheduler.adapters._patience = 0.01
    params = SamplingParams(temperature=0, max_tokens=len(wanted[0]), ignore_eos=True)
    outputs = llm.generate(prompts, params, lora=lora)
    assert [output.outputs[0].token_ids for output in outputs] == wanted
