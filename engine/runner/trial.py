"""The largest step that the settings allow, made up: to measure its memory, and to try it out."""

from __future__ import annotations

from dataclasses import replace

from kiln.engine.batch import Batch, ScheduledRequest
from kiln.engine.config import SchedulerConfig
from kiln.engine.sampling_params import MAX_LOGPROBS, SamplingParams

# Filters, penalties and log-probabilities: what takes the sampler the most memory.
_PARAMS = SamplingParams(top_p=0.9, frequency_penalty=1.0, logprobs=MAX_LOGPROBS)


def trial_batch(
    config: SchedulerConfig,
    num_tokens: int,
    *,
    max_model_len: int,
    num_blocks: int,
    block_size: int,
) -> Batch:
    """Return a step of ``num_tokens`` over as many requests as may run, all of which sample.

    Each request starts at position 0 and has blocks of its own; those that the pool or the token
    limits have no room for are left out.
    """
    count = min(config.max_num_seqs, num_tokens)
    longest = min(max_model_len, config.max_chunk_tokens or num_tokens)
    rows, used = [], 0
    for index in range(count):
        length = min(longest, num_tokens // count + (index < num_tokens % count))
        blocks = -(-length // block_size)
        if used + blocks > num_blocks:
            break
        rows.append(_row(index, length, list(range(used, used + blocks))))
        used += blocks
    return Batch(tuple(rows))


def in_one_block(batch: Batch, max_model_len: int, block_size: int) -> Batch:
    """Return the same step with the first request at the end of the context, all in block 0.

    It computes nonsense, in as much memory as the real step, but needs no KV pool.
    """
    first, *others = (replace(row, block_ids=[0] * len(row.block_ids)) for row in batch.requests)
    start = max_model_len - len(first.token_ids)
    far = replace(first, num_computed_tokens=start, block_ids=[0] * -(-max_model_len // block_size))
    return Batch((far, *others))


def _row(index: int, length: int, block_ids: list[int]) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=f"trial-{index}",
        token_ids=[0] * length,
        num_computed_tokens=0,
        block_ids=block_ids,
        samples=True,
        num_output_tokens=0,
        params=_PARAMS,
        seed=index,
        banned_token_ids=frozenset(),
        token_counts={0: 1},
    )
