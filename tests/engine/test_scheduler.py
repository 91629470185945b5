"""The scheduler: its one rule, and that no schedule changes anybody's tokens."""

from __future__ import annotations

import random

import pytest
from depth import at_depth
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kiln.engine.config import SchedulerConfig
from kiln.engine.errors import RequestError
from kiln.engine.kv.block_pool import BlockPool
from kiln.engine.kv.manager import KVManager
from kiln.engine.requests.batch import ScheduledRequest, StepOutput
from kiln.engine.requests.request import NewRequest
from kiln.engine.requests.sampling_params import SamplingParams
from kiln.engine.scheduler import Scheduler

EOS = frozenset({7, 11})
PROPERTY = settings(
    max_examples=at_depth(100, 3000),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def greedy(**params):
    return SamplingParams(**{"temperature": 0, "max_tokens": 8, "ignore_eos": True, **params})


def make(runner, eos=EOS, seed=0, **config):
    return Scheduler(
        SchedulerConfig(**config).for_device("cpu"),
        KVManager(BlockPool(runner.num_blocks), runner.block_size),
        max_model_len=runner.max_model_len,
        eos_token_ids=eos,
        seed=seed,
    )


def check_invariants(scheduler):
    scheduler.kv.pool.check_integrity()
    held = [block for request in scheduler.running for block in request.block_ids]
    assert len(held) == len(set(held)) == scheduler.kv.pool.num_held
    assert all(not request.block_ids for request in scheduler.waiting)


def step(scheduler, runner):
    before, preemptions = list(scheduler.running), scheduler.num_preemptions
    batch = scheduler.schedule()
    scheduled = [row.request_id for row in batch.requests]
    assert scheduled == [request.request_id for request in scheduler.running]
    if scheduler.num_preemptions > preemptions:
        assert scheduler.running == before[: len(scheduled)]
    else:
        assert scheduler.running[: len(before)] == before
    assert batch.num_tokens <= scheduler.config.max_num_batched_tokens
    assert len(batch.requests) <= scheduler.config.max_num_seqs
    assert all(0 < row.num_tokens <= scheduler.max_chunk_tokens for row in batch.requests)
    check_invariants(scheduler)
    return batch, scheduler.commit(batch, runner.run(batch) if batch.requests else StepOutput(()))


def run_all(scheduler, runner, limit=20_000):
    """Step to the end and return each request's tokens and why it ended."""
    tokens, reasons = {}, {}
    for _ in range(limit):
        if not scheduler.has_work:
            assert scheduler.kv.pool.num_held == 0
            return tokens, reasons
        batch, outputs = step(scheduler, runner)
        assert batch.requests, "work, but an empty step"
        for output in outputs:
            assert output.request_id not in reasons, "an output after the last one"
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
    raise AssertionError("the scheduler did not finish")


requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, 49), min_size=1, max_size=30),  # the prompt
        st.integers(1, 12),  # max_tokens
        st.booleans(),  # greedy, or seeded
        st.booleans(),  # ignore_eos
        st.integers(0, 3),  # min_tokens at most
    ),
    min_size=1,
    max_size=8,
)


def new_requests(drawn):
    return [
        NewRequest(
            f"r{index}",
            prompt,
            SamplingParams(
                temperature=0 if is_greedy else 1,
                seed=index,
                max_tokens=max_tokens,
                min_tokens=min(min_tokens, max_tokens),
                ignore_eos=ignore_eos,
                stop_token_ids=[index],
            ),
        )
        for index, (prompt, max_tokens, is_greedy, ignore_eos, min_tokens) in enumerate(drawn)
    ]


def alone(runner_class, new):
    runner = runner_class(num_blocks=64, block_size=4)
    scheduler = make(runner)
    scheduler.add(new)
    return run_all(scheduler, runner)


