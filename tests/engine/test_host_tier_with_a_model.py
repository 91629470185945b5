"""The host tier over a real model: blocks come back whole, in each layout and on each rank."""

from __future__ import annotations

import pytest

from kiln import LLM
from kiln.engine.errors import ConfigError
from kiln.engine.requests.sampling_params import SamplingParams

PROMPTS = [[number, *range(number, number + 24), number] for number in range(5)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=3, max_tokens=9, ignore_eos=True),
    # Penalties read the tokens of the prompt from the pool.
    SamplingParams(temperature=0, max_tokens=8, repetition_penalty=1.6, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=8, presence_penalty=2.0, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=5, logprobs=2, ignore_eos=True),
]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


def answers(folder, **flags):
    """Two turns of each conversation: the pool holds one of them, or one and a half."""
    made = {"max_model_len": 64, "block_size": 4, "num_kv_blocks": 16, "max_num_seqs": 4}
    with LLM(str(folder), device="cpu", dtype="float32", **{**made, **flags}) as llm:
        first = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, PARAMS)]
        again = [[*one, *two, 5] for one, two in zip(PROMPTS, first, strict=True)]
        outputs = llm.generate(again, PARAMS)
        second = [one.outputs[0].token_ids for one in outputs]
        cached = [one.num_cached_tokens for one in outputs]
        return first + second, cached, llm.core.stats()


@pytest.fixture(scope="module")
def wanted(random_llama):
    return answers(random_llama[1], enable_prefix_caching=False)[0]


@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        ({}, {}),
        ({}, {"KILN_CPU_KERNELS": "host"}),  # the tokens of a head are contiguous
        ({"speculative_config": NGRAM, "max_num_batched_tokens": 16}, {}),
        ({"disable_overlap_schedule": True}, {}),
        ({"tensor_parallel_size": 2}, {}),
    ],
    ids=str,
)
def test_tokens_are_those_without_caching(random_llama, wanted, environment, flags, variables):
    environment(**variables)
    found, cached, stats = answers(random_llama[1], kv_offload_gib=0.01, **flags)
    assert found == wanted
    assert min(cached) >= 16
    assert stats.kv_offload_loaded_blocks >= 16
    assert stats.kv_offload_blocks <= stats.kv_offload_stored_blocks


def test_memory_that_holds_no_block_is_refused(random_llama):
    with pytest.raises(ConfigError, match=r"kv_offload_gib=1e-09: holds no KV block"):
        answers(random_llama[1], kv_offload_gib=1e-9)
