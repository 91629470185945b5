"""The logit edits of requests before sampling: banned tokens, biases, penalties."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kiln.engine.requests.batch import ScheduledRequest
from kiln.jit_kernels.ops.edits.functions import token_edits
from kiln.jit_kernels.ops.sampling.functions import Edits


@dataclass(frozen=True, slots=True)
class History:
    """The tokens of all requests, on the device.

    ``token_pool`` int32 [num_slots]: the token of each slot of the KV pool. ``tables`` int32
    [max_requests, max_blocks]: the blocks of each row. ``count_table`` int32 [at_once, vocab_size]:
    zeros, for counting the tokens of so many requests at once.
    """

    token_pool: torch.Tensor
    tables: torch.Tensor
    count_table: torch.Tensor
    block_size: int


def edits_of(requests: Sequence[ScheduledRequest], history: History) -> Edits | None:
    """Return the edits of the requests' rows of logits; None if no request edits a logit.

    The tokens of this step are in the history already. Tokens that were sampled by a step of which
    the host knows nothing yet count too.
    """
    vocab = history.count_table.shape[1]
    jobs: list[tuple[int, ...]] = []
    tokens: list[int] = []
    biases: list[float] = []
    room = 0
    for request in requests:
        bias = {
            **(request.params.logit_bias or {}),
            **dict.fromkeys(request.banned_token_ids, -math.inf),
        }
        counted = prompt = 0
        if request.params.penalizes:
            counted = request.num_computed_tokens + request.num_tokens
            prompt = counted - request.num_output_tokens
        jobs.append((request.row, counted, prompt, room, len(tokens), len(bias)))
        tokens += bias
        biases += bias.values()
        room += len(bias) + min(counted, vocab)
    if not room:
        return None
    parts = [
        torch.tensor(jobs, dtype=torch.int32),
        torch.tensor(tokens, dtype=torch.int32),
        torch.tensor(biases, dtype=torch.float32),
    ]
    return token_edits(
        *to_device(parts, history.tables.device),
        token_pool=history.token_pool,
        tables=history.tables,
        count_table=history.count_table,
        room=room,
        block_size=history.block_size,
    )


def to_device(parts: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return host tensors of four-byte elements on a device, in one copy."""
    if device.type == "cpu":
        return parts
    together = torch.cat([part.view(torch.int32).flatten() for part in parts])
    together = together.pin_memory().to(device, non_blocking=True)
    pieces = together.split([part.numel() for part in parts])
    return [
        piece.view(part.dtype).view(part.shape) for piece, part in zip(pieces, parts, strict=True)
    ]
