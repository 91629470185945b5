"""Whole models with quantised weights: log-probabilities and tokens of what the checkpoint means.

Each packer of tests/helpers/packers writes a dense model and a model with experts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from depth import at_depth
from emulated_models import Emulated, changed
from packers.packer import Packed, all_packers
from quantised_answers import (
    EXACT,
    FLIPPED,
    NUM_TOKENS,
    SHARE,
    SURE,
    ask,
    assert_agrees,
    differences,
    draw_prompts,
    serve,
    tokens,
)
from quantised_folders import FAMILIES, cases

PACKERS = all_packers()
WEIGHTS_ONLY = sorted(name for name, one in PACKERS.items() if one.rounded is None)
ROUNDED = sorted(name for name, one in PACKERS.items() if one.rounded is not None)
# One of each kind of rounding.
FEW = ["fp8-blocks", "fp8-static", "ct-int-quantized-int-channel-token"]


@pytest.fixture(scope="module")
def twin_of(quantised):
    """Return a function from a packer and a family to transformers' model of the twin."""

    @cache
    def load(packer, family):
        import transformers

        folder = quantised(packer, family).twin
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    return load


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_the_emulation_without_rounding_is_transformers(quantised, twin_of, family):
    name = (WEIGHTS_ONLY + ROUNDED)[0]
    twin, model = twin_of(name, family), Emulated(quantised(name, family), rounds=False)
    for prompt in draw_prompts():
        wanted = twin(torch.tensor([prompt])).logits[0].log_softmax(-1)
        assert float((model.logprobs(prompt) - wanted).abs().max()) <= EXACT


@pytest.mark.parametrize(("name", "family"), cases(WEIGHTS_ONLY))
@torch.inference_mode()
def test_quantised_weights_answer_as_transformers_with_their_twin(quantised, twin_of, name, family):
    made, twin = quantised(name, family), twin_of(name, family)
    answers = ask(serve(made.folder), draw_prompts(), whole=True)
    assert_agrees(Emulated(made), answers)
    for prompt, output in answers:
        chosen = list(output.outputs[0].token_ids)
        logits = twin(torch.tensor([prompt + chosen])).logits[0]
        wanted = logits[len(prompt) - 1 : -1]
        assert wanted.argmax(-1).tolist() == chosen
        for place, row in enumerate(logits.log_softmax(-1)[: len(prompt) - 1]):
            reported = output.prompt_logprobs[place + 1]
            found = torch.tensor([one.logprob for one in reported.values()])
            assert float((found - row[list(reported)]).abs().max()) <= EXACT
    assert len({tuple(one) for one in tokens(answers)}) == len(answers)


@pytest.mark.parametrize(("name", "family"), cases(ROUNDED))
def test_rounded_activations_answer_as_the_rule_of_the_checkpoint(quantised, name, family):
    made = quantised(name, family)
    answers = ask(serve(made.folder), draw_prompts(), whole=True)
    assert_agrees(Emulated(made), answers)
    assert len({tuple(one) for one in tokens(answers)}) == len(answers)


def largest(model: Emulated, other: Emulated, prompt: list[int]) -> torch.Tensor:
    """Return how far the log-probabilities of positions are apart, among the likely tokens."""
    logits, gaps = model.run(prompt)
    wanted = logits.log_softmax(-1)
    likely = wanted.topk(20).indices
    return (wanted - other.logprobs(prompt)).gather(1, likely).abs().amax(1)[gaps > SURE]


def another_scale_for_v(name: str, module: Packed) -> Packed:
    """Return v_proj with twice its weights."""
    return replace(module, weight=2 * module.weight) if name.endswith("v_proj") else module


def a_wrong_block_of_up(name: str, module: Packed) -> Packed:
    """Return up_proj of which some outputs have the scale of others, 3 % larger."""
    if not name.endswith("up_proj"):
        return module
    weight = module.weight.clone()
    weight[64:128] *= 1.03
    return replace(module, weight=weight)


def the_scales_of_the_largest_part(name: str, module: Packed) -> Packed:
    """Return k_proj and v_proj in codes of q_proj's scale, as fused layers of others have them."""
    if not name.endswith(("k_proj", "v_proj")):
        return module
    scale = float(module.weight.abs().max()) / 448 * 7
    return replace(
        module, weight=(module.weight / scale).float().to(torch.float8_e4m3fn).double() * scale
    )


@pytest.mark.parametrize(("name", "family"), cases(at_depth(FEW, ROUNDED)))
def test_the_bounds_hold_for_noise_and_catch_faults(quantised, name, family):
    model = Emulated(quantised(name, family))
    prompts = draw_prompts((6, 18, 33))

    def apart(other: Emulated) -> torch.Tensor:
        return torch.cat([largest(model, other, prompt) for prompt in prompts])

    noisy = torch.cat([apart(replace(model, noise=noise)) for noise in (3e-5, 6e-5)])
    assert 100 * EXACT < float(noisy.max()) < FLIPPED  # the noise does change codes
    faults = [
        replace(model, rounds=False),
        changed(model, another_scale_for_v),
        changed(model, a_wrong_block_of_up),
        changed(model, the_scales_of_the_largest_part),
    ]
    for fault in faults:
        assert float(apart(fault).quantile(SHARE)) > 10 * EXACT


def test_an_answer_with_a_wrong_token_is_caught(quantised):
    """The checks themselves: the answers of another checkpoint differ in every way."""
    name = ROUNDED[0]
    answers = ask(serve(quantised(name, "llama").folder), draw_prompts())
    others = Emulated(quantised(name, "llama", seed=1))
    found, _ = differences(others, answers)
    assert len(found) == NUM_TOKENS * len(answers)
    assert float(found.quantile(SHARE)) > 10 * EXACT
    assert float(found.max()) > FLIPPED
    with pytest.raises(AssertionError):
        assert_agrees(others, answers)
