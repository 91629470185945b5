"""Drafts change no token: made by the host or by the device, right or wrong, ahead or not."""

from __future__ import annotations

import random

import pytest
from depth import at_depth
from scripted_drafts import DRAFTS, DeviceDrafter, HostDrafter

from kiln.engine.config import EngineConfig, KVConfig, ModelConfig, SchedulerConfig
from kiln.engine.core import EngineCore
from kiln.engine.requests.drafts import Draft
from kiln.engine.requests.request import NewRequest
from kiln.engine.requests.sampling_params import SamplingParams

NUM_SCHEDULES = at_depth(40, 1000)


def make_core(runner, **scheduler):
    config = EngineConfig(
        ModelConfig("fake", seed=0),
        KVConfig(block_size=runner.block_size),
        SchedulerConfig(**scheduler),
    )
    return EngineCore(config, runner=runner, eos=frozenset({7}))


def random_requests(chance):
    """Requests that arrive at some step, and may be aborted at another."""
    made = []
    for index in range(chance.randint(1, 8)):
        params = SamplingParams(
            temperature=chance.choice([0, 0, 1]),
            max_tokens=chance.randint(1, 24),
            min_tokens=chance.choice([0, 0, 1]),
            ignore_eos=chance.random() < 0.5,
            stop_token_ids=[chance.randrange(50)] if chance.random() < 0.3 else None,
            frequency_penalty=chance.choice([0, 0, 0.5]),
            logprobs=chance.choice([None, None, 2]),
            seed=index,
        )
        prompt = [chance.randrange(50) for _ in range(chance.randint(1, 30))]
        abort = chance.randint(1, 30) if chance.random() < 0.15 else None
        made.append((chance.randint(0, 15), abort, NewRequest(f"r{index}", prompt, params)))
    return made


def run(core, requests, limit=3000):
    """Run to the end; return each request's tokens, log-probabilities and reason."""
    found = {}
    for step in range(limit):
        for arrival, abort, new in requests:
            if arrival == step:
                core.add(new)
            if abort == step - arrival:
                core.abort(new.request_id)
        for output in core.step():
            tokens, logprobs, _ = found.get(output.request_id, ([], [], None))
            tokens = [*tokens, *output.token_ids]
            logprobs = [*logprobs, *(one.token_id for one in output.logprobs or ())]
            found[output.request_id] = (tokens, logprobs, output.finish_reason)
        if not core.has_work and step > 16:
            assert core.stats().kv_blocks_used == 0
            return found
    raise AssertionError("the engine did not finish")


@pytest.mark.parametrize("maker", [HostDrafter, DeviceDrafter])
def test_tokens_do_not_depend_on_drafts(fake_runner, maker):
    for seed in range(NUM_SCHEDULES):
        chance = random.Random(seed)
        requests = random_requests(chance)
        pool = {"num_blocks": chance.choice([14, 20, 64]), "max_model_len": 54}
        flags = {
            "max_num_seqs": chance.choice([2, 5, 64]),
            "max_num_batched_tokens": chance.choice([6, 17, 2048]),
        }
        wanted = run(make_core(fake_runner(**pool), **flags), requests)
        whole = {
            new.request_id: [*new.prompt_token_ids, *wanted.get(new.request_id, ([],))[0]]
            for _, _, new in requests
        }
        runner = fake_runner(**pool)
        overlap = chance.random() < 0.7
        core = make_core(runner, overlap=overlap, **flags)
        core.scheduler.drafter = drafter = maker(whole, seed, chance.choice([0, 0.6, 1]))
        if maker is DeviceDrafter:
            runner.propose = drafter
        found = run(core, requests)
        for _, abort, new in requests:
            own, other = found.get(new.request_id), wanted.get(new.request_id)
            if abort is None:
                assert own == other, (seed, new.request_id)


def test_right_drafts_take_few_steps_and_wrong_ones_no_more_than_none(fake_runner):
    request = NewRequest("a", [1, 2, 3], SamplingParams(max_tokens=40, ignore_eos=True))
    steps = {}
    for right in (None, 0, 1):
        runner = fake_runner()
        core = make_core(runner)
        if right is None:
            wanted = run(core, [(0, None, request)])
        else:
            answer = {"a": [1, 2, 3, *wanted["a"][0]]}
            core.scheduler.drafter = runner.propose = DeviceDrafter(answer, 0, right)
            core.scheduler.drafter.propose = lambda request, most: Draft(min(most, DRAFTS))
            assert run(core, [(0, None, request)]) == wanted
        steps[right] = core.stats().steps
        assert core.stats().steps_not_ahead <= 1
    assert steps[1] <= steps[None] / 3
    assert steps[0] <= steps[None] + 2
