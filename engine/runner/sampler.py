"""Sample one token per request, depending only on its seed, position and logits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from kiln.engine.requests.batch import SampledTokens, ScheduledRequest
from kiln.engine.requests.request import TokenLogprobs
from kiln.engine.requests.sampling_params import MAX_LOGPROBS
from kiln.engine.runner.edits import edits_of
from kiln.engine.runner.masks import Masks
from kiln.jit_kernels.ops.sampling.functions import Samples, sample_tokens
from kiln.jit_kernels.ops.sampling.reference import INFINITE, NAN, NOTHING

# Like SampledTokens(*values), in a third of the time.
_plain = partial(tuple.__new__, SampledTokens)
_COMPLAINTS = {NAN: "NaN", INFINITE: "+inf", NOTHING: "no finite logit left"}


def sample(
    logits: torch.Tensor,
    settings: torch.Tensor,
    keys: torch.Tensor,
    requests: Sequence[ScheduledRequest],
    masks: Masks,
) -> Samples:
    """Sample a token for each request from its row of logits [num_rows, vocab_size].

    settings: [num_rows, 6] and keys [num_rows, 4], as of ``sample_tokens``.

    Temperature 0 takes the most likely token, on ties the lowest id. A row with NaN, with +inf or
    without a finite logit gets an error and does not affect other rows.
    """
    width = max((request.params.logprobs or 0 for request in requests), default=0)
    mask, edits = masks.of(requests, logits.shape[1]), edits_of(requests, masks.history)
    return sample_tokens(logits, settings, keys, mask, edits, width)


class HostCopies:
    """Copies of results in pinned memory: two that take turns, so that one may still be in use."""

    def __init__(self, max_requests: int, device: torch.device) -> None:
        self._device = device
        self._turn = 0
        if device.type == "cuda":
            size = max_requests * Samples.size_of(1, MAX_LOGPROBS)
            self._memory = torch.empty(2, size, dtype=torch.int32, pin_memory=True)

    def begin(self, samples: Samples) -> PendingSamples:
        """Start to copy results to the host."""
        if self._device.type == "cpu":  # the step behind may overwrite them before they are read
            return PendingSamples(Samples(samples.storage.clone(), len(samples.tokens)), None)
        self._turn = 1 - self._turn
        host = self._memory[self._turn, : samples.storage.numel()]
        host.copy_(samples.storage, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return PendingSamples(Samples(host, len(samples.tokens)), done)


class PendingSamples:
    """Results on the way to the host."""

    def __init__(self, host: Samples, done: torch.cuda.Event | None) -> None:
        self._host, self._done = host, done

    @classmethod
    def copied(cls, samples: Samples) -> PendingSamples:
        """Start to copy results, which nobody overwrites, to memory of their own."""
        if samples.storage.device.type == "cpu":
            return cls(samples, None)
        host = torch.empty_like(samples.storage, device="cpu", pin_memory=True)
        host.copy_(samples.storage, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return cls(Samples(host, len(samples.tokens)), done)

    def wait_host(self) -> Samples:
        """Wait for the results and return them."""
        if self._done is not None:
            self._done.synchronize()
        return self._host

    def wait(self, requests: Sequence[ScheduledRequest]) -> tuple[SampledTokens, ...]:
        """Wait for the results of the requests that sampled, and return them."""
        self.wait_host()
        tokens, errors = self._host.tokens.tolist(), self._host.errors.tolist()
        if not any(errors) and all(request.params.logprobs is None for request in requests):
            rows = zip(requests, tokens, strict=False)  # a graph has rows of padding
            return tuple(
                [_plain((row.request_id, [token], None, None, None)) for row, token in rows]
            )
        logprobs = Logprobs(self._host)
        return tuple(
            SampledTokens(request.request_id, [], error=complaint(errors[row], request))
            if errors[row]
            else SampledTokens(
                request.request_id, [tokens[row]], logprobs.of(row, request.params.logprobs)
            )
            for row, request in enumerate(requests)
        )


class Logprobs:
    """The log-probabilities of a step, converted to lists once for all rows."""

    def __init__(self, host: Samples) -> None:
        self._tokens = host.tokens.tolist()
        self._values, self._ranks = host.logprobs.tolist(), host.ranks.tolist()
        self._top = host.top_tokens.tolist(), host.top_logprobs.tolist()

    def of(self, row: int, wanted: int | None) -> list[TokenLogprobs] | None:
        """Return the log-probabilities of a row in a list; None if not requested."""
        return None if wanted is None else [self.at(row, wanted)]

    def at(self, row: int, wanted: int) -> TokenLogprobs:
        """Return the log-probabilities of a row, and of the ``wanted`` most likely tokens."""
        ids, values = (column[row][:wanted] for column in self._top)
        top = [
            (token, value, rank)
            for rank, (token, value) in enumerate(zip(ids, values, strict=True), start=1)
            if token >= 0
        ]
        return TokenLogprobs(self._tokens[row], self._values[row], self._ranks[row], top)


def complaint(error: int, request: ScheduledRequest) -> str:
    """Return what is wrong with a request's logits, from the sampler's number of the error."""
    what = _COMPLAINTS[error]
    if error == NOTHING and request.banned_token_ids:
        return "only stop tokens can be sampled, but min_tokens is not reached: lower min_tokens"
    if error == NOTHING and (request.params.allowed_token_ids or request.params.bad_words):
        return "allowed_token_ids, bad_words and logit_bias leave no token to sample"
    return f"the model's logits contain {what}: weights or dtype may not fit the model"
