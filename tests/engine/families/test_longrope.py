"""longrope: a request's frequencies are chosen by what it may become, and by nothing else."""

from __future__ import annotations

import pytest
import torch
from depth import at_depth
from tiny.model import Tiny
from tiny.phi3 import LONGROPE, by_longest
from tiny_answers import EXACT, draw_prompts, serve

from kiln import SamplingParams

NAME, LONGEST = "phi3-longrope", 26  # tokens of a short request
GRAPHS = {"KILN_CPU_GRAPHS": "emulate", "KILN_GRAPH_STRICT": "1", "KILN_GRAPH_VERIFY": "off"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


def greedy(most, **more):
    return SamplingParams(
        temperature=0, max_tokens=most, logprobs=20, **{"prompt_logprobs": 20, **more}
    )


def check(logits, prompt, params, output, limit=60):
    """Compare all log-probabilities with the list for as many tokens as there may be."""
    total = limit if params.max_tokens is None else len(prompt) + params.max_tokens
    own = output.outputs[0]
    rows = logits(torch.tensor([*prompt, *own.token_ids]), total)
    for count, (row, token) in enumerate(zip(rows[len(prompt) - 1 :], own.token_ids, strict=False)):
        row = row.clone()
        row[own.token_ids[:count]] -= params.presence_penalty
        assert float(row.max() - row[token]) <= EXACT
    logprobs = rows.log_softmax(-1)
    reported = [*(output.prompt_logprobs or [None] * len(prompt))[1:], *own.logprobs]
    for row, entries in zip(logprobs, reported, strict=False):
        for at, one in (entries or {}).items():
            assert abs(one.logprob - float(row[at])) <= EXACT


def mixed(llm, logits, **more):
    """Ask for short and long answers to the same prompts, together; return the cached tokens."""
    prompts = draw_prompts((9, 13, 17))
    asked = [(prompt, LONGEST - len(prompt) + extra) for prompt in prompts for extra in (0, 1)]
    params = [greedy(most, **more) for _, most in asked] + [greedy(30, **more)]
    asked = [*(prompt for prompt, _ in asked), prompts[0] * 3]  # a prompt that is long already
    outputs = llm.generate(asked, params)
    for prompt, own, output in zip(asked, params, outputs, strict=True):
        check(logits, prompt, own, output)
    return [output.num_cached_tokens for output in outputs]


MODES = {
    "batched": ({}, {}),
    "chunked": ({"max_chunk_tokens": 5}, {}),
    "preempted": ({"num_kv_blocks": 16, "block_size": 4}, {}),
    "drafts": ({"speculative_config": NGRAM}, {}),
    "in graphs": ({"max_num_batched_tokens": 64, "cuda_graph_bs": [1, 8]}, GRAPHS),
    "by host kernels": ({}, {"KILN_CPU_KERNELS": "host"}),
}


@pytest.mark.parametrize("mode", at_depth(["batched", "drafts"], list(MODES)))
def test_short_and_long_requests_of_a_step_have_their_own_list(made, environment, mode):
    folder, logits = made(NAME)
    flags, variables = MODES[mode]
    environment(**variables)
    llm = serve(folder, **flags)
    mixed(llm, logits, prompt_logprobs=None if mode == "in graphs" else 20)
    if mode == "preempted":
        assert llm.core.stats().preemptions


def test_a_long_request_reads_no_keys_of_a_short_one(made):
    """Nor the other way round."""
    folder, logits = made(NAME)
    llm = serve(folder, block_size=4)
    mixed(llm, logits, prompt_logprobs=None)
    assert mixed(llm, logits, prompt_logprobs=None)[:6] == [8, 8, 12, 12, 16, 16]


def test_blocks_from_the_host_are_of_the_same_list(made):
    folder, logits = made(NAME)
    flags = {"num_kv_blocks": 16, "kv_offload_gib": 0.001, "max_num_seqs": 1}
    llm = serve(folder, block_size=4, **flags)
    for _ in range(2):
        mixed(llm, logits, prompt_logprobs=None)
    assert llm.core.stats().kv_offload_loaded_blocks


def test_a_request_without_a_limit_may_become_long(made):
    folder, logits = made(NAME)
    (prompt,) = draw_prompts((7,))
    params = greedy(None, stop_token_ids=list(range(150)))
    (output,) = serve(folder).generate([prompt], [params])
    assert len(prompt) + len(output.outputs[0].token_ids) < LONGEST
    check(logits, prompt, params, output)


def test_an_engine_of_short_requests_has_one_list(made):
    folder, logits = made(NAME)
    llm = serve(folder, max_model_len=LONGEST)
    (layer, *_) = llm.core.runner.loaded.model.attention_layers
    assert layer.rotary.table.shape == (LONGEST, 16)
    (prompt,) = draw_prompts((9,))
    for most in (17, None):
        params = greedy(most)
        (output,) = llm.generate([prompt], [params])
        check(logits, prompt, params, output, limit=LONGEST)


def test_penalties_count_the_tokens_of_long_requests(made):
    folder, logits = made(NAME)
    (prompt,) = draw_prompts((20,))
    params = greedy(12, presence_penalty=2.0, prompt_logprobs=None)
    (output,) = serve(folder).generate([prompt], [params])
    assert len(set(output.outputs[0].token_ids)) > 6
    check(logits, prompt, params, output)


@pytest.mark.parametrize(
    ("config", "rope"), [("Llama", {}), ("Ministral3", {"llama_4_scaling_beta": 0.4})]
)
def test_other_families_have_longrope_too(tmp_path, config, rope):
    """Where queries grow with their position, that of a long request is its position as well."""
    rope = {**LONGROPE["rope_parameters"], **rope, "original_max_position_embeddings": LONGEST}
    fields = {**LONGROPE, "rope_parameters": rope, "head_dim": 16}
    one = Tiny("own", f"{config}Config", fields, logits=by_longest)
    model = one.save(tmp_path)
    with torch.inference_mode():
        mixed(serve(tmp_path), lambda ids, total: one.logits(model, ids, total))
