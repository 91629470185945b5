"""Sampling when one of the rows raises: the others get their tokens, from the same logits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from kiln.engine.errors import DeviceError
from kiln.engine.requests.batch import SampledTokens, ScheduledRequest
from kiln.engine.runner.failures import explained
from kiln.engine.runner.rerun import blame
from kiln.jit_kernels.ops.sampling.functions import Samples

logger = logging.getLogger(__name__)

Sample = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Sequence[ScheduledRequest]], Samples
]  # see ``sample``


class Sampled(NamedTuple):
    """What a step found: samples, if any request samples, and reports of prompts, if wanted.

    ``failed``: the ends of requests whose sampling raised, by id.
    """

    samples: Samples | None
    failed: Mapping[str, SampledTokens] = {}
    prompts: Samples | None = None


def sample_or_fail_alone(
    sample: Sample,
    logits: torch.Tensor,
    settings: torch.Tensor,
    keys: torch.Tensor,
    lengths: torch.Tensor,
    requests: Sequence[ScheduledRequest],
) -> Sampled:
    """Sample all rows at once; if that raises, one by one. The arguments are those of ``sample``.

    A row that raises alone has token 0. Raises DeviceError if the device fails permanently.
    """
    try:
        with explained(logits.device, f"sampling {len(requests)} tokens"):
            return Sampled(sample(logits, settings, keys, lengths, requests))
    except DeviceError:
        raise
    except Exception as error:
        logger.warning("sampling %d tokens failed, trying one by one: %r", len(requests), error)
    width = max(request.params.logprobs or 0 for request in requests)
    together, failed = Samples.empty(len(requests), width, logits.device), {}
    together.storage.zero_()
    for row, request in enumerate(requests):
        own = slice(row, row + 1)
        try:
            with explained(logits.device, "sampling one token"):
                alone = sample(logits[own], settings[own], keys[own], lengths[own], [request])
        except DeviceError:
            raise
        except Exception as error:
            logger.exception("sampling for request %r failed", request.request_id)
            failed[request.request_id] = blame(request, error)
            continue
        for name, values in alone.outputs().items():
            getattr(together, name)[own][..., : values.shape[-1]] = values
    return Sampled(together, failed)
