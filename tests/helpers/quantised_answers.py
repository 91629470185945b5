"""Answers of an engine over a quantised checkpoint, compared with a forward pass in float64.

Each position of an answer is compared on the tokens that the engine itself chose before it. The
difference of a position is the largest of its log-probabilities' that were reported, and half of
what its token is behind the best one.

    weights alone     every difference is at most EXACT
    activations too   a quarter of the differences are at most EXACT, all at most FLIPPED

Where activations are rounded, an input that is nearly halfway between two codes may get the other
one in float32 than in float64. That code changes its products by up to 1/16, and so the next
layers' codes, and later tokens attend to this one. It happens behind one token of a hundred, so
that answers to several prompts are compared together. FLIPPED is more than inputs do that are noisy
by 3e-5, some hundred times the error of float32; ``test_quantised_models`` shows that, and that no
position is EXACT with a wrong scale. Where two experts are nearly equally likely, such a code may
choose another one: positions whose logits of the router differ by less than SURE may be off by
more. The last layer alone has experts, so that no other position sees them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from emulated_models import Emulated

from kiln import LLM, SamplingParams

EXACT = 1e-4
FLIPPED = 1.0
SURE = 0.3
SHARE = 0.25  # of the positions
LENGTHS = (1, 3, 6, 11, 18, 33)
NUM_TOKENS = 8
SIZES = {"max_model_len": max(LENGTHS) + NUM_TOKENS, "num_kv_blocks": 64}


def draw_prompts(lengths: Sequence[int] = LENGTHS, seed: int = 1) -> list[list[int]]:
    """Return a prompt of each length."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 300, (length,), generator=draw).tolist() for length in lengths]


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


def tokens(answers: Sequence[tuple[list[int], Any]]) -> list[list[int]]:
    """Return the tokens of each answer."""
    return [list(output.outputs[0].token_ids) for _, output in answers]


def differences(
    models: Emulated | Sequence[Emulated], answers: Sequence[tuple[list[int], Any]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the difference of each position that was reported, and if its experts are sure.

    ``models``: one for all answers, or the one of each.
    """
    of_each = [models] * len(answers) if isinstance(models, Emulated) else models
    found = [
        one
        for model, answer in zip(of_each, answers, strict=True)
        for one in _of_answer(model, *answer)
    ]
    values, gaps = torch.tensor(found, dtype=torch.float64).unbind(1)
    return values, gaps > SURE


def _of_answer(model: Emulated, prompt: list[int], output: Any) -> Iterator[tuple[float, float]]:
    own = output.outputs[0]
    chosen = list(own.token_ids)
    assert len(chosen) == NUM_TOKENS == len(own.logprobs), output
    logits, gaps = model.run(prompt + chosen)
    reported = [*(output.prompt_logprobs or [None] * len(prompt))[1:], *own.logprobs]
    behind = [*[None] * (len(prompt) - 1), *chosen]
    for row, gap, entries, token in zip(
        logits.log_softmax(-1), gaps, reported, behind, strict=False
    ):
        if entries is None:
            continue
        apart = max(abs(one.logprob - float(row[at])) for at, one in entries.items())
        worse = 0.0 if token is None else float(row.max() - row[token]) / 2
        yield max(apart, worse), float(gap)


def assert_agrees(
    models: Emulated | Sequence[Emulated], answers: Sequence[tuple[list[int], Any]]
) -> None:
    """Fail if the answers are not what the checkpoint means; ``models`` as for differences."""
    found, sure = differences(models, answers)
    one = models if isinstance(models, Emulated) else models[0]
    if one.made.packer.rounded is None:
        assert float(found.max()) <= EXACT
    else:
        assert float(found.quantile(SHARE)) <= EXACT
        assert float(found[sure].max()) <= FLIPPED
