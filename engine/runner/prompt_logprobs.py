"""Log-probabilities of prompt tokens, from the hidden states of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from kiln.engine.models.family import Model
from kiln.engine.requests.batch import Batch, SampledTokens
from kiln.engine.runner.sampler import Logprobs, PendingSamples, complaint
from kiln.jit_kernels.ops.sampling.functions import Samples, sample_tokens

_BYTES = 64 << 20  # of logits at once: no more than the largest step samples from
_GREEDY = (0.0, 1.0, -math.inf, 1.0, 0.0, 0.0)  # see sample_tokens


def report_prompts(model: Model, hidden: torch.Tensor, batch: Batch) -> Samples:
    """Return the sampler's report for each prompt token whose log-probability is wanted.

    hidden: [num_tokens, hidden_size]. The rows of the result are the reported tokens of all
    requests of the batch, in order. The sampler reports the log-probability of the token that it
    draws, so each row has a mask that allows only its prompt token.
    """
    rows: list[int] = []
    targets: list[int] = []
    width = 0
    firsts = accumulate(batch.columns.num_tokens, initial=0)
    for request, first in zip(batch.requests, firsts, strict=False):
        if request.prompt is not None:
            begin = first + request.prompt.offset
            rows += range(begin, begin + len(request.prompt.token_ids))
            targets += request.prompt.token_ids
            width = max(width, request.params.prompt_logprobs or 0)
    device = hidden.device
    index, wanted = torch.tensor([rows, targets], device=device)
    together = Samples.empty(len(rows), width, device)
    done, step = 0, 1  # then as many as fit
    while done < len(rows):
        logits = model.logits(hidden.index_select(0, index[done : done + step]))
        count, vocab = logits.shape
        token = wanted[done : done + count]
        mask = torch.zeros(count, -(-vocab // 32), dtype=torch.int32, device=device)
        bits = torch.ones_like(token, dtype=torch.int32) << (token % 32).int()
        mask.scatter_(1, (token // 32).unsqueeze(1), bits.unsqueeze(1))
        settings = torch.tensor([_GREEDY], device=device).expand(count, -1).contiguous()
        keys = torch.tensor([[0, 0, 0, width]], device=device).expand(count, -1).contiguous()
        part = sample_tokens(logits, settings, keys, mask, width=width)
        for name, values in part.outputs().items():
            getattr(together, name)[done : done + count] = values
        done += count
        step = max(1, _BYTES // (logits.itemsize * vocab))
    return together


class PendingPrompts:
    """Reports of prompts on the way to the host."""

    def __init__(self, samples: Samples, batch: Batch) -> None:
        self._reports = PendingSamples.copied(samples)
        self._requests = [one for one in batch.requests if one.prompt is not None]

    def added_to(self, tokens: Sequence[SampledTokens]) -> tuple[SampledTokens, ...]:
        """Wait for the reports; return the tokens of the step with the reports added to them."""
        host = self._reports.wait_host()
        errors, logprobs = host.errors.tolist(), Logprobs(host)
        reports: dict[str, SampledTokens] = {}
        row = 0
        for request in self._requests:
            assert request.prompt is not None
            mine = range(row, row + len(request.prompt.token_ids))
            row = mine.stop
            wrong = next((errors[one] for one in mine if errors[one]), 0)
            if wrong:
                error = complaint(wrong, request)
                reports[request.request_id] = SampledTokens(request.request_id, [], error=error)
                continue
            listed = [logprobs.at(one, request.params.prompt_logprobs or 0) for one in mine]
            reports[request.request_id] = SampledTokens(
                request.request_id, [], prompt_logprobs=listed
            )
        return _joined(tokens, reports)


def _joined(
    tokens: Sequence[SampledTokens], reports: Mapping[str, SampledTokens]
) -> tuple[SampledTokens, ...]:
    """Return one entry for each request in tokens or reports; an error in either is its error."""
    rest = dict(reports)
    joined = []
    for one in tokens:
        report = rest.pop(one.request_id, None)
        if report is None or one.error is not None:
            joined.append(one)
        elif report.error is not None:
            joined.append(report)
        else:
            joined.append(one._replace(prompt_logprobs=report.prompt_logprobs))
    return (*joined, *rest.values())
