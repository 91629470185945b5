"""A copy of an adapter to the device that fails: its request fails by name, and nothing else."""

from __future__ import annotations

import pytest
import torch

from kiln import LLM, SamplingParams
from kiln.engine.config import LoRAConfig, LoRAModule
from kiln.engine.errors import AdapterError
from kiln.engine.lora.loaded_adapter import Copied
from kiln.engine.lora.store import RankStore


@pytest.fixture
def store_of_two(made, sites):
    own = made("llama")
    modules = tuple(LoRAModule(form, str(own.adapters[form])) for form in ("rank-1", "patterns"))
    config, cpu = LoRAConfig(modules), torch.device("cpu")
    return RankStore(config, sites(own.folder), torch.float32, cpu, lambda *_: None)


def fails_once(store):
    """Let the next copy of a store fail."""
    copier = store._copier
    write = copier._write

    def fail(source, place):
        copier._write = write
        raise MemoryError("no page-locked memory")

    copier._write = fail


def test_the_request_fails_by_name_and_the_next_ones_are_served(made, answers):
    own, forms = made("llama"), ["q-and-up", "v-alone"]
    modules = {form: str(own.adapters[form]) for form in forms}
    settings = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 64, "max_loras": 1}
    llm = LLM(str(own.folder), lora_modules=modules, **settings)
    asked = dict(zip(answers("llama")[1], zip(*answers("llama")[::2], strict=True), strict=True))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def ask(*names):
        prompts = [asked[name][0] for name in names]
        return [one.outputs[0] for one in llm.generate(prompts, params, lora=names)]

    fails_once(llm.core.runner.adapter_store)
    failed, base, also = ask("v-alone", None, "v-alone")
    for one in (failed, also):
        assert (one.finish_reason, one.token_ids) == ("error", [])
        assert "LoRA adapter 'v-alone': copying it to the device failed: no page-" in one.error
    assert base.token_ids == asked[None][1]
    for name in ("v-alone", "q-and-up", "v-alone"):
        assert ask(name)[0].token_ids == asked[name][1]
    stats = llm.core.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)


@pytest.mark.parametrize("fails", [True, False])
def test_a_cleared_slot_forgets_a_copy_that_was_not_published(store_of_two, fails):
    """As on a rank whose copy may have succeeded where that of rank 0 failed."""
    store = store_of_two
    if fails:
        fails_once(store)
    store.begin("rank-1", 0, 0)
    store.clear(0)
    store.begin("patterns", 0, 0)
    assert store.copied(wait=True) == [Copied("patterns")]
    assert store.pool.ranks.max() == store._host["patterns"].max_rank
    assert store.copied(wait=True) == []


def test_a_failed_copy_at_the_start_is_an_error_with_its_name(store_of_two):
    fails_once(store_of_two)
    with pytest.raises(AdapterError, match="'rank-1': copying it to the device failed"):
        store_of_two.copy_now("rank-1", 0, 0)
