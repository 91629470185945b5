"""A batch as tensors: tokens in order, slots through the block table, rows that sample."""

from __future__ import annotations

import math

import torch

from kiln.engine.requests.batch import Batch, ScheduledRequest
from kiln.engine.requests.sampling_params import SamplingParams
from kiln.engine.runner.inputs import StepInputs

NEUTRAL = [1.0, 1.0, -math.inf, 1.0, 0.0, 0.0]


def made(max_requests=6, max_tokens=20, max_model_len=17, max_drafts=0, long_start=0):
    inputs = StepInputs(
        max_requests=max_requests,
        max_tokens=max_tokens,
        max_model_len=max_model_len,
        block_size=4,
        vocab_size=99,
        device=torch.device("cpu"),
        max_drafts=max_drafts,
        long_start=long_start,
    )
    inputs.use_pool(torch.zeros(200, dtype=torch.int32))
    return inputs


def row(
    index, tokens, before, blocks, samples, old=0, count=None, outputs=0, rotary_start=0, **params
):
    params = SamplingParams(**params)
    count = len(tokens) if count is None else count
    return ScheduledRequest(
        f"r{index}", index, count, before, tokens, old, blocks, samples, outputs, params, 9 + index,
        rotary_start=rotary_start,
    )  # fmt: skip


def step(inputs, *rows):
    batch = Batch(rows)
    inputs.send(batch)
    return inputs.make(batch)


def test_a_mixed_batch_is_laid_out_request_by_request():
    inputs = step(
        made(),
        row(3, [11, 12, 13], 3, [7, 2], True),
        row(0, [21], 4, [0, 5], True, outputs=4, temperature=0, top_p=0.5, min_p=0.25, top_k=3),
        row(5, [31, 32], 0, [9], False, logprobs=2),
    )
    assert inputs.token_ids.tolist() == [11, 12, 13, 21, 31, 32]
    assert inputs.positions.tolist() == [3, 4, 5, 4, 0, 1]
    assert inputs.sample_rows.tolist() == [2, 3]
    filtered = [0, 0.5, math.log(0.25), 1, 0, 0]
    assert inputs.settings.tolist() == torch.tensor([NEUTRAL, filtered]).tolist()
    assert inputs.keys.tolist() == [[12, 0, 0, -1], [9, 4, 3, -1]]
    metadata = inputs.metadata
    assert metadata.slot_mapping.tolist() == [31, 8, 9, 20, 36, 37]
    assert [table[:2] for table in metadata.block_table.tolist()] == [[7, 2], [0, 5], [9, 0]]
    assert metadata.cu_seqlens_q.tolist() == [0, 3, 4, 6]
    assert metadata.seq_lens.tolist() == [6, 5, 2]
    assert (metadata.query_lens, metadata.kv_lens) == ((3, 1, 2), (6, 5, 2))


def test_only_the_rows_of_the_rotary_table_are_others_for_a_long_request():
    inputs = made(long_start=5)
    for start, rows in ((0, [3, 4, 0, 1]), (5, [8, 9, 0, 1])):
        one = row(3, [11, 12], 3, [7, 2], True, rotary_start=start, outputs=2)
        found = step(inputs, one, row(5, [31, 32], 0, [9], True))
        assert found.positions.tolist() == rows
        assert found.metadata.slot_mapping.tolist() == [31, 8, 36, 37]
        assert found.metadata.seq_lens.tolist() == [5, 2]
        assert found.keys[:, 1].tolist() == [2, 0]
        assert inputs.lengths(2).tolist() == [5, 2]
    # The row keeps it for the next steps.
    found = step(inputs, row(3, [], 5, [], True, old=2, count=1, outputs=3))
    assert (found.positions.tolist(), inputs.lengths(1).tolist()) == ([10], [6])


