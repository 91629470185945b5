"""Synthetic steps of the largest size that the settings allow, to try the model and its memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from kiln.cache.env import EnvError
from kiln.engine.config import SchedulerConfig
from kiln.engine.errors import DeviceError, KilnError, ModelError
from kiln.engine.lora.runtime import Adapters
from kiln.engine.requests.batch import Batch, SampledTokens, ScheduledRequest, StepOutput
from kiln.engine.requests.pooling import HiddenPart
from kiln.engine.requests.sampling_params import MAX_LOGPROBS, SamplingParams
from kiln.jit_kernels.declare.errors import KernelError

# Filters, penalties and log-probabilities: the sampler's peak memory.
_PARAMS = SamplingParams(top_p=0.9, frequency_penalty=1.0, logprobs=MAX_LOGPROBS)

logger = logging.getLogger(__name__)

Run = Callable[[Batch], StepOutput]


def trial_steps(
    adapters: Adapters | None,
    config: SchedulerConfig,
    num_tokens: int,
    *,
    embeds: bool = False,
    **sizes: int,
) -> Iterator[tuple[Batch, dict[int, str]]]:
    """Yield steps that use every adapter, and the adapters' names by slot; see ``trial_batch``.

    The adapters of a step are in the pool until the next one is asked for.
    """
    most = max(1, config.num_rows - 1)
    for names in ({},) if adapters is None else adapters.groups(most):
        count = len(names)
        yield trial_batch(config, num_tokens, **sizes, num_adapters=count, embeds=embeds), names


def try_step(run: Run, trial: Batch, names: dict[int, str]) -> None:
    """Run a trial step. Raises ModelError when it fails, and what a kernel raises."""
    slots = {request.request_id: request.adapter_slot for request in trial.requests}
    for token in attempt(run, trial):
        if token.error is not None:
            name = names.get(slots[token.request_id])
            who = "" if name is None else f"LoRA adapter {name!r}: "
            raise ModelError(f"{who}the model's first step failed: {token.error}")


def attempt(run: Run, trial: Batch) -> tuple[SampledTokens, ...]:
    """Run a trial step and return what it sampled, errors of rows included.

    Raises ModelError when it fails, and what a kernel raises.
    """
    try:
        return run(trial).tokens
    except (KernelError, EnvError, DeviceError):
        raise
    except Exception as error:
        what = str(error)
        if not isinstance(error, KilnError):
            logger.exception("the model's first step failed")
            what = repr(error)
        raise ModelError(f"the model's first step failed: {what}") from error


def trial_batch(
    config: SchedulerConfig,
    num_tokens: int,
    *,
    max_model_len: int,
    num_blocks: int,
    block_size: int,
    num_adapters: int = 0,
    embeds: bool = False,
) -> Batch:
    """Return a step of ``num_tokens`` over as many requests as may run.

    All of them sample, or with ``embeds`` all ask for the sum of their hidden states.
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
        rows.append(
            ScheduledRequest(
                request_id=f"trial-{index}",
                row=index,
                num_tokens=length,
                num_computed_tokens=0,
                token_ids=[0] * length,
                num_blocks=0,
                new_block_ids=list(range(used, used + blocks)),
                num_samples=0 if embeds else 1,
                num_output_tokens=0,
                params=_PARAMS,
                seed=index,
                adapter_slot=slot,
                hidden=HiddenPart(0, length) if embeds else None,
            )
        )
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
