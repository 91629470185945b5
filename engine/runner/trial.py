"""A synthetic step of the largest size that the settings allow, to measure its memory."""

from __future__ import annotations

from kiln.engine.config import SchedulerConfig
from kiln.engine.requests.batch import Batch, ScheduledRequest
from kiln.engine.requests.sampling_params import MAX_LOGPROBS, SamplingParams

# Filters, penalties and log-probabilities: the sampler's peak memory.
_PARAMS = SamplingParams(top_p=0.9, frequency_penalty=1.0, logprobs=MAX_LOGPROBS)


def trial_batch(
    config: SchedulerConfig,
    num_tokens: int,
    *,
    max_model_len: int,
    num_blocks: int,
    block_size: int,
    num_adapters: int = 0,
) -> Batch:
    """Return a step of ``num_tokens`` over as many requests as may run, all of which sample.

    Each request starts at position 0 and has its own blocks. Requests that exceed the pool or the
    token limits are left out. The requests use the LoRA adapters and the base model in turn.
    """
    count = min(config.num_rows, num_tokens)
    longest = min(max_model_len, config.max_chunk_tokens or num_tokens)
    rows, used = [], 0
    for index in range(count):
        length = min(longest, num_tokens // count + (index < num_tokens % count))
        blocks = -(-length // block_size)
        if used + blocks > num_blocks:
            break
        turn = index % (num_adapters + 1)
        slot = turn if turn < num_adapters else -1
        rows.append(_row(index, length, list(range(used, used + blocks)), slot))
        used += blocks
    return Batch(tuple(rows))


def in_one_block(batch: Batch, max_model_len: int, block_size: int) -> Batch:
    """Return the same step with the first request at the end of the context, all in block 0.

    Its results are meaningless, but it uses the memory of a real step and needs no KV pool.
    """
    first, *others = (
        row._replace(new_block_ids=[0] * len(row.new_block_ids)) for row in batch.requests
    )
    blocks = [0] * -(-max_model_len // block_size)
    start = max_model_len - first.num_tokens
    return Batch((first._replace(num_computed_tokens=start, new_block_ids=blocks), *others))


def _row(index: int, length: int, block_ids: list[int], adapter_slot: int) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=f"trial-{index}",
        row=index,
        num_tokens=length,
        num_computed_tokens=0,
        token_ids=[0] * length,
        num_blocks=0,
        new_block_ids=block_ids,
        samples=True,
        num_output_tokens=0,
        params=_PARAMS,
        seed=index,
        adapter_slot=adapter_slot,
    )
