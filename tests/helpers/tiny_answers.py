"""Answers of an engine over a tiny model, compared with transformers in float32.

Each position is compared on the tokens that the engine chose before it: all log-probabilities that
it reports are within EXACT of transformers', and its token is the best one but for EXACT.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kiln import LLM, SamplingParams

EXACT = 1e-4
LENGTHS = (1, 3, 9, 17, 26, 40)
NUM_TOKENS = 10
SIZES = {"max_model_len": max(LENGTHS) + NUM_TOKENS + 10, "num_kv_blocks": 96}

Logits = Callable[[torch.Tensor, int], torch.Tensor]
"""(token_ids [tokens], tokens that the request may reach) -> logits [tokens, vocab_size]."""


def draw_prompts(lengths: Sequence[int] = LENGTHS, seed: int = 1) -> list[list[int]]:
    """Return a prompt of each length."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 300, (length,), generator=draw).tolist() for length in lengths]


def serve(folder: Path, **flags: Any) -> LLM:
    """Return an engine of a checkpoint, in float32."""
    return LLM(str(folder), device="cpu", dtype="float32", **{**SIZES, **flags})


def ask(
    llm: LLM, prompts: Sequence[list[int]], whole: bool = False, **more: Any
) -> list[tuple[list[int], Any]]:
    """Return each prompt and its greedy answer. ``whole``: report the prompts' positions too."""
    params = SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, logprobs=20, prompt_logprobs=20 if whole else None
    )
    return list(zip(prompts, llm.generate(list(prompts), params, **more), strict=True))


@torch.inference_mode()
def worst(logits: Logits, answers: Sequence[tuple[list[int], Any]]) -> float:
    """Return the largest difference of any position that was reported."""
    found = 0.0
    for prompt, output in answers:
        own = output.outputs[0]
        chosen = list(own.token_ids)
        assert len(chosen) == NUM_TOKENS == len(own.logprobs), output
        rows = logits(torch.tensor(prompt + chosen), len(prompt) + NUM_TOKENS).log_softmax(-1)
        reported = [*(output.prompt_logprobs or [None] * len(prompt))[1:], *own.logprobs]
        for row, entries in zip(rows, reported, strict=False):
            for at, one in (entries or {}).items():
                found = max(found, abs(one.logprob - float(row[at])))
        for row, token in zip(rows[len(prompt) - 1 :], chosen, strict=False):
            found = max(found, float(row.max() - row[token]))
    return found


def assert_agrees(logits: Logits, answers: Sequence[tuple[list[int], Any]]) -> None:
    """Fail unless the answers are transformers'."""
    assert worst(logits, answers) <= EXACT
