"""The core: what it refuses, what it counts, and that a step is schedule, run, commit."""

from __future__ import annotations

import pytest
from depth import at_depth
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kiln.engine.config import (
    EngineConfig,
    KVConfig,
    LoRAConfig,
    LoRAModule,
    ModelConfig,
    SchedulerConfig,
)
from kiln.engine.core import EngineCore
from kiln.engine.errors import DeviceError, QueueFullError, RequestError
from kiln.engine.lora.loaded_adapter import Copied
from kiln.engine.requests.request import NewRequest
from kiln.engine.requests.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=5)
PROPERTY = settings(
    max_examples=at_depth(100, 2000),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def make_core(runner, eos=frozenset(), **scheduler):
    config = EngineConfig(
        ModelConfig("fake", seed=0),
        KVConfig(block_size=runner.block_size),
        SchedulerConfig(**scheduler),
    )
    return EngineCore(config, runner=runner, eos=eos)


def run_to_end(core, limit=10_000):
    outputs = {}
    for _ in range(limit):
        if not core.has_work:
            return outputs
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError("the engine did not finish")


def test_a_request_runs_to_its_last_token(fake_runner):
    core = make_core(fake_runner())
    core.add(NewRequest("a", [1, 2, 3], GREEDY))
    outputs = run_to_end(core)["a"]
    assert [len(output.token_ids) for output in outputs] == [1] * 5
    assert [output.finish_reason for output in outputs] == [None] * 4 + ["length"]
    assert not core.has_work
    assert core.step() == []


@pytest.mark.parametrize(
    ("prompt", "params", "message", "field"),
    [
        ([], {}, "the prompt is empty", "prompt"),
        (
            [1] * 512,
            {},
            "maximum context length is 512 tokens. However, the prompt has 512 tokens",
            "prompt",
        ),
        ([1] * 300, {}, "the prompt has 300 tokens, and the KV pool holds 256", "prompt"),
        ([1, 50], {}, "token id 50, but the vocabulary is 0 to 49", "prompt"),
        ([1, -1], {}, "token id -1, but the vocabulary is 0 to 49", "prompt"),
        ([1], {"stop_token_ids": [99]}, "stop_token_ids has token id 99", "stop_token_ids"),
    ],
)
def test_a_request_that_can_never_run_is_refused(fake_runner, prompt, params, message, field):
    core = make_core(fake_runner())
    with pytest.raises(RequestError, match=message) as caught:
        core.add(NewRequest("a", prompt, SamplingParams(**params)))
    assert caught.value.param == field
    assert not core.has_work


def test_a_request_id_in_use_is_refused_and_may_be_used_again_later(fake_runner):
    core = make_core(fake_runner())
    core.add(NewRequest("a", [1], GREEDY))
    with pytest.raises(RequestError, match="'a' is already in use"):
        core.add(NewRequest("a", [2], GREEDY))
    run_to_end(core)
    core.add(NewRequest("a", [2], GREEDY))


def test_a_full_queue_refuses_and_takes_more_when_it_has_room(fake_runner):
    core = make_core(fake_runner(), max_waiting=2)
    core.add(NewRequest("a", [1], GREEDY))
    core.add(NewRequest("b", [1], GREEDY))
    with pytest.raises(QueueFullError, match="the queue holds at most 2"):
        core.add(NewRequest("c", [1], GREEDY))
    core.step()
    core.add(NewRequest("c", [1], GREEDY))
    assert set(run_to_end(core)) == {"b", "a", "c"}


def test_a_prompt_as_long_as_the_context_less_one_gets_one_token(fake_runner):
    core = make_core(fake_runner(max_model_len=16))
    core.add(NewRequest("a", [1] * 15, GREEDY))
    outputs = run_to_end(core)["a"]
    assert [output.finish_reason for output in outputs] == ["length"]


def test_a_prompt_that_fills_the_pool_gets_one_token(fake_runner):
    core = make_core(fake_runner(num_blocks=2))
    core.add(NewRequest("a", [1] * 8, GREEDY))
    assert [output.finish_reason for output in run_to_end(core)["a"]] == ["length"]


@PROPERTY
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    culprits=st.sets(st.integers(0, 7), max_size=4),
    budget=st.integers(1, 40),
    blocks=st.integers(10, 40),
    overlap=st.booleans(),
    raise_late=st.booleans(),
)
def test_a_request_that_makes_the_runner_raise_ends_alone(
    fake_runner, lengths, culprits, budget, blocks, overlap, raise_late
):
    names = [f"r{index}" for index in range(len(lengths))]
    news = [
        NewRequest(name, [index] * length, SamplingParams(seed=index, max_tokens=9))
        for index, (name, length) in enumerate(zip(names, lengths, strict=True))
    ]
    wanted = {}
    for new in news:
        alone = make_core(fake_runner())
        alone.add(new)
        wanted |= run_to_end(alone)
    runner = fake_runner(num_blocks=blocks)
    core = make_core(runner, max_num_batched_tokens=budget, max_num_seqs=5, overlap=overlap)
    for new in news:
        core.add(new)
    for index in culprits:
        runner.raise_for[f"r{index}"] = ValueError("too much")
    runner.raise_late = raise_late
    outputs = run_to_end(core)
    core.scheduler.kv.pool.check_integrity()
    assert core.scheduler.kv.pool.num_held == 0
    for index, name in enumerate(names):
        if index in culprits:
            (output,) = outputs[name]
            assert (output.finish_reason, output.token_ids) == ("error", [])
            assert f"'{name}' failed; the engine continues" in output.message
            assert "ValueError: too much" in output.message
        else:
            assert outputs[name] == wanted[name]
    served = [new for index, new in enumerate(news) if index not in culprits]
    assert core.stats().prompt_tokens == sum(len(new.prompt_token_ids) for new in served)


