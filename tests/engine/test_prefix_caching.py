"""Prefix caching changes no token, finds what can be found, and loses no block."""

from __future__ import annotations

import random

import pytest
from arrivals import run_to_end
from depth import at_depth

from kiln.engine.config import EngineConfig, KVConfig, ModelConfig, SchedulerConfig
from kiln.engine.core import EngineCore
from kiln.engine.requests.request import NewRequest
from kiln.engine.requests.sampling_params import SamplingParams

NUM_SCHEDULES = at_depth(60, 2000)
GREEDY = {"temperature": 0, "ignore_eos": True}


def make_core(runner, caching=True, **scheduler):
    config = EngineConfig(
        ModelConfig("fake", seed=0),
        KVConfig(block_size=runner.block_size, enable_prefix_caching=caching),
        SchedulerConfig(**scheduler),
    )
    return EngineCore(config, runner=runner, eos=frozenset({7}))


def request(name, prompt, salt=None, **params):
    return NewRequest(name, prompt, SamplingParams(**params), cache_salt=salt)


def run(core, arrivals, resets=()):
    return run_to_end(core, arrivals, check, resets)


def check(core):
    """Every block is free, held or idle, and each request's blocks are held."""
    scheduler = core.scheduler
    pool = scheduler.kv.pool
    pool.check_integrity()
    held = {block for one in scheduler.requests.values() for block in one.block_ids}
    assert len(held) == pool.num_held == core.stats().kv_blocks_used
    computing = [one.prefix.next_key for one in scheduler.running if one.prefix.next_key]
    assert sorted(map(repr, computing)) == sorted(map(repr, scheduler.kv._computing))


def random_arrivals(chance):
    """Requests, many with equal beginnings, that arrive at some step; some are aborted."""
    stems = [[chance.randrange(50) for _ in range(40)] for _ in range(2)]
    made = []
    for index in range(chance.randint(1, 12)):
        stem = chance.choice(stems)[: chance.choice([0, 3, 4, 5, 8, 16, 31, 32, 40])]
        params = SamplingParams(
            temperature=chance.choice([0, 0, 1]),
            max_tokens=chance.randint(1, 14),
            frequency_penalty=chance.choice([0, 0, 0.5]),
            prompt_logprobs=chance.choice([None, None, None, 0]),
            seed=index,
        )
        prompt = stem + [chance.randrange(50) for _ in range(chance.randint(0 if stem else 1, 6))]
        abort = chance.randint(0, 30) if chance.random() < 0.2 else None
        salt = chance.choice([None, None, "a"])
        new = NewRequest(f"r{index}", prompt, params, cache_salt=salt)
        made.append((chance.randint(0, 20), abort, new))
    return made


def test_tokens_do_not_depend_on_caching(fake_runner):
    hits = 0
    for seed in range(NUM_SCHEDULES):
        chance = random.Random(seed)
        arrivals = random_arrivals(chance)
        pool = {"num_blocks": chance.randint(1, 64), "block_size": chance.choice([1, 4])}
        flags = {
            "max_num_seqs": chance.choice([1, 3, 64]),
            "max_num_batched_tokens": chance.choice([4, 17, 2048]),
            "overlap": chance.random() < 0.7,
        }
        pool["long_start"] = chance.choice([0, 0, 30])
        capacity = pool["num_blocks"] * pool["block_size"]
        arrivals = [one for one in arrivals if len(one[2].prompt_token_ids) <= capacity]
        wanted = run(make_core(fake_runner(**pool), caching=False, **flags), arrivals)
        core = make_core(fake_runner(**pool), **flags)
        found = run(core, arrivals, resets=(7,) if chance.random() < 0.2 else ())
        for _, abort, new in arrivals:
            if abort is None:
                own, other = found[new.request_id], wanted[new.request_id]
                assert own == other, (seed, new.request_id)
        hits += core.stats().prefix_cache_hits
        assert core.stats().prefix_cache_hits <= core.stats().prefix_cache_queries
    assert hits > 10 * NUM_SCHEDULES


def one_by_one(core, *requests):
    """Run requests one after the other; return how many tokens of each were cached."""
    cached = []
    for new in requests:
        core.add(new)
        first = None
        while core.has_work:
            for output in core.step():
                first = output if first is None else first
        cached.append(first.num_cached_tokens)
    return cached


