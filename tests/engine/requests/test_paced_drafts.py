"""Drafts are asked for where they pay: by what was accepted, and by the number of rows."""

from __future__ import annotations

import itertools

import pytest

from kiln.engine.requests.batch import Batch, SampledTokens, ScheduledRequest
from kiln.engine.requests.drafts import NO_DRAFT, Draft
from kiln.engine.requests.paced_drafts import FEW, PROMPTS, PacedDrafter
from kiln.engine.requests.sampling_params import SamplingParams

DRAFTS = 3


def step(drafter, rows, accepted, *, with_prompts=False, found=DRAFTS):
    """Run a step whose rows accept so many of their drafts; return whether it had any."""
    drafter.begin(rows, with_prompts=with_prompts)
    draft = drafter.propose(None, 9)
    assert draft in (NO_DRAFT, Draft(DRAFTS))
    if draft.num_tokens:
        row = ScheduledRequest("r", 0, 1 + DRAFTS, 5, [], 0, [], 1 + DRAFTS, 1, SamplingParams(), 0)
        batch = Batch(tuple(row._replace(request_id=f"r{i}") for i in range(rows)))
        tokens = [1] * (1 + accepted)
        sampled = {f"r{i}": SampledTokens(f"r{i}", tokens, num_drafts=found) for i in range(rows)}
        drafter.observe(batch, sampled)
    return bool(draft.num_tokens)


def test_accepted_drafts_go_on():
    drafter = PacedDrafter(DRAFTS, 8)
    had = [step(drafter, 4, 3) for _ in range(50)]
    assert had == [False] + [True] * 49  # the step before makes them
    assert drafter.num_drafts == drafter.num_accepted == 49 * 4 * DRAFTS


def test_rejected_drafts_are_tried_more_and_more_seldom():
    drafter = PacedDrafter(DRAFTS, 8)
    had = [step(drafter, 4, 0) for _ in range(2000)]
    assert sum(had[:20]) >= 3
    tries = [at for at, one in enumerate(had) if one][-4:]
    pauses = [after - before for before, after in itertools.pairwise(tries)]
    assert pauses == sorted(pauses)
    assert pauses[-1] >= 256
    assert drafter.steps_without[FEW] == 2000 - sum(had)
    assert (drafter.num_drafts, drafter.num_accepted) == (sum(had) * 4 * DRAFTS, 0)


def test_a_text_that_begins_to_repeat_itself_is_noticed():
    drafter = PacedDrafter(DRAFTS, 128)
    for _ in range(100):
        step(drafter, 2, 0)
    had = [step(drafter, 2, 3) for _ in range(600)]
    assert sum(had) > 300
    assert all(had[-50:])


@pytest.mark.parametrize(("rows", "pays"), [(1, True), (16, True), (64, False), (256, False)])
def test_the_more_rows_the_more_must_be_accepted(rows, pays):
    drafter = PacedDrafter(DRAFTS, 128)
    had = [step(drafter, rows, 1 if at % 2 else 0) for at in range(400)]
    assert (sum(had) > 300) == pays


def test_a_step_with_prompts_has_no_drafts():
    drafter = PacedDrafter(DRAFTS, 128)
    had = [step(drafter, 2, 3, with_prompts=at % 5 == 0) for at in range(50)]
    assert [at for at, one in enumerate(had) if not one] == list(range(0, 50, 5))
    assert drafter.steps_without == {PROMPTS: 10}


def test_rows_without_a_match_are_no_drafts_in_the_counts():
    drafter = PacedDrafter(DRAFTS, 128)
    step(drafter, 2, 0)
    step(drafter, 2, 1, found=0)  # the filler was sampled, by luck
    assert (drafter.num_drafts, drafter.num_accepted) == (0, 0)