def test_a_request_may_fail_in_the_middle_of_its_prompt_or_its_answer(fake_runner):
    runner = fake_runner()
    core = make_core(runner, max_num_batched_tokens=4, overlap=False)
    core.add(NewRequest("decoding", [1], GREEDY))
    core.add(NewRequest("reading", [2] * 20, GREEDY))
    core.step()
    runner.raise_for = dict.fromkeys(("decoding", "reading"), RuntimeError("no"))
    assert [(o.request_id, o.finish_reason) for o in core.step()] == [
        ("decoding", "error"),
        ("reading", "error"),
    ]
    assert not core.has_work
    assert core.stats().kv_blocks_used == 0


def test_a_step_that_fails_only_when_it_is_large_gives_everybody_their_tokens(fake_runner):
    runner, healthy = fake_runner(), make_core(fake_runner())
    core, works = make_core(runner), runner._compute

    def small_steps_only(batch):
        if len(batch.requests) > 2:
            raise MemoryError("too large")
        return works(batch)

    runner._compute = small_steps_only
    for each in (core, healthy):
        for index in range(7):
            each.add(NewRequest(str(index), [index] * 3, GREEDY))
    assert run_to_end(core) == run_to_end(healthy)


def test_a_device_that_fails_for_good_ends_the_engine_at_once(fake_runner):
    runner = fake_runner()
    core = make_core(runner)
    for name in "abc":
        core.add(NewRequest(name, [1], GREEDY))
    runner.raise_for["b"] = DeviceError("cuda:0 is gone")
    with pytest.raises(DeviceError, match="cuda:0 is gone"):
        core.step()
    assert len(runner.batches) == 1  # no half is tried


