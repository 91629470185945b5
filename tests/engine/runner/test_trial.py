"""The made-up step: as large as the settings allow, and no larger."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kiln.engine.config import SchedulerConfig
from kiln.engine.runner.trial import in_one_block, trial_batch


def make(config, blocks=10_000, block_size=16, max_model_len=4096):
    return trial_batch(
        config.for_device("cpu"),
        config.max_num_batched_tokens,
        max_model_len=max_model_len,
        num_blocks=blocks,
        block_size=block_size,
    )


def test_the_whole_budget_is_spread_over_as_many_requests_as_may_run():
    batch = make(SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2050))
    assert (batch.num_tokens, len(batch.requests)) == (2050, 64)
    assert {row.num_tokens for row in batch.requests} == {32, 33}
    assert all(row.num_samples == 1 and row.num_blocks == 0 for row in batch.requests)
    assert [row.row for row in batch.requests] == list(range(64))
    assert len(make(SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=5)).requests) == 5


@given(
    seqs=st.integers(1, 20),
    budget=st.integers(1, 300),
    chunk=st.one_of(st.none(), st.integers(1, 50)),
    block_size=st.integers(1, 9),
    context=st.integers(2, 100),
    extra_blocks=st.integers(0, 60),
)
def test_no_limit_is_exceeded_and_no_block_shared(
    seqs, budget, chunk, block_size, context, extra_blocks
):
    config = SchedulerConfig(
        max_num_seqs=seqs, max_num_batched_tokens=budget, max_chunk_tokens=chunk
    )
    blocks = -(-context // block_size) + extra_blocks  # a pool holds one request at least
    batch = make(config, blocks, block_size, context)
    assert 1 <= len(batch.requests) <= seqs
    assert batch.num_tokens <= budget
    held = [block for row in batch.requests for block in row.new_block_ids]
    assert len(set(held)) == len(held) <= blocks
    for row in batch.requests:
        assert 1 <= row.num_tokens <= min(context, chunk or budget)
        assert len(row.new_block_ids) * block_size >= row.num_tokens


def test_in_one_block_the_first_request_reaches_the_end_of_the_context():
    batch = make(SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=90), block_size=16)
    first, *others = in_one_block(batch, 1000, 16).requests
    assert (first.num_computed_tokens, first.num_tokens) == (970, 30)
    assert first.new_block_ids == [0] * 63
    assert [row.num_computed_tokens for row in others] == [0, 0]
    assert {block for row in others for block in row.new_block_ids} == {0}
    assert [len(row.new_block_ids) for row in others] == [2, 2]
