"""Sample one token per request, depending only on its seed, position and logits."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import torch

from kiln.engine.requests.batch import SampledToken, ScheduledRequest
from kiln.engine.requests.request import TokenLogprobs
from kiln.engine.runner.edits import edit_lists
from kiln.jit_kernels.ops.sampling.functions import Edits, Samples, sample_tokens
from kiln.jit_kernels.ops.sampling.reference import INFINITE, NAN, NOTHING

_COMPLAINTS = {NAN: "NaN", INFINITE: "+inf", NOTHING: "no finite logit left"}


def sample(logits: torch.Tensor, requests: Sequence[ScheduledRequest]) -> tuple[SampledToken, ...]:
    """Sample a token for each request from its row of logits [num_rows, vocab_size].

    Temperature 0 takes the most likely token, on ties the lowest id. A row with NaN, with +inf or
    without a finite logit sets ``error`` in its SampledToken and does not affect other rows.
    Makes one copy to the device and one back.
    """
    width = max((request.params.logprobs or 0 for request in requests), default=0)
    numbers, integers = array("f"), array("q")
    for request in requests:
        numbers.extend(_settings(request))
        integers.extend(_keys(request))
    parts = [
        torch.frombuffer(numbers, dtype=torch.float32).view(len(requests), -1),
        torch.frombuffer(integers, dtype=torch.int64).view(len(requests), -1),
        *edit_lists(requests),
    ]
    settings, keys, *edits = _to_device(parts, logits.device)
    samples = sample_tokens(
        logits, settings, keys, edits=Edits(*edits) if edits else None, width=width
    )
    host = samples.on_host()
    tokens, errors = host.tokens.tolist(), host.errors.tolist()
    logprobs = _Logprobs(host) if any(r.params.logprobs is not None for r in requests) else None
    return tuple(
        SampledToken(
            request.request_id,
            tokens[row],
            None if logprobs is None else logprobs.of(row, request.params.logprobs),
            None if not errors[row] else _complaint(errors[row], request),
        )
        for row, request in enumerate(requests)
    )


def _settings(request: ScheduledRequest) -> tuple[float, ...]:
    params = request.params
    log_min_p = math.log(params.min_p) if params.min_p > 0 else -math.inf
    penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    return (params.temperature, params.top_p, log_min_p, *penalties)


def _keys(request: ScheduledRequest) -> tuple[int, ...]:
    params = request.params
    reported = -1 if params.logprobs is None else params.logprobs
    return request.seed, request.num_output_tokens, max(params.top_k, 0), reported


class _Logprobs:
    """The log-probabilities of a step, converted to lists once for all rows."""

    def __init__(self, host: Samples) -> None:
        self._errors, self._tokens = host.errors.tolist(), host.tokens.tolist()
        self._values, self._ranks = host.logprobs.tolist(), host.ranks.tolist()
        self._top = host.top_tokens.tolist(), host.top_logprobs.tolist()

    def of(self, row: int, wanted: int | None) -> TokenLogprobs | None:
        """Return the log-probabilities of a row; None if not requested or on an error."""
        if wanted is None or self._errors[row]:
            return None
        ids, values = (column[row][:wanted] for column in self._top)
        top = [
            (token, value, rank)
            for rank, (token, value) in enumerate(zip(ids, values, strict=True), start=1)
            if token >= 0
        ]
        return TokenLogprobs(self._tokens[row], self._values[row], self._ranks[row], top)


def _complaint(error: int, request: ScheduledRequest) -> str:
    what = _COMPLAINTS[error]
    if error == NOTHING and request.banned_token_ids:
        return "only stop tokens can be sampled, but min_tokens is not reached: lower min_tokens"
    return f"the model's logits contain {what}: weights or dtype may not fit the model"


def _to_device(parts: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return host tensors of four- and eight-byte elements on a device, in one copy."""
    if device.type == "cpu":
        return parts
    words = [part.view(torch.int32).flatten() for part in parts]
    padded = [torch.nn.functional.pad(one, (0, one.numel() % 2)) for one in words]
    together = torch.cat(padded).pin_memory().to(device, non_blocking=True)
    pieces = together.split([one.numel() for one in padded])
    return [
        piece[: one.numel()].view(part.dtype).view(part.shape)
        for piece, one, part in zip(pieces, words, parts, strict=True)
    ]