def test_a_row_keeps_its_blocks_and_settings_and_takes_the_token_it_sampled():
    inputs = made()
    step(inputs, row(1, [5, 6, 7], 0, [3], True, top_k=4), row(4, [8], 0, [1], True, seed=None))
    inputs.sampled[:2] = torch.tensor([50, 60])
    again = step(
        inputs,
        row(4, [], 1, [], True, old=1, count=1, outputs=1),
        row(1, [], 3, [], True, old=1, count=1, outputs=1),
        row(2, [9, 9], 0, [2], False),
    )
    assert again.token_ids.tolist() == [60, 50, 9, 9]
    assert again.metadata.slot_mapping.tolist() == [5, 15, 8, 9]
    assert again.keys.tolist() == [[13, 1, 0, -1], [10, 1, 4, -1]]
    inputs.sampled[:2] = torch.tensor([61, 51])
    third = step(inputs, row(1, [], 4, [0], True, old=1, count=1, outputs=2))
    assert third.token_ids.tolist() == [51]
    assert third.metadata.slot_mapping.tolist() == [0]
    assert third.metadata.block_table.tolist()[0][:2] == [3, 0]


def test_a_new_request_in_a_row_has_nothing_of_the_one_before():
    inputs = made()
    step(inputs, row(1, [5] * 9, 0, [3, 4, 5], True, top_k=4, frequency_penalty=1))
    step(inputs, row(1, [6] * 5, 0, [1, 2], False))
    third = step(inputs, row(1, [6], 5, [], True, old=2))
    assert third.metadata.slot_mapping.tolist() == [9]
    assert third.settings.tolist() == [NEUTRAL]
    assert third.keys.tolist() == [[10, 0, 0, -1]]


def test_two_steps_may_be_sent_before_the_first_is_made():
    """On a GPU the copy of one message may wait while the next is written."""
    inputs, written = made(), []
    for tokens in ([1, 2], [3, 4]):
        inputs.send(Batch((row(0, tokens, 0, [0], True),)))
        host = inputs._host[inputs._turn]
        written.append((host, host.clone()))
    assert all(torch.equal(host, message) for host, message in written)
    assert not torch.equal(written[0][0], written[1][0])


def test_a_message_has_room_for_requests_whose_blocks_are_all_cached():
    """Each of 32 requests computes the one token behind 400 blocks that others have filled."""
    inputs = made(max_requests=32, max_tokens=32, max_model_len=1604)
    inputs.use_pool(torch.arange(1604, dtype=torch.int32))
    laid_out = step(inputs, *(row(index, [5], 1600, list(range(401)), 1) for index in range(32)))
    assert laid_out.metadata.seq_lens.tolist() == [1601] * 32
    assert laid_out.metadata.block_table.tolist() == [list(range(401))] * 32
    assert inputs.history.token_pool[:1600].tolist() == list(range(1600))


def test_the_device_goes_on_behind_the_drafts_that_were_accepted():
    inputs = made(max_requests=3, max_model_len=40, max_drafts=3)
    step(inputs, row(0, [5, 6], 0, [0], 1), row(2, [7, 8, 9], 0, [1], 1))
    inputs.sampled[:2] = torch.tensor([20, 30])
    inputs.drafts[0] = torch.tensor([21, 22, 23])
    # The host sends no token: it does not know them yet. The first request has three drafts.
    drafted = step(
        inputs,
        row(2, [], 3, [], 1, old=1, count=1, outputs=1),
        row(0, [], 2, [2], 4, old=1, count=4, outputs=1),
    )
    assert drafted.token_ids.tolist() == [30, 20, 21, 22, 23]
    assert drafted.sample_rows.tolist() == [0, 1, 2, 3, 4]
    assert drafted.keys[:, 1].tolist() == [1, 1, 2, 3, 4]
    inputs.sampled[:5] = torch.tensor([31, 21, 99, 23, 24])  # the second draft is wrong
    inputs.verify()
    assert inputs.rejected.tolist() == [2, 0, 0]
    # The host thinks that all drafts stand: position 6 and four tokens of output are ahead.
    behind = step(
        inputs,
        row(2, [], 4, [3], 1, old=1, count=1, outputs=2),
        row(0, [], 6, [], 1, old=2, count=1, outputs=5),
    )
    assert behind.token_ids.tolist() == [31, 99]
    assert behind.positions.tolist() == [4, 4]
    assert behind.keys[:, 1].tolist() == [2, 3]
    assert behind.metadata.seq_lens.tolist() == [5, 5]
    assert inputs.lengths(2).tolist() == [5, 5]
    assert inputs.rejected.tolist() == [0, 0, 0]
    assert inputs.history.token_pool[[0, 1, 2, 3, 8]].tolist() == [5, 6, 20, 21, 99]