@pytest.mark.parametrize("overlap", [False, True])
def test_an_interrupted_step_is_run_again_as_it_was(fake_runner, overlap):
    runner, healthy = fake_runner(), make_core(fake_runner())
    core = make_core(runner, overlap=overlap)
    for each in (core, healthy):
        each.add(NewRequest("a", [1, 2, 3, 4], GREEDY))
    before = core.step() + core.step()
    works = runner._compute

    def interrupted(batch):
        raise KeyboardInterrupt

    runner._compute = interrupted
    with pytest.raises(KeyboardInterrupt):
        core.step()
    runner._compute = works
    assert before + run_to_end(core)["a"] == run_to_end(healthy)["a"]
    assert core.scheduler.kv.pool.num_held == 0


def test_stats_count_what_happened(fake_runner):
    core = make_core(fake_runner(num_blocks=16), max_num_seqs=1, overlap=False)
    core.add(NewRequest("a", [1] * 6, GREEDY))
    core.add(NewRequest("b", [2] * 3, GREEDY))
    core.step()
    stats = core.stats()
    assert (stats.running, stats.waiting) == (1, 1)
    assert (stats.kv_blocks_used, stats.kv_blocks_total) == (2, 16)
    assert (stats.prompt_tokens, stats.generated_tokens, stats.steps) == (6, 1, 1)
    run_to_end(core)
    stats = core.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
    assert (stats.prompt_tokens, stats.generated_tokens, stats.steps) == (9, 10, 10)
    assert stats.preemptions == 0


def test_stats_count_each_prompt_once_though_it_is_computed_again(fake_runner):
    core = make_core(fake_runner(num_blocks=5))
    for name in "ab":
        core.add(NewRequest(name, [1] * 4, SamplingParams(temperature=0, max_tokens=12)))
    run_to_end(core)
    stats = core.stats()
    assert stats.preemptions > 0
    assert (stats.prompt_tokens, stats.generated_tokens) == (8, 24)


ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("add"), st.integers(0, 9)),
        st.tuples(st.just("abort"), st.integers(0, 9)),
    ),
    max_size=40,
)
KINDS = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 12),
        "temperature": st.sampled_from([0, 1]),
        "min_tokens": st.integers(0, 1),
        "ignore_eos": st.booleans(),
        "frequency_penalty": st.sampled_from([0, 0, 0, 0.5]),
        "logprobs": st.sampled_from([None, None, 1]),
    }
)


def play(runner, acts, kinds, **scheduler):
    """Let requests arrive, run and be aborted; return what each one was told."""
    core = make_core(runner, eos=frozenset({3, 4, 5}), **scheduler)
    outputs, added, aborted = {}, set(), set()

    def steps(count):
        for _ in range(count):
            for output in core.step():
                assert output.request_id not in aborted, "an output after the abort"
                outputs.setdefault(output.request_id, []).append(output)

    for act, number in acts:
        name = f"r{number}"
        if act == "step":
            steps(number)
        elif act == "add" and name not in added:
            added.add(name)
            params = SamplingParams(seed=number, stop_token_ids=[number], **kinds[number])
            core.add(NewRequest(name, [number] * (1 + 5 * number % 17), params))
        elif act == "abort" and name in added:
            aborted.add(name)
            core.abort(name)
    while core.has_work:
        steps(1)
    core.scheduler.kv.pool.check_integrity()
    assert core.scheduler.kv.pool.num_held == 0
    assert sorted(core.scheduler._free_rows) == list(range(core.scheduler.config.max_num_seqs))
    return outputs, aborted, core.stats()


