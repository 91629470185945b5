"""The logit edits of requests before sampling: banned tokens, biases, penalties."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kiln.engine.requests.batch import ScheduledRequest

_UNSEEN = -1  # count of a token in neither prompt nor output


def edit_lists(requests: Sequence[ScheduledRequest]) -> list[torch.Tensor]:
    """Return starts, tokens, counts and biases for kiln.jit_kernels.ops.sampling.functions.Edits.

    Empty if no request edits a logit.
    """
    if not any(r.banned_token_ids or r.token_counts or r.params.logit_bias for r in requests):
        return []
    starts: list[int] = [0]
    tokens: list[int] = []
    counts: list[int] = []
    biases: list[float] = []
    for request in requests:
        seen = request.token_counts
        bias = {
            **(request.params.logit_bias or {}),
            **dict.fromkeys(request.banned_token_ids, -math.inf),
        }
        others = [token for token in bias if token not in seen]
        tokens += [*seen, *others]
        counts += [*seen.values(), *[_UNSEEN] * len(others)]
        biases += [bias.get(token, 0.0) for token in (*seen, *others)]
        starts.append(len(tokens))
    return [
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(tokens, dtype=torch.int32),
        torch.tensor(counts, dtype=torch.int32),
        torch.tensor(biases, dtype=torch.float32),
    ]


def to_device(parts: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return host tensors of four-byte elements on a device, in one copy."""
    if device.type == "cpu" or not parts:
        return parts
    together = torch.cat([part.view(torch.int32) for part in parts])
    together = together.pin_memory().to(device, non_blocking=True)
    pieces = together.split([part.numel() for part in parts])
    return [piece.view(part.dtype) for piece, part in zip(pieces, parts, strict=True)]