def test_a_conversation_finds_its_prompts_and_its_answers(fake_runner):
    core = make_core(fake_runner())
    prompt = [*range(10)]
    core.add(request("a", prompt, max_tokens=7, **GREEDY))
    answer = []
    while core.has_work:
        answer += [token for output in core.step() for token in output.token_ids]
    # 16 tokens are computed: the last one of the answer is not.
    again = request("b", [*prompt, *answer, 3, 3], max_tokens=2, **GREEDY)
    assert one_by_one(core, again) == [16]
    stats = core.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (29, 16)
    assert (stats.kv_blocks_used, stats.kv_blocks_cached) == (0, 5)
    core.reset_prefix_cache()
    assert core.stats().kv_blocks_cached == 0
    assert one_by_one(core, request("c", prompt, max_tokens=1)) == [0]


def test_salts_share_nothing(fake_runner):
    core, prompt = make_core(fake_runner()), [*range(9)]
    each = [request(f"r{i}", prompt, salt, max_tokens=1) for i, salt in enumerate("abab")]
    assert one_by_one(core, *each, request("n", prompt, max_tokens=1)) == [0, 0, 8, 8, 0]


def test_long_requests_of_longrope_share_nothing_with_short_ones(fake_runner):
    runner, prompt = fake_runner(long_start=20), [*range(9)]
    lengths = {"a": 11, "b": 12, "c": 11, "d": None, "e": 12}  # 20 tokens in total are short
    each = [request(name, prompt, max_tokens=most) for name, most in lengths.items()]
    assert one_by_one(make_core(runner), *each) == [0, 0, 8, 8, 8]
    starts = {row.request_id: row.rotary_start for one in runner.batches for row in one.requests}
    assert starts == {"a": 0, "b": 20, "c": 0, "d": 20, "e": 20}


def test_without_caching_nothing_is_looked_up(fake_runner):
    core = make_core(fake_runner(), caching=False)
    each = [request(name, [*range(9)], max_tokens=1) for name in "ab"]
    assert one_by_one(core, *each) == [0, 0]
    stats = core.stats()
    assert (stats.prefix_cache_queries, stats.kv_blocks_cached) == (0, 0)


@pytest.mark.parametrize("overlap", [True, False])
def test_equal_prompts_are_computed_once_even_if_they_come_together(fake_runner, overlap):
    runner = fake_runner()
    core = make_core(runner, max_num_batched_tokens=16, overlap=overlap)
    for index in range(4):
        core.add(request(f"r{index}", [*range(40)], seed=index, max_tokens=3))
    core.add(request("other", [9] * 5, max_tokens=3))
    cached = {}
    while core.has_work:
        for output in core.step():
            cached.setdefault(output.request_id, output.num_cached_tokens)
    assert cached == {"r0": 0, "r1": 36, "r2": 36, "r3": 36, "other": 0}
    prompts = sum(
        row.num_tokens
        for batch in runner.batches
        for row in batch.requests
        if not row.num_output_tokens
    )
    assert prompts == 40 + 3 * 4 + 5


def test_a_preempted_request_finds_its_own_blocks(fake_runner):
    runner = fake_runner(num_blocks=12)
    core = make_core(runner)
    found = run(
        core,
        [(0, None, request(name, [ord(name) - 90] * 9, max_tokens=20, **GREEDY)) for name in "ab"],
    )
    assert all(len(tokens) == 20 for tokens, *_ in found.values())
    assert core.stats().preemptions
    again = [
        row.num_computed_tokens
        for batch in runner.batches
        for row in batch.requests
        if row.num_blocks == 0
    ]
    assert again[:2] == [0, 0]
    assert min(again[2:]) > 0


def test_a_step_that_raises_registers_nothing(fake_runner):
    runner = fake_runner()
    core = make_core(runner)
    runner.raise_for["bad"] = ValueError("no")
    core.add(request("bad", [*range(20)], max_tokens=3))
    core.add(request("good", [5, *range(20)], max_tokens=3))
    while core.has_work:
        core.step()
    each = [request(name, [*range(20)], max_tokens=1) for name in "xy"]
    assert one_by_one(core, *each) == [0, 16]
    assert one_by_one(core, request("z", [5, *range(20)], max_tokens=1)) == [20]
