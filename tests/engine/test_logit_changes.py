"""Penalties, bans and allowed tokens give transformers' greedy tokens, one step ahead or not."""

from __future__ import annotations

import pytest
import torch

from kiln import LLM, SamplingParams

NUM_TOKENS = 14
PROMPTS = [[5, 9, 5, 11], [7] * 19, list(range(20, 55)), [3]]
GRAPHS = {"KILN_CPU_GRAPHS": "emulate", "KILN_GRAPH_STRICT": "1", "KILN_GRAPH_VERIFY": "off"}


def wanted(network, prompt, **options):
    """Transformers' answer to a prompt."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": NUM_TOKENS, **options}
    return network.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :]


@pytest.fixture(scope="module")
def cases(random_llama):
    """Requests, and what transformers answers to each of them."""
    network, _ = random_llama
    plain = [wanted(network, prompt).tolist() for prompt in PROMPTS]
    made = []
    for prompt, answer in zip(PROMPTS, plain, strict=True):
        words = [answer[2:5], answer[6:7], [answer[0], answer[0]]]  # three tokens, one, and two
        few = sorted({*range(0, 300, 7)})
        for own, theirs in (
            ({}, {}),
            ({"repetition_penalty": 1.8}, {"repetition_penalty": 1.8}),
            ({"bad_words_token_ids": words}, {"bad_words_ids": words}),
            ({"allowed_token_ids": few}, {"prefix_allowed_tokens_fn": lambda *_, few=few: few}),
            (
                {"allowed_token_ids": few, "repetition_penalty": 1.5},
                {"prefix_allowed_tokens_fn": lambda *_, few=few: few, "repetition_penalty": 1.5},
            ),
        ):
            params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, **own)
            made.append((prompt, params, wanted(network, prompt, **theirs).tolist()))
    answers = [answer for _, _, answer in made]
    assert len({tuple(answer) for answer in answers}) > 3 * len(PROMPTS), "the settings act"
    return made


@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        ({}, {}),
        ({"max_num_batched_tokens": 16, "max_num_seqs": 5}, {}),
        ({"num_kv_blocks": 9, "max_model_len": 64}, {}),
        ({"disable_overlap_schedule": True}, {}),
        ({"max_num_seqs": 6, "cuda_graph_bs": [4, 6], "enable_cudagraph_gc": True}, GRAPHS),
    ],
    ids=["ahead", "chunks", "preempted", "not ahead", "graphs"],
)
def test_tokens_are_those_of_transformers(random_llama, cases, environment, flags, variables):
    environment(**variables)
    llm = LLM(str(random_llama[1]), dtype="float32", **flags)
    found = llm.generate([prompt for prompt, _, _ in cases], [params for _, params, _ in cases])
    stats = llm.core.stats()
    llm.close()
    for output, (prompt, params, answer) in zip(found, cases, strict=True):
        assert output.outputs[0].token_ids == answer, (prompt, params)
    assert bool(stats.preemptions) == ("num_kv_blocks" in flags)
    if flags.get("disable_overlap_schedule"):
        assert stats.steps_not_ahead == stats.steps
    else:
        assert stats.steps_not_ahead < 5, "the first one, and those that wait for rows or blocks"


def test_frequency_and_presence_count_the_output_alone(random_llama):
    """With the tokens of the prompt in the count, the first token would differ."""
    network, folder = random_llama
    llm = LLM(str(folder), dtype="float32")
    params = SamplingParams(
        temperature=0,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        frequency_penalty=1.9,
        presence_penalty=1.1,
        logprobs=0,
    )
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(NUM_TOKENS):
            with torch.no_grad():
                logits = network(torch.tensor([tokens])).logits[0, -1]
            for token in {*tokens[len(prompt) :]}:
                count = tokens[len(prompt) :].count(token)
                logits[token] -= 1.9 * count + 1.1
            tokens.append(int(logits.argmax()))
        (output,) = llm.generate([prompt], params)
        assert output.outputs[0].token_ids == tokens[len(prompt) :]
    llm.close()
