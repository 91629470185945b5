"""The host tier changes no token, loses no block, and brings back what the device has evicted."""

from __future__ import annotations

import random

import pytest
from arrivals import run_to_end
from depth import at_depth
from fake_host import FakeHost
from scripted_drafts import DeviceDrafter

from kiln.engine.config import EngineConfig, KVConfig, ModelConfig, SchedulerConfig
from kiln.engine.core import EngineCore
from kiln.engine.kv.host_tier import MOST_LOADS
from kiln.engine.requests.request import NewRequest
from kiln.engine.requests.sampling_params import SamplingParams

NUM_SCHEDULES = at_depth(60, 4000)


def make_core(runner, caching=True, **scheduler):
    config = EngineConfig(
        ModelConfig("fake", seed=0),
        KVConfig(block_size=runner.block_size, enable_prefix_caching=caching),
        SchedulerConfig(**scheduler),
    )
    return EngineCore(config, runner=runner, eos=frozenset({7}))


def with_host(runner, num_slots=200, seed=0, **flags):
    runner.host_blocks = FakeHost(runner, num_slots, seed, **flags)
    return runner


def request(name, prompt, **params):
    params = {"temperature": 0, "max_tokens": 1, "ignore_eos": True, **params}
    return NewRequest(name, list(prompt), SamplingParams(**params))


def check(core):
    """Every block and every slot is in one place; held are those of requests and of loads."""
    kv = core.scheduler.kv
    tier, pool = kv.tier, kv.pool
    pool.check_integrity()
    held = {block for one in core.scheduler.requests.values() for block in one.block_ids}
    held |= {block for copy in tier._copies for block in copy.held}
    held |= {block for blocks in tier._held.values() for block in blocks}
    assert len(held) == pool.num_held
    assert all(one in core.scheduler.requests.values() for one in tier._held)
    busy = [one.slot for copy in tier._copies for one in copy.moved]
    assert sorted([*tier._free, *tier._used, *busy]) == list(range(tier.num_slots))
    places = {place for place, uid in enumerate(pool.index._uids) if uid}
    assert {place - pool.num_blocks for place in places if place >= pool.num_blocks} >= {
        *tier._used
    }
    assert {*pool.index._places.values()} <= places
    for place in places:
        twin = pool.index.twin(place)
        assert twin < 0 or (pool.index.twin(twin), pool.index.uid(twin)) == (
            place, pool.index.uid(place),
        )  # fmt: skip


def run(core, arrivals, resets=()):
    has_tier = core.scheduler.kv.tier is not None
    return run_to_end(core, arrivals, check if has_tier else lambda core: None, resets)


def conversations(chance):
    """Requests of a few conversations in turn, so that a small pool evicts what returns later."""
    stems = [[chance.randrange(50) for _ in range(48)] for _ in range(chance.randint(1, 6))]
    made, step = [], 0
    for index in range(chance.randint(2, 24)):
        step += chance.choice([0, 0, 1, 4, 12])
        params = SamplingParams(
            temperature=chance.choice([0, 0, 1]),
            max_tokens=chance.randint(1, 9),
            frequency_penalty=chance.choice([0, 0, 0.5]),
            seed=index,
        )
        prompt = chance.choice(stems)[: chance.choice([4, 20, 32, 48])]
        prompt = prompt + [chance.randrange(50) for _ in range(chance.randint(0, 5))]
        abort = chance.randint(0, 8) if chance.random() < 0.15 else None
        made.append((step, abort, NewRequest(f"r{index}", prompt, params)))
    return made


