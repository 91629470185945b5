"""Sampling when one of the rows raises: the others get their tokens, from the same logits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kiln.engine.errors import DeviceError
from kiln.engine.requests.batch import SampledTokens
from kiln.engine.requests.rerun import blame
from kiln.engine.runner.failures import explained
from kiln.engine.runner.reports import Reports
from kiln.engine.runner.sampler import ToSample
from kiln.jit_kernels.ops.sampling.functions import Samples

logger = logging.getLogger(__name__)


class Sampled(NamedTuple):
    """What a step found: samples, if any request samples, and reports, if any are wanted.

    ``failed``: the ends of requests whose sampling raised, by id.
    """

    samples: Samples | None
    failed: Mapping[str, SampledTokens] = {}
    reports: Reports | None = None


def sample_or_fail_alone(sample: Callable[[ToSample], Samples], rows: ToSample) -> Sampled:
    """Sample all rows at once; if that raises, one by one.

    A row that raises alone has token 0. Raises DeviceError if the device fails permanently.
    """
    requests, device = rows.requests, rows.logits.device
    try:
        with explained(device, f"sampling {len(requests)} tokens"):
            return Sampled(sample(rows))
    except DeviceError:
        raise
    except Exception as error:
        logger.warning("sampling %d tokens failed, trying one by one: %r", len(requests), error)
    width = max(request.params.logprobs or 0 for request in requests)
    together, failed = Samples.empty(len(requests), width, device), {}
    together.storage.zero_()
    for row, request in enumerate(requests):
        try:
            with explained(device, "sampling one token"):
                alone = sample(rows.only(row))
        except DeviceError:
            raise
        except Exception as error:
            logger.exception("sampling for request %r failed", request.request_id)
            failed[request.request_id] = blame(request, error)
            continue
        for name, values in alone.outputs().items():
            getattr(together, name)[row : row + 1][..., : values.shape[-1]] = values
    return Sampled(together, failed)
