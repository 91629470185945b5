"""What a step returns besides tokens, if asked: log-probabilities of prompts, pooled states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from kiln.engine.requests.batch import Batch, SampledTokens
from kiln.engine.runner.prompt_logprobs import Head, report_prompts
from kiln.engine.runner.sampler import Logprobs, PendingSamples, complaint
from kiln.jit_kernels.ops.sampling.functions import Samples

_NOT_FINITE = (
    "the model's hidden states contain NaN or infinity: weights or dtype may not fit the model"
)


class Reports(NamedTuple):
    """Log-probabilities of prompt tokens, and sums of hidden states, for who wants them."""

    prompts: Samples | None
    hidden: torch.Tensor | None  # [requests that want them, hidden_size] float32


def reports_of(head: Head, hidden: torch.Tensor, batch: Batch) -> Reports:
    """Return what a step reports, from its hidden states [num_tokens, hidden_size]."""
    prompts = report_prompts(head, hidden, batch) if batch.reports_prompts else None
    return Reports(prompts, _sums(hidden, batch) if batch.reports_hidden else None)


def _sums(hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the sum of the hidden states of each request that wants it."""
    firsts = accumulate(batch.columns.num_tokens, initial=0)
    parts = [
        (first + part.offset, part.num_tokens)
        for part, first in zip(batch.columns.hidden, firsts, strict=False)
        if part is not None
    ]
    if all(count == 1 for _, count in parts):  # one operation for all
        rows = torch.tensor([first for first, _ in parts], device=hidden.device)
        return hidden.index_select(0, rows).float()
    sums = [hidden[first : first + count].sum(0, dtype=torch.float32) for first, count in parts]
    return torch.stack(sums)


class PendingReports:
    """Reports on the way to the host."""

    def __init__(self, reports: Reports, batch: Batch) -> None:
        self._batch, self._done = batch, None
        self._prompts = self._hidden = None
        if reports.prompts is not None:
            self._prompts = PendingSamples.copied(reports.prompts)
        if reports.hidden is not None:
            self._hidden = reports.hidden.to("cpu", non_blocking=True)
            if reports.hidden.is_cuda:
                self._done = torch.cuda.Event()
                self._done.record()

    def added_to(self, tokens: Sequence[SampledTokens]) -> tuple[SampledTokens, ...]:
        """Wait for the reports; return the tokens of the step with the reports added to them.

        An error of either is the request's error.
        """
        found = {one.request_id: one for one in tokens}
        for own in (*self._of_prompts(), *self._of_hidden()):
            name = own.pop("request_id")
            before = found.get(name, SampledTokens(name, []))
            if before.error is None:
                found[name] = before._replace(**own)
        return tuple(found.values())

    def _of_prompts(self) -> Iterator[dict[str, Any]]:
        if self._prompts is None:
            return
        host, row = self._prompts.wait_host(), 0
        errors, logprobs = host.errors.tolist(), Logprobs(host)
        for request in self._batch.requests:
            if request.prompt is None:
                continue
            mine = range(row, row + len(request.prompt.token_ids))
            row = mine.stop
            wrong = next((errors[one] for one in mine if errors[one]), 0)
            if wrong:
                error = complaint(wrong, request)
                yield {"request_id": request.request_id, "token_ids": [], "error": error}
                continue
            listed = [logprobs.at(one, request.params.prompt_logprobs or 0) for one in mine]
            yield {"request_id": request.request_id, "prompt_logprobs": listed}

    def _of_hidden(self) -> Iterator[dict[str, Any]]:
        if self._hidden is None:
            return
        if self._done is not None:
            self._done.synchronize()
        wanted = [one.request_id for one in self._batch.requests if one.hidden is not None]
        finite = self._hidden.isfinite().all(1).tolist()
        for request_id, summed, fine in zip(wanted, self._hidden, finite, strict=True):
            found = {"hidden": summed} if fine else {"token_ids": [], "error": _NOT_FINITE}
            yield {"request_id": request_id, **found}
