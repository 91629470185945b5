"""Masks that are made late: from the tokens of the step before, while the forward pass runs."""

from __future__ import annotations

import random

import pytest
from depth import at_depth
from late_sources import LateSource

from kiln.engine.config import EngineConfig, KVConfig, ModelConfig, SchedulerConfig
from kiln.engine.core import EngineCore
from kiln.engine.requests.drafts import Draft
from kiln.engine.requests.request import NewRequest
from kiln.engine.requests.sampling_params import SamplingParams

VOCABULARY = 50
NUM_SCHEDULES = at_depth(40, 1000)


def allowed_after(tokens):
    """The tokens that may follow: three that depend on all before."""
    first = (7 * sum(tokens) + 3 * len(tokens)) % VOCABULARY
    return {(first + 5 * index) % VOCABULARY for index in range(3)}


def as_bits(allowed):
    return sum(1 << token for token in allowed).to_bytes(8, "little")


def Slow(**settings):
    return LateSource(lambda tokens: as_bits(allowed_after(tokens)), **settings)


def make_core(runner, source, **scheduler):
    config = EngineConfig(
        ModelConfig("fake", seed=0),
        KVConfig(block_size=runner.block_size),
        SchedulerConfig(**scheduler),
    )
    return EngineCore(config, masks=source, runner=runner, eos=frozenset())


def answers(core, requests, arrivals=None):
    """Run to the end; return each request's tokens, and its error or why it ended."""
    found, arrivals = {}, arrivals or [0] * len(requests)
    for step in range(3000):
        for arrival, new in zip(arrivals, requests, strict=True):
            if arrival == step:
                core.add(new)
        for output in core.step():
            tokens, _ = found.get(output.request_id, ([], None))
            ended = output.message or output.finish_reason
            found[output.request_id] = ([*tokens, *output.token_ids], ended)
        if not core.has_work and step >= max(arrivals):
            return found
    raise AssertionError("the engine did not finish")


def requests_of(chance, count):
    made = []
    for index in range(count):
        name = chance.choice(["late", "plain"]) + str(index)
        params = SamplingParams(
            temperature=chance.choice([0, 1]),
            max_tokens=chance.randint(1, 15),
            seed=index,
            repetition_penalty=chance.choice([1.0, 1.0, 1.3]),
        )
        prompt = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 25))]
        made.append(NewRequest(name, prompt, params))
    return made


def test_each_token_is_one_that_the_mask_of_all_before_allows(fake_runner):
    for seed in range(NUM_SCHEDULES):
        chance = random.Random(seed)
        requests = requests_of(chance, chance.randint(1, 7))
        pool = {"num_blocks": chance.choice([12, 16, 64]), "max_model_len": 44}
        flags = {"max_num_batched_tokens": chance.choice([5, 17, 2048])}
        arrivals = [chance.randint(0, 9) for _ in requests]
        found = {
            overlap: answers(
                make_core(fake_runner(**pool), Slow(), overlap=overlap, **flags), requests, arrivals
            )
            for overlap in (True, False)
        }
        assert found[True] == found[False], seed
        alone = answers(make_core(fake_runner(**pool), None, **flags), requests, arrivals)
        source = Slow(seed=seed)
        core = make_core(fake_runner(**pool), source, **flags)
        assert answers(core, requests, arrivals) == found[True], "masks that are not ready"
        assert core.stats().structured_outputs_missed == source.missed
        assert not source.live
        for new in requests:
            tokens, reason = found[True][new.request_id]
            assert reason == "length"
            if new.request_id.startswith("plain"):
                assert tokens == alone[new.request_id][0], "masks of others change nothing"
                continue
            known = list(new.prompt_token_ids)
            for token in tokens:
                assert token in allowed_after(known)
                known.append(token)


def test_a_late_step_is_launched_before_the_one_ahead_of_it_is_collected(fake_runner):
    events = []

    class Watched(fake_runner):
        def launch(self, batch):
            events.append("launch")
            return super().launch(batch)

        def bind(self, launched, masks):
            events.append("bind")
            return super().bind(launched, masks)

        def collect(self, launched):
            events.append("collect")
            return super().collect(launched)

    core = make_core(Watched(), Slow(seconds=0.001))
    answers(core, [NewRequest("late", [1, 2], SamplingParams(max_tokens=5))])
    assert events[:8] == ["launch", "bind", *(["launch", "collect", "bind"] * 2)]
    assert core.stats().steps_not_ahead == 1


def test_a_source_that_raises_ends_its_request_alone(fake_runner):
    params = SamplingParams(max_tokens=6)
    requests = [NewRequest(name, [1, 2], params) for name in ("late a", "late b", "plain")]
    whole = answers(make_core(fake_runner(), Slow()), requests)
    found = answers(make_core(fake_runner(), Slow(fail=("late a", 2))), requests)
    assert found["late a"][0] == whole["late a"][0][:2]
    assert "ValueError: no such rule" in found["late a"][1]
    assert {name: found[name] for name in ("late b", "plain")} == {
        name: whole[name] for name in ("late b", "plain")
    }


@pytest.mark.parametrize("raises_late", [False, True])
def test_a_step_that_fails_gives_the_others_tokens_under_their_masks(fake_runner, raises_late):
    params = SamplingParams(max_tokens=6)
    requests = [NewRequest(name, [1, 2], params) for name in ("late a", "late b", "plain", "bad")]
    whole = answers(make_core(fake_runner(), Slow()), requests)
    runner = fake_runner()
    runner.raise_late, runner.raise_for = raises_late, {"bad": ValueError("broken")}
    found = answers(make_core(runner, Slow()), requests)
    assert "broken" in found.pop("bad")[1]
    assert found == {name: whole[name] for name in found}


@pytest.mark.parametrize("overlap", [True, False])
def test_forced_tokens_are_verified_under_their_masks(fake_runner, overlap):
    for seed in range(NUM_SCHEDULES):
        chance = random.Random(seed)
        requests = requests_of(chance, chance.randint(1, 7))
        pool = {"num_blocks": chance.choice([12, 16, 64]), "max_model_len": 44}
        arrivals = [chance.randint(0, 9) for _ in requests]
        wanted = answers(make_core(fake_runner(**pool), Slow()), requests, arrivals)
        whole = {
            new.request_id: [*new.prompt_token_ids, *wanted[new.request_id][0]] for new in requests
        }
        source = Slow(seed=seed, answers=whole)
        core = make_core(fake_runner(**pool), source, overlap=overlap)
        core.scheduler.drafter = Forced()
        assert answers(core, requests, arrivals) == wanted, seed


@pytest.mark.parametrize(("overlap", "most"), [(True, 6), (False, 5)])
def test_forced_tokens_save_steps(fake_runner, overlap, most):
    params = SamplingParams(max_tokens=13, seed=3)
    requests = [NewRequest("late a", [4, 5, 6], params)]
    wanted = answers(make_core(fake_runner(), Slow()), requests)
    source = Slow(answers={"late a": [4, 5, 6, *wanted["late a"][0]]}, wrong=0)
    source.guesses.randint = lambda least, most: most
    core = make_core(fake_runner(), source, overlap=overlap)
    core.scheduler.drafter = Forced()
    assert answers(core, requests) == wanted
    assert core.stats().steps <= most


class Forced:
    """A drafter that proposes nothing itself."""

    wanted, num_tokens = 0, 3

    def begin(self, num_rows, *, with_prompts):
        pass

    def observe(self, batch, sampled):
        pass

    def propose(self, request, most):
        return Draft(0)
