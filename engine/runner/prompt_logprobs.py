"""Log-probabilities of prompt tokens, from the hidden states of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from kiln.engine.requests.batch import Batch
from kiln.jit_kernels.ops.sampling.functions import Samples, sample_tokens

_BYTES = 64 << 20  # of logits at once: no more than the largest step samples from
Head = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
"""(hidden states [rows, hidden_size], their adapter slots) -> logits [rows, vocab_size]"""
_GREEDY = (0.0, 1.0, -math.inf, 1.0, 0.0, 0.0)  # see sample_tokens


def report_prompts(head: Head, hidden: torch.Tensor, batch: Batch) -> Samples:
    """Return the sampler's report for each prompt token whose log-probability is wanted.

    hidden: [num_tokens, hidden_size]. ``head``: the logits of some of them, whose requests have the
    given LoRA adapters. The rows of the result are the reported tokens of all
    requests of the batch, in order. The sampler reports the log-probability of the token that it
    draws, so each row has a mask that allows only its prompt token.
    """
    rows: list[int] = []
    targets: list[int] = []
    slots: list[int] = []
    width = 0
    firsts = accumulate(batch.columns.num_tokens, initial=0)
    for request, first in zip(batch.requests, firsts, strict=False):
        if request.prompt is not None:
            begin = first + request.prompt.offset
            rows += range(begin, begin + len(request.prompt.token_ids))
            targets += request.prompt.token_ids
            slots += [request.adapter_slot] * len(request.prompt.token_ids)
            width = max(width, request.params.prompt_logprobs or 0)
    device = hidden.device
    index, wanted = torch.tensor([rows, targets], device=device)
    together = Samples.empty(len(rows), width, device)
    done, step = 0, 1  # then as many as fit
    while done < len(rows):
        chosen = slice(done, done + step)
        logits = head(hidden.index_select(0, index[chosen]), slots[chosen])
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
