"""Speculative decoding by n-gram over a real model: the same tokens in fewer steps."""

from __future__ import annotations

import pytest

from kiln import LLM
from kiln.engine.requests.sampling_params import SamplingParams

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
NGRAM["prompt_lookup_min"] = 2
GRAPHS = {"KILN_CPU_GRAPHS": "emulate", "KILN_GRAPH_STRICT": "1", "KILN_GRAPH_VERIFY": "shadow:2"}
PROMPTS = [[5, 9, 5, 11, 5, 9], [7] * 19, [*range(20, 40)] * 2]
SETTINGS = {
    "greedy": {"temperature": 0},
    "long": {"temperature": 0, "max_tokens": 20, "repetition_penalty": 1.2},
    "cold": {"temperature": 0.2, "seed": 5},
    "stop": {"temperature": 0, "stop_token_ids": [*range(0, 300, 17)], "min_tokens": 5},
    "bias": {"temperature": 0, "logit_bias": {7: 100, 8: 99}, "frequency_penalty": 0.7},
    "words": {"temperature": 0, "bad_words_token_ids": [[i, i + 1] for i in range(0, 298, 2)]},
}


def answers(folder, **flags):
    made = {"max_model_len": 64, "block_size": 4, "num_kv_blocks": 512, "max_num_seqs": 6}
    with LLM(str(folder), device="cpu", dtype="float32", **{**made, **flags}) as llm:
        prompts = [prompt for prompt in PROMPTS for _ in SETTINGS]
        params = [
            SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **own})
            for _ in PROMPTS
            for own in SETTINGS.values()
        ]
        outputs = llm.generate(prompts, params)
        return [one.outputs[0].token_ids for one in outputs], llm.core.stats()


@pytest.fixture(scope="module")
def wanted(random_llama):
    """Answers without drafts, which other tests compare with transformers."""
    return answers(random_llama[1])[0]


@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        ({}, {}),
        ({"disable_overlap_schedule": True}, {}),
        ({"max_num_batched_tokens": 16}, {}),
        ({"num_kv_blocks": 40}, {}),
        ({"cuda_graph_bs": [1, 4, 6]}, GRAPHS),
        ({"tensor_parallel_size": 2}, {}),
    ],
    ids=str,
)
def test_tokens_are_those_without_drafts(random_llama, wanted, environment, flags, variables):
    environment(**variables)
    found, stats = answers(random_llama[1], speculative_config=NGRAM, **flags)
    assert found == wanted
    assert 0 < stats.spec_decode_num_accepted_tokens <= stats.spec_decode_num_draft_tokens
