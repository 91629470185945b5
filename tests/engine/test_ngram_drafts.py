"""Speculative decoding by n-gram over a real model: the same tokens in fewer steps."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from chi_square import chi_square
from depth import at_depth

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
    if "disable_overlap_schedule" not in flags:
        assert stats.steps_not_ahead <= 1 + 0.02 * stats.steps


ALLOWED = [7, 8, 9]


def exact_pairs(model, prompt):
    """Return the probability of the second and third token behind a prompt, by pair."""

    def chances(text):
        logits = model(torch.tensor([text])).logits[0, -1, ALLOWED]
        return dict(zip(ALLOWED, logits.double().softmax(-1).tolist(), strict=True))

    found = Counter()
    with torch.inference_mode():
        for first, one in chances(prompt).items():
            for second, two in chances([*prompt, first]).items():
                for third, three in chances([*prompt, first, second]).items():
                    found[second, third] += one * two * three
    return found


def test_drawn_tokens_have_their_exact_probabilities(random_llama):
    """Drafts that are accepted more often if they are likely do not change what is drawn."""
    model, folder = random_llama
    draws = at_depth(2_000, 20_000)
    prompt = [*itertools.chain(*itertools.product(ALLOWED, repeat=2))]
    wanted = exact_pairs(model, prompt)
    config = {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": 1}
    with LLM(
        str(folder), device="cpu", dtype="float32", max_model_len=64, speculative_config=config
    ) as llm:
        params = [
            SamplingParams(
                temperature=1.0,
                seed=seed,
                max_tokens=3,
                ignore_eos=True,
                allowed_token_ids=ALLOWED,
            )
            for seed in range(draws)
        ]
        outputs = []
        for at in range(0, draws, 8):  # of more rows more drafts must be accepted
            own = params[at : at + 8]
            outputs += llm.generate([prompt] * len(own), own)
        alone = llm.generate([prompt], params[draws // 2])
        counts = llm.core.stats()
    drawn = [one.outputs[0].token_ids for one in outputs]
    assert alone[0].outputs[0].token_ids == drawn[draws // 2]
    pairs = Counter((second, third) for _, second, third in drawn)
    assert set(pairs) <= set(wanted)
    common = [pair for pair, chance in wanted.items() if chance * draws >= 5]
    seen = [pairs[pair] for pair in common]
    chances = [wanted[pair] for pair in common]
    if len(common) < len(wanted):  # all seldom ones together
        seen, chances = [*seen, draws - sum(seen)], [*chances, 1 - sum(chances)]
    assert chi_square(np.array(seen), np.array(chances)) > 1e-4
    assert counts.spec_decode_num_accepted_tokens > draws / 100
