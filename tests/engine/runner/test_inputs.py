"""A batch as tensors: tokens in order, slots through the block table, rows that sample."""

from __future__ import annotations

import torch

from kiln.engine.requests.batch import Batch, ScheduledRequest
from kiln.engine.requests.sampling_params import SamplingParams
from kiln.engine.runner.inputs import make_inputs


def row(tokens, before, blocks, samples):
    return ScheduledRequest(
        "r", tokens, before, blocks, samples, 0, SamplingParams(), 0, frozenset()
    )


def test_a_mixed_batch_is_laid_out_request_by_request():
    rows = (
        row([11, 12, 13], 3, [7, 2], True),
        row([21], 4, [0, 5], True),
        row([31, 32], 0, [9], False),
    )
    inputs = make_inputs(Batch(rows), block_size=4, device=torch.device("cpu"))
    assert inputs.token_ids.tolist() == [11, 12, 13, 21, 31, 32]
    assert inputs.positions.tolist() == [3, 4, 5, 4, 0, 1]
    assert inputs.sample_rows.tolist() == [2, 3]
    metadata = inputs.metadata
    assert metadata.slot_mapping.tolist() == [31, 8, 9, 20, 36, 37]
    assert metadata.block_table.tolist() == [[7, 2], [0, 5], [9, 0]]
    assert metadata.cu_seqlens_q.tolist() == [0, 3, 4, 6]
    assert metadata.seq_lens.tolist() == [6, 5, 2]
    assert (metadata.query_lens, metadata.kv_lens) == ((3, 1, 2), (6, 5, 2))
    assert {t.dtype for t in (inputs.token_ids, inputs.positions, metadata.slot_mapping)} == {
        torch.int64
    }
    assert {t.dtype for t in (metadata.block_table, metadata.cu_seqlens_q, metadata.seq_lens)} == {
        torch.int32
    }
