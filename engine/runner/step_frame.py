"""A step as rank 0 sends it to the other ranks: int32 words, those of the step's message last.

requests, tokens and rows of the graph (-1: none), is_decode, its place in VARIANTS
how each request is sampled (_PLAIN, _EDITED or _LATE)
adapter slot of each request
offset and number of the prompt tokens to report of each request (0, 0: none)
the message that the device reads (kiln.jit_kernels.ops.step.message)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kiln.engine.graphs.runner import VARIANTS, GraphKey
from kiln.engine.requests.batch import Batch, ScheduledRequest
from kiln.engine.requests.request import PromptPart
from kiln.engine.requests.sampling_params import SamplingParams
from kiln.jit_kernels.ops.step.message import WANTED, records_of

_HEADER, _LISTS = 5, 4
_EDITED, _PLAIN, _LATE = range(3)
# What rank 0 alone needs of a request, and what ``decode`` replaces.
_REQUEST = ScheduledRequest(
    request_id="", row=0, num_tokens=0, num_computed_tokens=0, token_ids=[], num_blocks=0,
    new_block_ids=[], num_samples=0, num_output_tokens=0, params=SamplingParams(), seed=0,
)  # fmt: skip


class StepFrame(NamedTuple):
    """A step, the graph to replay, and the message [words] int32."""

    batch: Batch
    key: GraphKey | None
    words: np.ndarray


def encode(frame: StepFrame) -> bytes:
    """Return a step as bytes."""
    of, key = frame.batch.columns, frame.key
    count = len(frame.batch.requests)
    size = (-1, -1, 0, 0) if key is None else (*key[:3], VARIANTS.index(key.variant))
    reported = ((0, 0) if one is None else (one.offset, len(one.token_ids)) for one in of.prompt)
    offsets, numbers = zip(*reported, strict=True)
    kinds = (
        _LATE if late else int(plain) for late, plain in zip(of.is_late, of.is_plain, strict=True)
    )
    head = np.array((count, *size, *kinds, *of.adapter_slot, *offsets, *numbers), np.int32)
    return head.tobytes() + frame.words.tobytes()


def decode(content: bytes) -> StepFrame:
    """Return the step that ``encode`` wrote.

    Of the requests there is what a rank without sampler needs.
    """
    words = np.frombuffer(content, np.int32)
    count, tokens, rows, is_decode, variant = words[:_HEADER].tolist()
    end = _HEADER + _LISTS * count
    message = words[end:]
    kinds, slots, offsets, numbers = words[_HEADER:end].reshape(_LISTS, count).tolist()
    records = records_of(message, count)
    names = ("row", "count", "start", "num_blocks", "num_samples")
    row, num_tokens, start, num_blocks, samples = (records[name].tolist() for name in names)
    columns: Any = ScheduledRequest._make([one] * count for one in _REQUEST)
    columns = columns._replace(
        row=row,
        num_tokens=num_tokens,
        num_computed_tokens=start,
        num_blocks=num_blocks,
        num_samples=samples,
        is_plain=[kind == _PLAIN for kind in kinds],
        is_late=[kind == _LATE for kind in kinds],
        adapter_slot=slots,
        prompt=map(_part, offsets, numbers),
    )
    requests = tuple(map(ScheduledRequest._make, zip(*columns, strict=True)))
    key = None if tokens < 0 else GraphKey(tokens, rows, bool(is_decode), VARIANTS[variant])
    wanted = int(message[message[WANTED]]) if message[WANTED] else 0
    return StepFrame(Batch(requests, wanted), key, message)


def _part(offset: int, number: int) -> PromptPart | None:
    """Return a report of the same size: every rank computes its part of the same logits."""
    return PromptPart(offset, [0] * number) if number else None