def test_tokens_do_not_depend_on_the_host_tier(fake_runner):
    loaded = failed = 0
    for seed in range(NUM_SCHEDULES):
        chance = random.Random(seed)
        arrivals = conversations(chance)
        pool = {
            "num_blocks": chance.choice([4, 8, 14, 20, 40]),
            "block_size": chance.choice([1, 4]),
            "long_start": chance.choice([0, 30]),
        }
        flags = {
            "max_num_seqs": chance.choice([1, 3, 64]),
            "max_num_batched_tokens": chance.choice([4, 17, 2048]),
            "overlap": chance.random() < 0.7,
        }
        capacity = pool["num_blocks"] * pool["block_size"]
        arrivals = [one for one in arrivals if len(one[2].prompt_token_ids) <= capacity]
        if not arrivals:
            continue
        raises = chance.choice([None, None, None, *(new.request_id for *_, new in arrivals)])
        late = chance.random() < 0.5

        def make_runner(raises=raises, late=late, pool=pool):
            runner = fake_runner(**pool)
            runner.raise_late = late
            if raises is not None:
                runner.raise_for[raises] = ValueError("no")
            return runner

        wanted = run(make_core(make_runner(), caching=False, **flags), arrivals)
        fails = chance.choice([0, 0, 0.2])
        host = {"num_slots": chance.choice([3, 30, 300]), "latest": chance.choice([0, 3, 20])}
        runner = with_host(make_runner(), seed=seed, fails=fails, **host)
        core = make_core(runner, **flags)
        if chance.random() < 0.3:
            answers = {
                new.request_id: [*new.prompt_token_ids, *wanted.get(new.request_id, ([],))[0]]
                for *_, new in arrivals
            }
            core.scheduler.drafter = runner.propose = DeviceDrafter(answers, seed)
        found = run(core, arrivals, resets=(9,) if chance.random() < 0.2 else ())
        for _, abort, new in arrivals:
            if abort is None:
                assert found[new.request_id] == wanted[new.request_id], (seed, new.request_id)
        loaded += core.stats().kv_offload_loaded_blocks
        failed += runner.host_blocks.num_failed
    assert loaded > NUM_SCHEDULES
    assert failed


def cached(core, *requests):
    """Run requests one after the other; return how many tokens of each were cached."""
    counts = []
    for new in requests:
        core.add(new)
        first = None
        while core.has_work:
            for output in core.step():
                first = output if first is None else first
            check(core)
        counts.append(first.num_cached_tokens)
    return counts


PROMPTS = [[name] * 24 for name in range(4)]  # six blocks each


def turn(core, number, names=range(4), **params):
    return cached(core, *(request(f"{name}-{number}", PROMPTS[name], **params) for name in names))


def test_evicted_blocks_come_back(fake_runner):
    core = make_core(with_host(fake_runner(num_blocks=10)))
    assert turn(core, 1, max_tokens=8) == [0, 0, 0, 0]
    assert turn(core, 2) == [20, 20, 20, 20]
    stats = core.stats()
    assert stats.kv_offload_loaded_blocks >= 15
    assert stats.kv_offload_blocks == stats.kv_offload_stored_blocks >= 24
    assert stats.prefix_cache_hits == 80


def test_a_block_that_is_on_the_host_is_not_stored_again(fake_runner):
    core = make_core(with_host(fake_runner(num_blocks=10)))
    turn(core, 1, max_tokens=8)
    turn(core, 2)
    stored = core.stats().kv_offload_stored_blocks
    for number in range(3, 6):
        turn(core, number)
    assert core.stats().kv_offload_stored_blocks == stored


def test_the_least_recently_used_slots_are_replaced(fake_runner):
    core = make_core(with_host(fake_runner(num_blocks=16), num_slots=23, latest=0))
    turn(core, 1, names=[0, 1], max_tokens=8)  # 7 full blocks each
    assert turn(core, 2, names=[0]) == [20]  # the device has them
    assert core.stats().kv_offload_loaded_blocks == 0
    turn(core, 3, names=[2, 3], max_tokens=8)
    assert turn(core, 4, names=[0]) == [20]
    assert core.stats().kv_offload_loaded_blocks >= 4
    assert turn(core, 5, names=[1]) == [0]


def test_equal_requests_load_their_blocks_once(fake_runner):
    runner = with_host(fake_runner(num_blocks=16), latest=6)
    core = make_core(runner)
    turn(core, 1, max_tokens=8)
    before = core.stats().kv_offload_loaded_blocks
    for index in range(3):
        core.add(request(f"same{index}", PROMPTS[0], max_tokens=2))
    counts = {}
    while core.has_work:
        for output in core.step():
            counts.setdefault(output.request_id, output.num_cached_tokens)
        check(core)
    assert set(counts.values()) == {20}
    assert core.stats().kv_offload_loaded_blocks - before <= 5


