"""What a step returns besides tokens, if asked: log-probabilities of prompts, hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from kiln.engine.requests.batch import Batch, SampledTokens
from kiln.engine.runner.prompt_logprobs import Head, report_prompts
from kiln.engine.runner.sampler import Logprobs, PendingSamples, complaint
from kiln.jit_kernels.ops.sampling.functions import Samples


class Reports(NamedTuple):
    """Log-probabilities of prompt tokens and hidden states, of all requests that want them."""

    prompts: Samples | None
    hidden: torch.Tensor | None  # [rows, hidden_size]


def reports_of(head: Head, hidden: torch.Tensor, batch: Batch) -> Reports:
    """Return what a step reports, from its hidden states [num_tokens, hidden_size]."""
    prompts = report_prompts(head, hidden, batch) if batch.reports_prompts else None
    if not batch.reports_hidden:
        return Reports(prompts, None)
    firsts = accumulate(batch.columns.num_tokens, initial=0)
    rows = [
        first + request.hidden.offset + place
        for request, first in zip(batch.requests, firsts, strict=False)
        if request.hidden is not None
        for place in range(request.hidden.num_tokens)
    ]
    chosen = torch.tensor(rows, device=hidden.device)
    return Reports(prompts, hidden.index_select(0, chosen).float())


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
        wanted = [one for one in self._batch.requests if one.hidden is not None]
        sizes = [one.hidden.num_tokens for one in wanted if one.hidden is not None]
        for request, part in zip(wanted, self._hidden.split(sizes), strict=True):
            yield {"request_id": request.request_id, "hidden": part}
