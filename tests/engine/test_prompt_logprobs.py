"""Log-probabilities of prompts are transformers', however the prompt is cut up."""

from __future__ import annotations

import pytest
import torch

from kiln import LLM, SamplingParams
from kiln.engine.runner import prompt_logprobs

PROMPTS = [[5, 9, 5, 11], [7] * 19, list(range(20, 75)), [3]]
GRAPHS = {"KILN_CPU_GRAPHS": "emulate", "KILN_GRAPH_STRICT": "1", "KILN_GRAPH_VERIFY": "off"}


@pytest.fixture(scope="module")
def wanted(random_llama):
    network, _ = random_llama
    with torch.no_grad():
        return [network(torch.tensor([prompt])).logits[0].log_softmax(-1) for prompt in PROMPTS]


def check(output, prompt, logprobs, count):
    assert len(output.prompt_logprobs) == len(prompt)
    assert output.prompt_logprobs[0] is None
    for place, entries in enumerate(output.prompt_logprobs[1:], start=1):
        row, token = logprobs[place - 1], prompt[place]
        top = row.topk(count)
        assert set(entries) == {token, *top.indices.tolist()}
        for one, entry in entries.items():
            assert entry.logprob == pytest.approx(row[one].item(), abs=1e-4)
            assert entry.rank == int((row > row[one]).sum()) + 1


@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        ({}, {}),
        ({"max_num_batched_tokens": 16, "max_num_seqs": 5}, {}),
        ({"num_kv_blocks": 6, "max_model_len": 80}, {}),
        ({"disable_overlap_schedule": True}, {}),
        ({"max_num_seqs": 4, "cuda_graph_bs": [4], "enable_cudagraph_gc": True}, GRAPHS),
    ],
    ids=["whole", "chunks", "preempted", "not ahead", "graphs"],
)
def test_they_are_those_of_transformers(random_llama, wanted, environment, flags, variables):
    environment(**variables)
    params = [
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, prompt_logprobs=count)
        for count in (0, 3, 20, 1)
    ]
    llm = LLM(str(random_llama[1]), dtype="float32", **flags)
    plain = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    outputs = llm.generate([*PROMPTS, PROMPTS[0]], [*params, plain])
    stats = llm.core.stats()
    llm.close()
    assert bool(stats.preemptions) == ("num_kv_blocks" in flags)
    assert outputs[-1].prompt_logprobs is None
    assert outputs[-1].outputs[0].token_ids == outputs[0].outputs[0].token_ids
    for output, prompt, logprobs, one in zip(outputs, PROMPTS, wanted, params, strict=False):
        check(output, prompt, logprobs, one.prompt_logprobs)


def test_of_several_answers_the_prompt_is_reported_once(random_llama, wanted):
    llm = LLM(str(random_llama[1]), dtype="float32")
    params = SamplingParams(n=3, max_tokens=2, prompt_logprobs=2, logprobs=1, seed=1)
    (output,) = llm.generate([PROMPTS[0]], params)
    llm.close()
    assert len(output.outputs) == 3
    assert all(len(one.logprobs) == 2 for one in output.outputs)
    check(output, PROMPTS[0], wanted[0], 2)


def test_a_long_prompt_needs_only_some_logits_at_once(random_llama, wanted, monkeypatch):
    """Four rows of 300 float32 logits fit."""
    monkeypatch.setattr(prompt_logprobs, "_BYTES", 4 * 300 * 4)
    llm = LLM(str(random_llama[1]), dtype="float32")
    rows, logits = [], type(llm.core.runner.loaded.model).logits

    def noted(self, hidden):
        rows.append(len(hidden))
        return logits(self, hidden)

    monkeypatch.setattr(type(llm.core.runner.loaded.model), "logits", noted)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    (output,) = llm.generate([PROMPTS[2]], params)
    llm.close()
    check(output, PROMPTS[2], wanted[2], 1)
    assert max(rows) == 4
