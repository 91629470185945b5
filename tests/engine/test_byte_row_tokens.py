"""Whole models with 8-bit weights whose prefills are quantized_gemm's: their tokens.

What bf16 rounds is told by the toggles that let torch multiply: its log-probabilities are as far
from those in float64.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from depth import at_depth
from emulated_models import Emulated
from quantised_answers import SURE

from kiln import LLM, SamplingParams
from kiln.engine.layers.many_rows import MOST_ROWS_OF_BYTES
from kiln.jit_kernels import implementations

LENGTHS = (17, 40, MOST_ROWS_OF_BYTES)
PROMPTS = [[(7 * place + 31 * length + 1) % 300 for place in range(length)] for length in LENGTHS]
NUM_TOKENS, LIKELY = 4, 10
WORSE, WORST = 1.25, 2.0  # of the median and the largest error, relative to torch's
CLEAR = 4  # medians of torch's error: two logits that are further apart keep their order
CHECKPOINTS = {  # packer, whether it rounds activations, and the format that the kernel reads
    "fp8 weights only": ("ct-float-quantized-float-channel-none", False, "E4M3"),
    "fp8 token": ("ct-float-quantized-float-channel-token", True, "E4M3"),
    "fp8 static": ("ct-float-quantized-float-tensor-static", True, "E4M3"),
    "fp8 blocks, weights only": ("ct-blocks-weights", False, "E4M3"),
    "fp8 blocks": ("fp8-blocks", True, "E4M3"),
    "int8 weights only": ("ct-int-quantized-int-channel-none", False, "I8"),
    "int8 token": ("ct-int-quantized-int-channel-token", True, "I8"),
}
CASES = at_depth(
    [
        *((name, "llama") for name in ("fp8 weights only", "fp8 blocks", "int8 weights only")),
        *((name, "qwen3-moe") for name in ("fp8 blocks, weights only", "int8 token")),
    ],
    [(name, family) for name in CHECKPOINTS for family in ("llama", "qwen3-moe")],
)


@pytest.fixture
def products(monkeypatch):
    """The rows of each product by the kernel, the format of its weights, and whether of experts."""
    found, decide = [], implementations._decide

    def recording(spec, variant, device):
        made = decide(spec, variant, device)
        if spec.name != "quantized_gemm" or made.implementation == "torch":
            return made

        def run(a, bound):
            found.append((len(a.x), bound.variant["weight"], a.ends is not None))
            made.run(a, bound)

        return dataclasses.replace(made, run=run)

    monkeypatch.setattr(implementations, "_decide", recording)
    return found


@pytest.fixture
def answers_of(environment):
    """Return a function from a folder and an implementation to answers, one prompt a step."""

    def answer(folder, by):
        environment(KILN_CPU_KERNELS="host", KILN_LINEAR="torch", KILN_QUANTIZED_LINEAR=by)
        sizes = {"max_model_len": LENGTHS[-1] + NUM_TOKENS, "num_kv_blocks": 64}
        params = SamplingParams(
            temperature=0, max_tokens=NUM_TOKENS, logprobs=20, prompt_logprobs=20
        )
        own = {"max_num_seqs": 1, "max_num_batched_tokens": LENGTHS[-1], "dtype": "bfloat16"}
        return LLM(str(folder), device="cpu", **sizes, **own).generate(PROMPTS, params)

    return answer


def entries_of(answers):
    """Return the log-probabilities at the positions of all prompts and of first tokens."""
    return [
        entries
        for one in answers
        for entries in (*one.prompt_logprobs[1:], one.outputs[0].logprobs[0])
    ]


def error(entries, wanted):
    """Return how far the log-probabilities of the likely tokens are off, of those reported."""
    likely = [token for token in wanted.topk(LIKELY).indices.tolist() if token in entries]
    return max(abs(entries[token].logprob - float(wanted[token])) for token in likely)


@pytest.mark.parametrize(("name", "family"), CASES)
def test_tokens_are_those_of_torch(quantised, answers_of, products, name, family):
    packer, rounds, format_ = CHECKPOINTS[name]
    made = quantised(packer, family)
    own = answers_of(made.folder, "auto")
    assert {rows for rows, _, grouped in products if not grouped} >= {*LENGTHS}
    assert {kind for _, kind, _ in products} == {format_}
    of_experts = {rows for rows, _, grouped in products if grouped}
    assert of_experts >= ({2 * length for length in LENGTHS} if family == "qwen3-moe" else set())
    before = len(products)
    by_torch = answers_of(made.folder, "torch")
    assert len(products) == before

    model = Emulated(made, rounds=rounds)
    logits, gaps = (torch.cat(one) for one in zip(*map(model.run, PROMPTS), strict=True))
    wanted, certain = logits.log_softmax(-1), gaps > SURE
    found, usual = (torch.tensor([*map(error, entries_of(one), wanted)]) for one in (own, by_torch))
    assert len(found) == sum(LENGTHS)
    assert found.median() <= WORSE * usual.median()
    assert found[certain].max() <= WORST * usual[certain].max()
    best = wanted.topk(2).values
    clear = certain & (best[:, 0] - best[:, 1] > CLEAR * usual.median())
    assert clear.sum() >= 5
    for answers in (own, by_torch):
        tokens = [max(one, key=lambda token: one[token].logprob) for one in entries_of(answers)]
        assert torch.equal(torch.tensor(tokens)[clear], wanted.argmax(1)[clear])
        for prompt, one in zip(PROMPTS, answers, strict=True):
            chosen = list(one.outputs[0].token_ids)
            behind = model.logprobs(prompt + chosen)[len(prompt) - 1 : -1]
            worse = behind.max(1).values - behind[torch.arange(NUM_TOKENS), torch.tensor(chosen)]
            assert worse.max() <= CLEAR * usual.max()
