"""Sample one token per request, depending only on its seed, position and logits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from kiln.engine.requests.batch import SampledTokens, ScheduledRequest
from kiln.engine.requests.late_masks import Mask
from kiln.engine.requests.request import TokenLogprobs
from kiln.engine.requests.sampling_params import MAX_LOGPROBS
from kiln.engine.runner.edits import edits_of
from kiln.engine.runner.masks import Masks
from kiln.jit_kernels.ops.sampling.functions import Samples, sample_tokens
from kiln.jit_kernels.ops.sampling.reference import INFINITE, NAN, NOTHING

# Like SampledTokens(*values), in a third of the time.
_plain = partial(tuple.__new__, SampledTokens)
_COMPLAINTS = {NAN: "NaN", INFINITE: "+inf", NOTHING: "no finite logit left"}


class ToSample(NamedTuple):
    """Rows of logits, and for each row what its token depends on.

    logits: [rows, vocab_size]; settings: [rows, 6] and keys: [rows, 4], as of ``sample_tokens``;
    lengths: [rows] int64, how many tokens the request has before the one that is sampled. requests:
    the request of each row. late: the late mask of each row, see ``late_masks``; None: no mask.
    """

    logits: torch.Tensor
    settings: torch.Tensor
    keys: torch.Tensor
    lengths: torch.Tensor
    requests: Sequence[ScheduledRequest]
    late: Sequence[Mask | None]

    def only(self, row: int) -> ToSample:
        """Return one of the rows."""
        own: Any = (part[row : row + 1] for part in self)
        return ToSample(*own)


def sample(rows: ToSample, masks: Masks) -> Samples:
    """Sample a token for each row.

    Temperature 0 takes the most likely token, on ties the lowest id. A row with NaN, with +inf or
    without a finite logit gets an error and does not affect other rows.
    """
    requests = rows.requests
    width = max((request.params.logprobs or 0 for request in requests), default=0)
    mask = masks.of(requests, rows.lengths, rows.logits.shape[1], rows.late)
    edits = edits_of(requests, rows.lengths, masks.history)
    return sample_tokens(rows.logits, rows.settings, rows.keys, mask, edits, width)


class HostCopies:
    """Copies of results in pinned memory: two that take turns, so that one may still be in use."""

    def __init__(self, max_samples: int, max_requests: int, device: torch.device) -> None:
        self._device = device
        self._turn = 0
        if device.type == "cuda":
            size = max_samples * Samples.size_of(1, MAX_LOGPROBS)
            self._memory = torch.empty(2, size, dtype=torch.int32, pin_memory=True)
            self._counts = torch.empty(2, 2, max_requests, dtype=torch.int32, pin_memory=True)

    def begin(self, samples: Samples, counts: torch.Tensor | None = None) -> PendingSamples:
        """Start to copy results to the host.

        ``counts`` [2, max_requests] int32: how many drafts of each row were found, and how many it
        rejects; None if the step has no drafts.
        """
        if self._device.type == "cpu":  # the step behind may overwrite them before they are read
            own = Samples(samples.storage.clone(), len(samples.tokens))
            return PendingSamples(own, None, None if counts is None else counts.clone())
        self._turn = 1 - self._turn
        host = self._memory[self._turn, : samples.storage.numel()]
        host.copy_(samples.storage, non_blocking=True)
        if counts is not None:
            counts = self._counts[self._turn].copy_(counts, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return PendingSamples(Samples(host, len(samples.tokens)), done, counts)


class PendingSamples:
    """Results on the way to the host."""

    def __init__(
        self, host: Samples, done: torch.cuda.Event | None, counts: torch.Tensor | None = None
    ) -> None:
        self._host, self._done, self._counts = host, done, counts

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
        """Wait for the results of the requests that sampled, and return them.

        A request with drafts has the tokens up to the first sample that is not the next draft.
        """
        self.wait_host()
        tokens, errors = self._host.tokens.tolist(), self._host.errors.tolist()
        reported = any(request.params.logprobs is not None for request in requests)
        if self._counts is None and not any(errors) and not reported:
            rows = zip(requests, tokens, strict=False)  # a graph has rows of padding
            rest = (None, None, None, None, 0)
            return tuple([_plain((row.request_id, [token], *rest)) for row, token in rows])
        logprobs = Logprobs(self._host)
        drafted, rejected = ((), ()) if self._counts is None else self._counts.tolist()
        results, first = [], 0
        for request in requests:
            count = request.num_samples
            own, found = range(first, first + count), 0
            if count > 1:
                own = own[: count - rejected[request.row]]
                found = min(drafted[request.row], count - 1)
            first += count
            wrong = next((errors[one] for one in own if errors[one]), 0)
            if wrong:
                error = complaint(wrong, request)
                results.append(SampledTokens(request.request_id, [], error=error))
                continue
            wanted, listed = request.params.logprobs, None
            if wanted is not None:
                listed = [logprobs.at(one, wanted) for one in own]
            own_tokens = [tokens[one] for one in own]
            results.append(SampledTokens(request.request_id, own_tokens, listed, num_drafts=found))
        return tuple(results)


class Logprobs:
    """The log-probabilities of a step, converted to lists once for all rows."""

    def __init__(self, host: Samples) -> None:
        self._tokens = host.tokens.tolist()
        self._values, self._ranks = host.logprobs.tolist(), host.ranks.tolist()
        self._top = host.top_tokens.tolist(), host.top_logprobs.tolist()

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
    if error == NOTHING and request.is_late:
        return (
            "the grammar of structured_outputs and settings such as logit_bias leave no token "
            "to sample"
        )
    if error == NOTHING and (request.params.allowed_token_ids or request.params.bad_words):
        return "allowed_token_ids, bad_words and logit_bias leave no token to sample"
    return f"the model's logits contain {what}: weights or dtype may not fit the model"
