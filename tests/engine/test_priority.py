"""Scheduling by priority: who is admitted and preempted, and that nobody's tokens change."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from depth import at_depth

from kiln.engine import core as core_module
from kiln.engine.config import EngineConfig, KVConfig, ModelConfig, SchedulerConfig
from kiln.engine.core import EngineCore
from kiln.engine.errors import ConfigError, RequestError
from kiln.engine.kv.block_pool import BlockPool
from kiln.engine.kv.manager import KVManager
from kiln.engine.llm import LLM
from kiln.engine.requests.request import NewRequest
from kiln.engine.requests.sampling_params import SamplingParams
from kiln.engine.requests.waiting import PriorityQueue
from kiln.engine.scheduler import Scheduler

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


class Run:
    """A scheduler by priority over a fake runner, and the time, which the test sets."""

    def __init__(self, runner, **config):
        self.runner, self.now = runner, 0.0
        self.scheduler = Scheduler(
            SchedulerConfig(scheduling_policy="priority", **config).for_device("cpu"),
            KVManager(BlockPool(runner.num_blocks), runner.block_size),
            max_model_len=runner.max_model_len,
            seed=0,
        )
        self.scheduler.waiting = PriorityQueue(clock=lambda: self.now)
        self.tokens, self.begun, self.ended = {}, [], []

    def add(self, name, priority=0, length=1, max_tokens=8):
        params = GREEDY.replace(max_tokens=max_tokens)
        self.scheduler.add(NewRequest(name, [len(name)] * length, params, priority=priority))

    def step(self):
        batch = self.scheduler.schedule()
        names = [row.request_id for row in batch.requests]
        assert batch.num_tokens <= self.scheduler.config.max_num_batched_tokens
        assert all(row.num_tokens > 0 for row in batch.requests)
        self.scheduler.kv.pool.check_integrity()
        self.begun += [name for name in names if name not in self.begun]
        for output in self.scheduler.commit(batch, self.runner.run(batch)):
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason:
                self.ended.append(output.request_id)
        return names

    def finish(self):
        while self.scheduler.has_work:
            assert self.step(), "work, but an empty step"
        assert self.scheduler.kv.pool.num_held == 0


def test_the_lowest_priority_is_admitted_first(fake_runner):
    run = Run(fake_runner(), max_num_seqs=1)
    for name, priority in [("a", 1), ("b", -5), ("c", 1), ("d", 0)]:
        run.add(name, priority)
    run.finish()
    assert run.begun == ["b", "d", "a", "c"]


def test_a_request_is_admitted_after_its_wait_though_better_ones_keep_coming(fake_runner):
    run = Run(fake_runner(), max_num_seqs=1)
    run.add("poor", 3)
    for number in range(200):
        run.add(f"good-{number}", max_tokens=1)
        run.step()
        run.now += 1
        if "poor" in run.begun:
            break
    assert run.now == 3 * 30 + 1
    run.finish()
    assert len(run.ended) == number + 2


def test_the_worst_running_request_is_preempted_though_it_was_admitted_first(fake_runner):
    run = Run(fake_runner(num_blocks=6, block_size=4))
    run.add("batch", 1, length=7, max_tokens=12)
    run.step()
    run.now += 1000  # running is not waiting
    run.add("chat", 0, length=7, max_tokens=12)
    while not run.scheduler.num_preemptions:
        names = run.step()
    assert names == ["chat"]
    assert [one.request_id for one in run.scheduler.waiting] == ["batch"]
    run.add("late", 0, max_tokens=20)
    run.finish()
    assert run.begun == ["batch", "chat", "late"]
    assert run.ended[0] == "chat"
    assert len(run.tokens["batch"]) == 12


def test_a_request_that_waited_long_is_not_preempted_first(fake_runner):
    run = Run(fake_runner(num_blocks=6, block_size=4), max_num_seqs=2)
    run.add("poor", 2, length=7, max_tokens=12)
    run.now += 65
    run.add("good", 0, length=7, max_tokens=12)
    while not run.scheduler.num_preemptions:
        names = run.step()
    assert names == ["poor"]


def test_after_an_interrupt_requests_wait_in_the_same_order(fake_runner):
    run = Run(fake_runner(), max_num_seqs=2)
    for name, priority in [("a", 2), ("b", 1), ("c", 3), ("d", 0), ("e", 1)]:
        run.add(name, priority)
    run.step()
    before = [*run.scheduler.running, *run.scheduler.waiting]
    assert [one.request_id for one in before] == ["d", "b", "e", "a", "c"]
    run.scheduler.rebuild()
    assert list(run.scheduler.waiting) == before
    run.finish()
    assert {name: len(tokens) for name, tokens in run.tokens.items()} == dict.fromkeys("abcde", 8)


def test_the_budget_goes_to_the_better_ones_and_every_running_request_gets_a_token(fake_runner):
    run = Run(fake_runner(num_blocks=64, block_size=4), max_num_batched_tokens=16)
    run.add("poor", 5, length=20, max_tokens=9)
    run.step()
    run.add("long", 0, length=100)
    run.add("more", 1, length=100)
    while "more" not in run.ended:
        running = {one.request_id for one in run.scheduler.running}
        assert running <= set(run.step())
        if running == {"poor", "long"} and "more" not in run.begun:
            (first, second) = run.scheduler.running
            assert (first.request_id, second.request_id) == ("long", "poor")
    run.finish()


def test_no_priorities_change_anybodys_tokens_with_or_without_overlap(fake_runner):
    """Requests of all kinds arrive, wait, age, are preempted and aborted."""
    preemptions = 0
    for seed in range(at_depth(25, 3000)):
        plain, aborted, _ = _play(fake_runner, seed, overlap=False)
        ahead, _, count = _play(fake_runner, seed, overlap=True)
        first_come, _, _ = _play(fake_runner, seed, overlap=True, policy="fcfs")
        preemptions += count
        for name in plain.keys() | ahead.keys() | first_come.keys():
            told = [each.get(name, []) for each in (plain, ahead, first_come)]
            if name in aborted:  # at another token, perhaps
                told = [each[: min(map(len, told))] for each in told]
            assert told[0] == told[1] == told[2]
    assert preemptions > 5


def _play(fake_runner, seed, *, overlap, policy="priority"):
    chance = random.Random(seed)
    runner = fake_runner(num_blocks=chance.randint(10, 16))
    limits = SchedulerConfig(
        max_num_seqs=chance.randint(1, 6),
        max_num_batched_tokens=chance.randint(1, 40),
        max_chunk_tokens=chance.choice([None, 1, 5]),
        overlap=overlap,
        scheduling_policy=policy,
    )
    config = EngineConfig(ModelConfig("fake", seed=0), KVConfig(block_size=4), limits)
    core = EngineCore(config, runner=runner, eos=frozenset({3, 4}))
    now = [0.0]
    if policy == "priority":
        core.scheduler.waiting = PriorityQueue(clock=lambda: now[0])
    told, aborted = {}, set()

    def step():
        for output in core.step():
            assert output.request_id not in aborted, "an output after the abort"
            told.setdefault(output.request_id, []).extend(output.token_ids)
        assert len(core.scheduler.running) <= limits.max_num_seqs
        if runner.batches:
            assert runner.batches[-1].num_tokens <= limits.max_num_batched_tokens
            assert min(row.num_tokens for row in runner.batches[-1].requests) > 0

    for number in range(12):
        params = SamplingParams(
            max_tokens=chance.randint(1, 14),
            temperature=chance.choice([0, 1]),
            seed=number,
            ignore_eos=chance.random() < 0.7,
            logprobs=chance.choice([None, 1]),
            frequency_penalty=chance.choice([0, 0, 0.5]),
        )
        prompt, priority = [number] * chance.randint(1, 24), chance.randint(-2, 2)
        level = priority if policy == "priority" else 0
        core.add(NewRequest(f"r{number}", prompt, params, priority=level))
        for _ in range(chance.randint(0, 4)):
            now[0] += chance.choice([0, 1, 25])
            step()
        if chance.random() < 0.15:
            gone = f"r{chance.randint(0, number)}"
            aborted.add(gone)
            core.abort(gone)
    while core.has_work:
        step()
    core.scheduler.kv.pool.check_integrity()
    assert core.scheduler.kv.pool.num_held == 0
    assert len(core.scheduler._free_rows) == limits.max_num_seqs
    return told, aborted, core.stats().preemptions


@pytest.mark.deep
def test_tokens_of_a_model_are_the_same_whatever_the_priorities():
    demo = str(Path(__file__).parents[2] / "engine" / "demo")
    limits = {"block_size": 2, "num_kv_blocks": 52, "max_num_batched_tokens": 64}
    adapters = {path.name: str(path) for path in (Path(demo) / "adapters").iterdir()}
    chance, found = random.Random(3), []
    prompts = [list(range(5 + index, 20 + 2 * index)) for index in range(16)]
    params = GREEDY.replace(max_tokens=14)
    lora = [chance.choice([None, *adapters]) for _ in prompts]
    for policy in ("fcfs", "priority", "priority"):
        own = [chance.randint(-2, 2) if policy == "priority" else 0 for _ in prompts]
        with LLM(
            demo,
            device="cpu",
            max_model_len=96,
            max_num_seqs=8,
            lora_modules=adapters,
            max_loras=1,
            scheduling_policy=policy,
            **limits,
        ) as llm:
            answers = llm.generate(prompts, params, lora=lora, priority=own)
            found.append([answer.outputs[0].token_ids for answer in answers])
            assert llm.core.stats().preemptions
    assert found[0] == found[1] == found[2]


@pytest.fixture
def offline(fake_runner, monkeypatch, tokenizer_folders):
    """Make an LLM over a fake model."""
    made = fake_runner(num_blocks=128, vocab_size=400)
    monkeypatch.setattr(core_module, "load_runner", lambda config, progress: made)
    folder = str(tokenizer_folders["byte-level"])
    return made, lambda **options: LLM(folder, block_size=4, max_num_seqs=1, **options)


def test_llm_serves_prompts_by_their_priorities(offline):
    runner, make = offline
    prompts, priorities = [[5], [6], [7], [8]], [2, 0, 1, 0]
    plain = make().generate(prompts, GREEDY)
    llm = make(scheduling_policy="priority")
    runner.batches.clear()
    outputs = llm.generate(prompts, GREEDY, priority=priorities)
    tokens = [output.outputs[0].token_ids for output in outputs]
    assert tokens == [output.outputs[0].token_ids for output in plain], "in the order of prompts"
    rows = [row.request_id for batch in runner.batches for row in batch.requests]
    assert list(dict.fromkeys(rows)) == ["1-0", "3-0", "2-0", "0-0"]
    chats = [[{"role": "user", "content": text}] for text in ("one", "two")]
    runner.batches.clear()
    llm.chat(chats, GREEDY, priority=[1, -1])
    rows = [row.request_id for batch in runner.batches for row in batch.requests]
    assert list(dict.fromkeys(rows)) == ["5-0", "4-0"]
    assert len(llm.generate(prompts, GREEDY, priority=-3)) == 4


def test_llm_refuses_priorities_that_it_cannot_serve(offline):
    _, make = offline
    llm = make()
    assert len(llm.generate([[1], [2]], GREEDY, priority=[0, 0])) == 2
    for priority, match in (
        ([0, 4], r"prompt 1: priority is 4, .*--scheduling-policy priority"),
        ([0], "1 entries of priority, 2 prompts: give one or 2"),
        ([0, True], "priority must be a 64-bit integer, got True"),
        ([0, 1.0], "priority must be a 64-bit integer, got 1.0"),
        ("ab", "priority must be a 64-bit integer, got 'a'"),
        (1.5, "priority must be a 64-bit integer, got 1.5"),
        (10**5000, "priority must be a 64-bit integer, got an integer of 16610 bits"),
    ):
        with pytest.raises(RequestError, match=match) as caught:
            llm.generate([[1], [2]], GREEDY, priority=priority)
        assert caught.value.param == "priority"
        assert not llm.core.has_work
    with pytest.raises(ConfigError, match="scheduling_policy='lifo': must be one of fcfs, priori"):
        make(scheduling_policy="lifo")
