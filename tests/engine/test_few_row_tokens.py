"""Whole models whose products of few rows are skinny_gemm's: their tokens, and the bits of a row.

A step has at most 16 tokens, so that the kernel multiplies every row. What bf16 rounds is told by
KILN_LINEAR=torch: its log-probabilities are as far from those in float64.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from depth import at_depth
from emulated_models import Emulated
from packed_gpt_oss import save_packed

from kiln import LLM, SamplingParams
from kiln.jit_kernels import implementations
from kiln.jit_kernels.ops.linear.checks import MOST_ROWS

PROMPTS = [[(7 * place + 31 * number + 1) % 300 for place in range(1 + number % 5)]
           for number in range(MOST_ROWS)]  # fmt: skip
NUM_TOKENS = at_depth(6, 8)
LIKELY = 10
WORSE, WORST = 1.25, 2.0  # of the median and the largest error, relative to torch's
CLEAR = 4  # medians of torch's error: two logits that are further apart keep their order
CHECKPOINTS = {  # packer, or None for plain weights, and what the kernel then reads besides those
    "plain": (None, {"Plain"}),
    "fp8 channel": ("ct-float-quantized-float-channel-token", {"Plain", "E4M3"}),
    "fp8 block": ("fp8-blocks", {"Plain", "E4M3"}),
    "int8 token": ("ct-int-quantized-int-channel-token", {"Plain", "I8"}),
    "int8 weights only": ("ct-int8-channel", {"Plain", "I8"}),
    "int4": ("awq-32", {"Plain", "U4"}),
}
CASES = [(name, "llama", "bfloat16") for name in CHECKPOINTS] + at_depth(
    [],
    [(name, "llama", "float16") for name in CHECKPOINTS]
    + [(name, "qwen3-moe", "bfloat16") for name in ("plain", "int8 token", "int4")],
)


@pytest.fixture
def products(monkeypatch):
    """The rows of each product by the kernel, the format of its weights, and what is special.

    That is "experts", or the activation behind it.
    """
    found, decide = [], implementations._decide

    def recording(spec, variant, device):
        made = decide(spec, variant, device)
        if spec.family != "linear" or made.implementation == "torch":
            return made

        def run(a, bound):
            special = "" if a.ends is None else "experts"
            special = bound.variant.get("gate", special)
            found.append((len(a.x), bound.variant["weight"], special))
            made.run(a, bound)

        return dataclasses.replace(made, run=run)

    monkeypatch.setattr(implementations, "_decide", recording)
    return found


@pytest.fixture
def serve(environment):
    def make(folder, dtype, linear, **flags):
        by_torch = {"KILN_QUANTIZED_LINEAR": "torch"} if linear == "torch" else {}
        environment(KILN_CPU_KERNELS="host", KILN_LINEAR=linear, **by_torch)
        sizes = {"max_model_len": 32, "num_kv_blocks": 64, **flags}
        return LLM(str(folder), device="cpu", dtype=dtype, **sizes)

    return make


def ask(llm, prompts, count=NUM_TOKENS, prompt_logprobs=None):
    params = SamplingParams(
        temperature=0, max_tokens=count, logprobs=20, prompt_logprobs=prompt_logprobs
    )
    return llm.generate(prompts, params)


def chosen(output):
    return list(output.outputs[0].token_ids)


def bits(output):
    """Return the tokens of an answer, and every bit of their log-probabilities."""
    return chosen(output), [
        {token: one.logprob for token, one in entries.items()}
        for entries in output.outputs[0].logprobs
    ]


def as_prompts(llm, outputs):
    """Return the log-probabilities at each token of some answers, by another engine."""
    whole = [prompt + chosen(one) for prompt, one in zip(PROMPTS, outputs, strict=True)]
    told = ask(llm, whole, count=1, prompt_logprobs=20)
    return [
        one.prompt_logprobs[len(prompt) : len(prompt) + NUM_TOKENS]
        for prompt, one in zip(PROMPTS, told, strict=True)
    ]


def error(entries, wanted):
    """Return how far the log-probabilities of the likely tokens are off, of those reported."""
    likely = [token for token in wanted.topk(LIKELY).indices.tolist() if token in entries]
    return max(abs(entries[token].logprob - float(wanted[token])) for token in likely)


@pytest.mark.parametrize(("name", "family", "dtype"), CASES)
def test_tokens_are_those_of_torch_and_bits_those_of_a_request_alone(
    quantised, serve, products, name, family, dtype
):
    packer, formats = CHECKPOINTS[name]
    made = quantised(packer or "fp8-blocks", family)
    model = Emulated(made, rounds=packer is not None)
    folder = made.folder if packer else made.twin
    check(serve, products, folder, dtype, model.logprobs)
    assert {weight for _, weight, _ in products} == formats
    rounds = name in ("fp8 channel", "fp8 block", "int8 token")  # behind the activation
    assert ("silu" in {special for _, _, special in products}) == (not rounds)


def test_experts_of_4_bits_too(serve, products, tmp_path):
    logits = save_packed(tmp_path)
    check(
        serve, products, tmp_path, "bfloat16",
        lambda ids: logits(torch.tensor(ids), 32).double().log_softmax(-1),
    )  # fmt: skip
    assert {(weight, special) for _, weight, special in products} == {
        ("Plain", ""), ("E2M1", "experts"),
    }  # fmt: skip


def check(serve, products, folder, dtype, logprobs):
    """Compare answers with those of torch, and with the exact ``logprobs`` of tokens."""
    llm = serve(folder, dtype, "jit", max_num_batched_tokens=MOST_ROWS)
    together = ask(llm, PROMPTS)
    assert max(rows for rows, _, special in products if special != "experts") == MOST_ROWS
    for count in at_depth((1, 5), (1, 2, 3, 7, 8, 9, 12, 15)):
        first = MOST_ROWS - count
        few = ask(llm, PROMPTS[first:])
        assert [bits(one) for one in few] == [bits(one) for one in together[first:]]

    before = len(products)
    by_torch = as_prompts(serve(folder, dtype, "torch"), together)
    assert len(products) == before
    exact = [
        logprobs(prompt + chosen(one))[len(prompt) - 1 : -1]
        for prompt, one in zip(PROMPTS, together, strict=True)
    ]
    wanted = torch.cat(exact)
    own = [entries for one in together for entries in one.outputs[0].logprobs]
    others = [entries for answer in by_torch for entries in answer]
    errors = torch.tensor([*map(error, own, wanted)])
    usual = torch.tensor([*map(error, others, wanted)])
    assert errors.median() <= WORSE * usual.median()
    assert errors.max() <= WORST * usual.max()
    check_tokens(together, wanted, others, CLEAR * usual.median())


def check_tokens(together, wanted, others, clear):
    """Compare tokens whose log-probability is so clear that rounding does not matter."""
    tokens = torch.tensor([token for one in together for token in chosen(one)])
    best = wanted.topk(2).values
    sure = best[:, 0] - best[:, 1] > clear
    assert sure.sum() >= 5
    assert torch.equal(tokens[sure], wanted.argmax(1)[sure])
    of_torch = [max(entries, key=lambda one: entries[one].logprob) for entries in others]
    assert torch.equal(tokens[sure], torch.tensor(of_torch)[sure])