def test_a_copy_that_fails_is_forgotten_and_its_blocks_are_computed(fake_runner, caplog):
    runner = with_host(fake_runner(num_blocks=8), latest=0)
    core = make_core(runner)
    turn(core, 1, max_tokens=8)
    runner.host_blocks._fails = 1.0
    assert turn(core, 2, names=[0]) == [0]
    assert "copying 5 KV blocks from host memory failed" in caplog.text
    runner.host_blocks._fails = 0.0
    turn(core, 3, names=[0, 1, 2, 3], max_tokens=8)
    assert turn(core, 4, names=[0]) == [20]


@pytest.mark.parametrize("what", ["abort", "reset", "clear"])
def test_what_ends_a_load_early_loses_no_block(fake_runner, what):
    runner = with_host(fake_runner(num_blocks=14), latest=0)  # there is room beside the load
    core = make_core(runner)
    turn(core, 1, max_tokens=8)
    core.add(request("long", [9] * 3, max_tokens=12))
    core.step()
    runner.host_blocks._chance.randint = lambda low, high: 30
    core.add(request("again", PROMPTS[0]))
    core.step()
    assert core.scheduler.kv.is_loading
    if what == "abort":
        core.abort("again")
    elif what == "reset":
        core.reset_prefix_cache()
    else:
        core.clear()
        assert core.stats().kv_blocks_used == 0
    check(core)
    while core.has_work:
        core.step()
        check(core)
    assert core.stats().kv_blocks_used == 0
    assert not core.scheduler.kv.is_loading


def test_a_request_does_not_load_for_ever(fake_runner):
    runner = with_host(fake_runner(num_blocks=14))
    core = make_core(runner)
    turn(core, 1, max_tokens=8)
    kv = core.scheduler.kv
    core.add(request("again", PROMPTS[0]))
    waiting = core.scheduler.requests["again"]
    for number in range(1, MOST_LOADS + 1):
        assert kv.prefix(waiting) is None
        kv.collect(wait=True)
        assert waiting.prefix.num_loads == number
        kv.give_way()
        for block in kv.pool.allocate(14):  # all idle blocks are evicted
            kv.pool.free([block])
    assert kv.prefix(waiting).blocks == []
    while core.has_work:
        core.step()
    check(core)


def test_if_nothing_else_runs_the_engine_waits_for_a_load(fake_runner):
    runner = with_host(fake_runner(num_blocks=8), latest=0)
    core = make_core(runner)
    turn(core, 1, max_tokens=8)
    runner.host_blocks._latest = 10**9
    runner.host_blocks._chance.seed(0)
    core.add(request("again", PROMPTS[0]))
    outputs = [output for _ in range(4) for output in core.step()]
    assert [output.num_cached_tokens for output in outputs] == [20]


def test_blocks_of_a_load_make_way_for_who_is_ahead_but_not_for_who_waits_for_them(fake_runner):
    core = make_core(with_host(fake_runner(num_blocks=8), latest=0))
    turn(core, 1, max_tokens=8)
    kv = core.scheduler.kv
    for name, prompt in (("again", PROMPTS[0]), ("ahead", [9] * 24)):
        core.add(request(name, prompt))
    again, ahead = core.scheduler.requests.values()
    assert kv.prefix(again) is None
    kv.collect(wait=True)
    assert (kv.pool.num_held, kv.is_loading) == (5, False)
    prefix = kv.prefix(again)
    assert len(prefix.blocks) == 5
    assert kv.fits(again, prefix, spare_blocks=2)
    assert not kv.fits(again, prefix, spare_blocks=3)
    assert kv.pool.num_held == 5
    assert kv.fits(ahead, kv.prefix(ahead), spare_blocks=2)
    assert kv.pool.num_held == 0
    check(core)
