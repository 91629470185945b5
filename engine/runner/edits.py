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


def edits_of(
    requests: Sequence[ScheduledRequest], lengths: torch.Tensor, history: History
) -> Edits | None:
    """Return the edits of rows of logits; None if no request edits a logit.

    ``requests``: the request of each row; ``lengths`` [rows] int64: how many tokens it has before
    the one that the row samples. These are in the history already, drafts included, and so are
    tokens that were sampled by a step of which the host knows nothing yet.
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
        counts, most = request.params.penalizes, request.num_computed_tokens + request.num_tokens
        # The tokens before the first sample are the prompt and all earlier output.
        prompt = most + 1 - max(request.num_samples, 1) - request.num_output_tokens
        jobs.append((request.row, counts, prompt, room, len(tokens), len(bias)))
        tokens += bias
        biases += bias.values()
        room += len(bias) + (min(most, vocab) if counts else 0)
    if not room:
        return None
    parts = [
        torch.tensor(jobs, dtype=torch.int32),
        torch.tensor(tokens, dtype=torch.int32),
        torch.tensor(biases, dtype=torch.float32),
    ]
    jobs_there, *fixed = to_device(parts, history.tables.device)
    return token_edits(
        jobs_there,
        lengths,
        *fixed,
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
