"""What the runner knows of each request from step to step, and the message that tells the device.

A request has a row while it runs. Its settings stay in the row's place on the host; its blocks and
the token that it sampled last stay on the device. So a step sends numbers of fixed size for each
request, the tokens that the device does not have yet, and new blocks: its cost does not grow with
the context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import numpy as np

from kiln.engine.requests.batch import Batch, ScheduledRequest
from kiln.jit_kernels.ops.step.message import RECORD, WANTED, begin_message, message_words


class Rows:
    """The settings of ``max_requests`` rows, and where each row's last sample is."""

    def __init__(self, max_requests: int) -> None:
        self._settings = np.zeros((max_requests, *RECORD["settings"].shape), np.float32)
        self._keys = np.zeros((max_requests, *RECORD["keys"].shape), np.int64)
        self._rotary_starts = np.zeros(max_requests, np.int32)
        self._last_sample = np.zeros(max_requests, np.int32)  # index in those of the last step

    def write(self, batch: Batch, message: np.ndarray) -> int:
        """Write the message of a step and return its length in words.

        message: [words] int32, room for ``message_room`` words.
        """
        of = batch.columns
        if 0 in of.num_blocks:
            for request in batch.requests:
                if request.num_blocks == 0:
                    self._join(request)
        rows = np.array(of.row)
        samples = np.array(of.num_samples, np.int32)
        records = begin_message(message, np.array(of.num_tokens), samples)
        records["row"] = rows
        records["start"] = of.num_computed_tokens
        records["source"] = self._last_sample[rows]
        records["num_blocks"] = of.num_blocks
        records["rotary_start"] = self._rotary_starts[rows]
        records["settings"] = self._settings[rows]
        keys = self._keys[rows]
        keys[:, 1] = of.num_output_tokens
        records["keys"] = keys
        end = message_words(len(rows), 0)
        records["tokens_at"], records["num_given"], end = _append(message, end, of.token_ids)
        records["blocks_at"], records["num_new"], end = _append(message, end, of.new_block_ids)
        self._last_sample[rows] = records["sample"] + samples - 1
        if batch.wanted_drafts:
            message[WANTED] = end
            message[end : end + len(rows)] = batch.wanted_drafts
            end += len(rows)
        return end

    def _join(self, request: ScheduledRequest) -> None:
        """Store the settings of a request in its row."""
        params = request.params
        log_min_p = math.log(params.min_p) if params.min_p > 0 else -math.inf
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        reported = -1 if params.logprobs is None else params.logprobs
        self._settings[request.row] = (params.temperature, params.top_p, log_min_p, *penalties)
        self._rotary_starts[request.row] = request.rotary_start
        self._keys[request.row] = (request.seed, 0, max(params.top_k, 0), reported)


def message_room(max_requests: int, max_tokens: int, max_blocks: int) -> int:
    """Return the words of the largest message: all blocks may be new, and all want drafts."""
    return message_words(max_requests, max_tokens + max_requests * (max_blocks + 1))


def _append(
    message: np.ndarray, start: int, lists: Sequence[list[int]]
) -> tuple[np.ndarray, np.ndarray, int]:
    """Write lists one after the other from ``start`` on.

    Returns the place and the length of each list, and the end of the last one.
    """
    counts = np.fromiter(map(len, lists), np.int32, len(lists))
    ends = start + counts.cumsum()
    end = int(ends[-1])
    if end > start:
        message[start:end] = list(chain.from_iterable(lists))
    return ends - counts, counts, end