@PROPERTY
@given(
    drawn=requests,
    block_size=st.integers(1, 5),
    extra_blocks=st.integers(0, 12),
    max_num_seqs=st.integers(1, 8),
    budget=st.integers(1, 40),
    chunk=st.one_of(st.none(), st.integers(1, 10)),
    arrivals=st.randoms(use_true_random=False),
)
def test_no_schedule_changes_anybodys_tokens(
    fake_runner, drawn, block_size, extra_blocks, max_num_seqs, budget, chunk, arrivals
):
    news = new_requests(drawn)
    longest = max(len(new.prompt_token_ids) + new.params.max_tokens - 1 for new in news)
    runner = fake_runner(num_blocks=-(-longest // block_size) + extra_blocks, block_size=block_size)
    scheduler = make(
        runner, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_chunk_tokens=chunk
    )
    for new in news:
        scheduler.add(new)
    tokens, reasons = run_all(scheduler, runner)
    for new in news:
        expected_tokens, expected_reasons = alone(fake_runner, new)
        assert tokens[new.request_id] == expected_tokens[new.request_id]
        assert reasons[new.request_id] == expected_reasons[new.request_id]


@PROPERTY
@given(drawn=requests, seed=st.integers(0, 2**32), extra_blocks=st.integers(0, 6))
def test_aborts_at_any_moment_free_everything_and_disturb_nobody(
    fake_runner, drawn, seed, extra_blocks
):
    chance = random.Random(seed)
    news = new_requests(drawn)
    runner = fake_runner(num_blocks=11 + extra_blocks, block_size=4)
    scheduler = make(runner, max_num_seqs=4, max_num_batched_tokens=9)
    to_add, tokens, aborted = list(news), {}, set()

    def maybe_abort():
        if chance.random() < 0.15:
            request_id = chance.choice(news).request_id
            in_flight = {r.request_id for r in (*scheduler.waiting, *scheduler.running)}
            scheduler.abort(request_id)
            scheduler.abort(request_id)
            if request_id in in_flight:
                aborted.add(request_id)
            check_invariants(scheduler)

    while to_add or scheduler.has_work:
        if to_add and chance.random() < 0.5:
            scheduler.add(to_add.pop(0))
        maybe_abort()
        batch = scheduler.schedule()
        maybe_abort()
        output = runner.run(batch)
        maybe_abort()
        for token in scheduler.commit(batch, output):
            assert token.request_id not in aborted
            tokens.setdefault(token.request_id, []).extend(token.token_ids)
        check_invariants(scheduler)
    assert scheduler.kv.pool.num_held == 0
    for new in news:
        expected = alone(fake_runner, new)[0][new.request_id]
        got = tokens.get(new.request_id, [])
        assert got == (expected[: len(got)] if new.request_id in aborted else expected)


def test_an_id_used_again_while_its_old_request_runs_gets_none_of_its_tokens(fake_runner):
    runner = fake_runner()
    scheduler = make(runner)
    scheduler.add(NewRequest("a", [1, 2], greedy()))
    batch = scheduler.schedule()
    scheduler.abort("a")
    scheduler.add(NewRequest("a", [3, 4], greedy()))
    assert scheduler.commit(batch, runner.run(batch)) == []
    expected = alone(fake_runner, NewRequest("a", [3, 4], greedy()))
    assert run_all(scheduler, runner) == expected


def test_admission_is_first_come_first_served(fake_runner):
    runner = fake_runner(num_blocks=6, block_size=4)
    scheduler = make(runner, max_num_seqs=2)
    for name, length in [("a", 12), ("big", 20), ("small", 1)]:
        scheduler.add(NewRequest(name, [1] * length, greedy(max_tokens=3)))
    first_run = []
    while scheduler.has_work:
        batch, _ = step(scheduler, runner)
        first_run += [r.request_id for r in batch.requests if r.request_id not in first_run]
    assert first_run == ["a", "big", "small"]  # small would fit beside a, but waits its turn


def test_a_long_prefill_never_starves_a_decode(fake_runner):
    runner = fake_runner(num_blocks=128, block_size=4, max_model_len=400)
    scheduler = make(runner, max_num_batched_tokens=16)
    scheduler.add(NewRequest("short", [1], greedy(max_tokens=60)))
    step(scheduler, runner)
    scheduler.add(NewRequest("long", [2] * 300, greedy(max_tokens=2)))
    scheduler.add(NewRequest("late", [3], greedy(max_tokens=10)))
    while any(request.request_id == "short" for request in scheduler.running):
        running = {request.request_id for request in scheduler.running}
        batch, _ = step(scheduler, runner)
        assert running <= {row.request_id for row in batch.requests}


def test_a_prefill_is_served_in_each_step_beside_as_many_decodes_as_the_budget_allows(fake_runner):
    runner = fake_runner(num_blocks=128, block_size=4)
    scheduler = make(runner, max_num_batched_tokens=4, max_chunk_tokens=1)
    for index in range(6):
        scheduler.add(NewRequest(f"d{index}", [index], greedy(max_tokens=20)))
    scheduler.add(NewRequest("long", [9] * 40, greedy()))
    while scheduler.has_work:
        running = [request.request_id for request in scheduler.running]
        batch, _ = step(scheduler, runner)
        assert [row.request_id for row in batch.requests][: len(running)] == running


def test_a_chunk_leaves_room_for_others_in_the_step(fake_runner):
    runner = fake_runner(num_blocks=64)
    scheduler = make(runner, max_num_batched_tokens=20, max_chunk_tokens=8)
    for name in "abc":
        scheduler.add(NewRequest(name, [1] * 20, greedy()))
    batch, _ = step(scheduler, runner)
    assert [row.num_tokens for row in batch.requests] == [8, 8, 4]
    assert not any(row.num_samples for row in batch.requests)


def test_prefill_and_decode_share_a_step(fake_runner):
    runner = fake_runner()
    scheduler = make(runner)
    scheduler.add(NewRequest("a", [1, 2, 3], greedy()))
    step(scheduler, runner)
    scheduler.add(NewRequest("b", [4, 5], greedy()))
    batch, outputs = step(scheduler, runner)
    assert [row.num_tokens for row in batch.requests] == [1, 2]
    assert [row.num_computed_tokens for row in batch.requests] == [3, 0]
    assert len(outputs) == 2


def test_the_newest_is_preempted_and_comes_back_first_with_its_tokens(fake_runner):
    runner = fake_runner(num_blocks=6, block_size=4)
    scheduler = make(runner)
    for name in "ab":
        scheduler.add(NewRequest(name, [1] * 7, greedy(max_tokens=12)))
    scheduler.add(NewRequest("c", [2], greedy()))
    while not scheduler.num_preemptions:
        batch, _ = step(scheduler, runner)
    assert [request.request_id for request in scheduler.waiting] == ["b", "c"]
    b = scheduler.waiting[0]
    assert b.num_computed_tokens == 0
    assert b.num_output_tokens > 0
    assert [row.request_id for row in batch.requests] == ["a"]  # nobody was admitted in its place
    tokens, _ = run_all(scheduler, runner)
    assert b.num_preemptions == 1
    assert len(tokens["c"]) == 8


def test_an_admission_leaves_each_running_request_a_spare_block(fake_runner):
    runner = fake_runner(num_blocks=4, block_size=4)
    scheduler = make(runner)
    scheduler.add(NewRequest("a", [1] * 8, greedy(max_tokens=4)))
    scheduler.add(NewRequest("b", [1] * 8, greedy(max_tokens=4)))
    batch, _ = step(scheduler, runner)
    assert [row.request_id for row in batch.requests] == ["a"]
    run_all(scheduler, runner)
    assert scheduler.num_preemptions == 0


def test_a_prompt_larger_than_the_pool_is_refused_with_both_numbers(fake_runner):
    scheduler = make(fake_runner(num_blocks=3, block_size=4))
    with pytest.raises(RequestError, match=r"13 tokens.*holds 12 \(3 blocks of 4\)"):
        scheduler.add(NewRequest("a", [1] * 13, greedy()))
    assert not scheduler.has_work


def test_a_request_that_outgrows_the_pool_ends_with_length(fake_runner):
    runner = fake_runner(num_blocks=3, block_size=4)
    scheduler = make(runner)
    scheduler.add(NewRequest("a", [1] * 5, greedy(max_tokens=100)))
    tokens, reasons = run_all(scheduler, runner)
    assert len(tokens["a"]) == 8  # 12 slots, and a last token that needs none
    assert reasons == {"a": "length"}


def test_the_context_ends_a_request_with_length(fake_runner):
    runner = fake_runner(max_model_len=10)
    scheduler = make(runner)
    scheduler.add(NewRequest("a", [1] * 4, greedy(max_tokens=None)))
    tokens, reasons = run_all(scheduler, runner)
    assert (len(tokens["a"]), reasons["a"]) == (6, "length")


def test_an_error_of_one_row_ends_that_request_alone(fake_runner):
    runner = fake_runner()
    scheduler = make(runner)
    for name in "ab":
        scheduler.add(NewRequest(name, [1, 2], greedy()))
    runner.fail_with["a"] = "the logits hold NaN"
    _, outputs = step(scheduler, runner)
    assert (outputs[0].finish_reason, outputs[0].message) == ("error", "the logits hold NaN")
    assert outputs[0].token_ids == []
    assert (outputs[1].finish_reason, outputs[1].message) == (None, None)
    tokens, reasons = run_all(scheduler, runner)
    assert (len(tokens["b"]), reasons) == (7, {"b": "length"})


def test_seeds_are_drawn_in_order_from_the_engines_own(fake_runner):
    def seeds(engine_seed):
        scheduler = make(fake_runner(), seed=engine_seed)
        for name in "abc":
            given = 5 if name == "b" else None
            scheduler.add(NewRequest(name, [1], SamplingParams(seed=given)))
        return [request.seed for request in scheduler.waiting]

    assert seeds(0) == seeds(0)
    assert seeds(0)[1] == 5
    assert len(set(seeds(0) + seeds(1))) == 5
    assert all(0 <= seed < 2**53 for seed in seeds(3))


def test_a_seed_is_told_with_the_first_token_alone(fake_runner):
    runner = fake_runner()
    scheduler = make(runner)
    scheduler.add(NewRequest("r", [1], SamplingParams(max_tokens=3, ignore_eos=True)))
    (request,) = scheduler.waiting
    told = []
    while scheduler.has_work:
        batch = scheduler.schedule()
        told += [output.seed for output in scheduler.commit(batch, runner.run(batch))]
    assert told == [request.seed, None, None]


def test_the_output_of_a_preempted_request_is_still_told_from_its_prompt(fake_runner):
    """Penalties count it; see the kernel's own tests."""
    runner = fake_runner(num_blocks=6, block_size=4)
    scheduler = make(runner)
    for name in "ab":
        params = greedy(max_tokens=12, frequency_penalty=0.5)
        scheduler.add(NewRequest(name, [1] * 7, params))
    by_name = {request.request_id: request for request in scheduler.waiting}
    again = 0
    while scheduler.has_work:
        batch = scheduler.schedule()
        for row in batch.requests:
            request = by_name[row.request_id]
            assert row.num_output_tokens == len(request.token_ids) - 7
            again += row.num_output_tokens > 0 and request.num_preemptions > 0
        scheduler.commit(batch, runner.run(batch))
    assert scheduler.num_preemptions > 0
    assert again > 0


def test_each_field_of_a_row_is_what_its_name_says(fake_runner):
    """The scheduler builds rows by position, which is faster."""
    scheduler = make(fake_runner(block_size=4), max_num_batched_tokens=6)
    params = greedy(min_tokens=2, stop_token_ids=[9, 11], logit_bias={5: 1.0}, max_tokens=5)
    scheduler.add(NewRequest("other", [1], greedy()))
    scheduler.add(NewRequest("own", [2, 3, 4, 5, 6, 7, 8], params.replace(seed=77)))
    for start, tokens, samples in ((0, [2, 3, 4, 5, 6], False), (5, [7, 8], True)):
        row = scheduler.schedule().requests[1]
        blocks = scheduler.running[1].block_ids
        assert row == ScheduledRequest(
            request_id="own",
            row=1,
            num_tokens=len(tokens),
            num_computed_tokens=start,
            token_ids=tokens,
            num_blocks=0 if start == 0 else 2,
            new_block_ids=blocks if start == 0 else [],
            num_samples=samples,
            num_output_tokens=0,
            params=params.replace(seed=77),
            seed=77,
            banned_token_ids=frozenset({9, 11}),
            is_plain=False,
            adapter_slot=-1,
        )


def test_logprobs_go_out_with_their_token(fake_runner):
    runner = fake_runner()
    scheduler = make(runner)
    scheduler.add(NewRequest("a", [1, 2], greedy(logprobs=2)))
    _, (output,) = step(scheduler, runner)
    assert output.logprobs is not None
    assert output.logprobs[0].token_id == output.token_ids[0]
    assert len(output.logprobs[0].top) == 2


def test_an_idle_scheduler_gives_an_empty_batch_and_ignores_unknown_ids(fake_runner):
    scheduler = make(fake_runner())
    scheduler.abort("nobody")
    assert scheduler.schedule().requests == ()
    assert scheduler.schedule().num_tokens == 0
