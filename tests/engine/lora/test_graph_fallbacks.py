"""Which steps with adapters run without a graph: those whose own adapters have no room in one."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from kiln import LLM, SamplingParams
from kiln.engine.config import (
    EngineConfig,
    GraphConfig,
    KVConfig,
    LoRAConfig,
    LoRAModule,
    ModelConfig,
    SchedulerConfig,
)
from kiln.engine.requests.adapter_job import LoadAdapter, UnloadAdapter

PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture(params=["jit", "csgmv"])
def llm(request, made, on_host, environment):
    """An engine with emulated graphs, which were captured for one adapter."""
    environment(
        KILN_CPU_GRAPHS="emulate",
        KILN_GRAPH_PREFILL="off",
        KILN_GRAPH_STRICT="1",
        KILN_LORA_BACKEND=request.param,
    )
    own = made("llama")
    first = LoRAModule("first", str(own.adapters["q-and-up"]))
    return LLM.from_config(
        EngineConfig(
            ModelConfig(str(own.folder), dtype="float32", device="cpu"),
            KVConfig(num_blocks=64),
            SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=32),
            GraphConfig(bs=(2,)),
            LoRAConfig((first,), max_loras=3, memory_gib=0.01, root=str(own.folder.parent)),
        )
    )


def end(llm, job):
    llm.core.adapters.begin(job)
    deadline = time.monotonic() + 60
    while not (ended := llm.core.adapters.end()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert ended[0].error is None


def test_a_step_falls_back_only_if_one_of_its_own_adapters_has_no_room(llm, answers):
    prompts = {
        form: (prompt, tokens[:3]) for prompt, form, tokens in zip(*answers("llama"), strict=True)
    }

    def fallbacks(**forms):
        """Answer a prompt with each adapter at once; return why decode steps had no graph."""
        before = Counter(llm.core.stats().graph_fallbacks)
        asked = [prompts[form] for form in forms.values()]
        names = [None if name == "base" else name for name in forms]
        outputs = llm.generate([prompt for prompt, _ in asked], PARAMS, lora=names)
        assert [one.outputs[0].token_ids for one in outputs] == [tokens for _, tokens in asked]
        counts = Counter(llm.core.stats().graph_fallbacks) - before
        counts.pop("a prefill of too many tokens or rows", None)  # the steps with prompts
        return sorted(counts)

    assert fallbacks(first="q-and-up", base=None) == []
    end(llm, LoadAdapter("1", "late", "v-alone"))  # a larger rank, and fewer ranks in all
    end(llm, LoadAdapter("2", "same", "q-and-up"))
    end(llm, LoadAdapter("3", "head", "head"))  # another projection
    assert fallbacks(first="q-and-up", base=None) == []
    for name, form in (("late", "v-alone"), ("head", "head")):
        assert fallbacks(**{name: form}) == [
            "a LoRA adapter with more ranks than graphs have room for"
        ]
        assert fallbacks(first="q-and-up", same="q-and-up") == []
        assert fallbacks(same="q-and-up", **{name: form}) != []
    for job, name in (("4", "late"), ("5", "head")):
        end(llm, UnloadAdapter(job, name, 5))
    assert fallbacks(first="q-and-up", same="q-and-up") == []
    assert sum(llm.core.stats().graph_replays.values()) > 10