@settings(max_examples=at_depth(200, 3000), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    acts=ACTS,
    kinds=st.lists(KINDS, min_size=10, max_size=10),
    budget=st.integers(1, 40),
    blocks=st.integers(10, 24),
    seqs=st.integers(1, 6),
)
def test_one_step_ahead_gives_the_same_outputs_as_step_by_step(
    fake_runner, acts, kinds, budget, blocks, seqs
):
    limits = {"max_num_batched_tokens": budget, "max_num_seqs": seqs}
    plain, _, _ = play(fake_runner(num_blocks=blocks), acts, kinds, overlap=False, **limits)
    runner = fake_runner(num_blocks=blocks)
    ahead, aborted, stats = play(runner, acts, kinds, overlap=True, **limits)
    for name in plain.keys() | ahead.keys():
        told, wanted = ahead.get(name, []), plain.get(name, [])
        if name in aborted:  # at another token, perhaps
            shorter = min(len(told), len(wanted))
            told, wanted = told[:shorter], wanted[:shorter]
        assert told == wanted
    assert stats.steps_not_ahead <= stats.steps


def test_steps_run_one_ahead_with_penalties_too(fake_runner):
    class Counting(fake_runner):
        most = 0

        def launch(self, batch):
            self.most = max(self.most, self.launched + 1 - self.collected)
            return super().launch(batch)

    for overlap, penalty, most in ((False, 0.0, 1), (True, 0.0, 2), (True, 1.0, 2)):
        runner = Counting()
        core = make_core(runner, overlap=overlap)
        params = SamplingParams(max_tokens=9, ignore_eos=True, presence_penalty=penalty, seed=1)
        core.add(NewRequest("a", [1, 2], params))
        outputs = run_to_end(core)["a"]
        assert [len(output.token_ids) for output in outputs] == [1] * 9
        assert runner.most == most
        assert core.stats().steps == 9  # no step too many: its end is known by its length
        assert core.stats().steps_not_ahead == (1 if overlap else 9)


@pytest.mark.parametrize("num_innocent", [1, 2])
def test_who_shared_a_failed_step_with_a_request_that_is_gone_runs_again(fake_runner, num_innocent):
    """The client of the culprit goes away while its step runs; the others are not to blame."""
    names = [f"innocent {index}" for index in range(num_innocent)]
    runner, healthy = fake_runner(), make_core(fake_runner())
    runner.raise_late = True
    core = make_core(runner)
    for index, name in enumerate(names):
        for each in (core, healthy):
            each.add(NewRequest(name, [3 + index, 4], GREEDY))
    core.add(NewRequest("culprit", [1, 2], GREEDY.replace(max_tokens=50)))
    before = core.step() + core.step()
    runner.raise_for["culprit"] = ValueError("only with the culprit in the batch")
    before += core.step()  # launches the step that fails
    core.abort("culprit")
    outputs = run_to_end(core)
    for name, wanted in run_to_end(healthy).items():
        assert [out for out in before if out.request_id == name] + outputs[name] == wanted


class SlowStore:
    """An adapter store whose copies end only when they are waited for."""

    num_slots, size, sizes = 1, 10, {"a": 10, "b": 10}

    def __init__(self):
        self.begun, self.waits = [], 0

    def info(self, name, path, *, pinned):
        return name

    def begin(self, name, slot, start):
        self.begun.append(name)

    def copied(self, *, wait=False):
        self.waits += wait
        done, self.begun = (self.begun, []) if wait else ([], self.begun)
        return [Copied(name) for name in done]

    def clear(self, slot):
        pass


def test_a_core_with_nothing_else_to_do_waits_for_the_copy_of_an_adapter(fake_runner):
    """Else it would ask for it again and again."""
    runner = fake_runner()
    runner.adapter_store = SlowStore()
    modules = tuple(LoRAModule(name, "folder") for name in "ab")
    config = EngineConfig(
        ModelConfig("fake"), KVConfig(block_size=4), lora=LoRAConfig(modules, max_loras=1)
    )
    core = EngineCore(config, runner=runner, eos=frozenset())
    runner.adapter_store.waits = 0  # those of the start
    for name in "ab":
        core.add(NewRequest(name, [1, 2], GREEDY, adapter=name))
    outputs = run_to_end(core, limit=20)
    assert [len(outputs[name]) for name in "ab"] == [5, 5]
    assert runner.adapter_store.waits == 1  # one was placed at the start
