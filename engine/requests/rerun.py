"""Run the requests of a failed step again, to find those that make it fail.

A row can run again: it writes the same keys and values to the same slots, and its sampled token
depends only on its seed and position.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kiln.engine.errors import DeviceError, KilnError
from kiln.engine.requests.batch import Batch, SampledTokens, ScheduledRequest, StepOutput

logger = logging.getLogger(__name__)

Rows = tuple[ScheduledRequest, ...]
Run = Callable[[Batch], StepOutput]


def blame(row: ScheduledRequest, error: Exception) -> SampledTokens:
    """Return the end of a request that makes a step of it alone raise."""
    what = str(error) if isinstance(error, KilnError) else f"{type(error).__name__}: {error}"
    message = f"request {row.request_id!r} failed; the engine continues: {what}"
    return SampledTokens(row.request_id, [], error=message)


def failed_alone(rows: Rows, error: Exception) -> tuple[SampledTokens, ...]:
    """Return the end of a row that failed alone; nothing if there are several rows, or none."""
    if len(rows) == 1:
        logger.error("request %r failed and ends", rows[0].request_id, exc_info=error)
        return (blame(rows[0], error),)
    if rows:
        logger.warning("a step of %d requests failed, halving it: %r", len(rows), error)
    return ()


def run_halves(run: Run, rows: Rows) -> tuple[SampledTokens, ...]:
    """Run the two halves of a step that failed, and return their tokens or errors.

    Raises DeviceError if the device fails permanently.
    """
    middle = len(rows) // 2
    return tuple(
        token for half in (rows[:middle], rows[middle:]) if half for token in run_part(run, half)
    )


def run_part(run: Run, rows: Rows) -> tuple[SampledTokens, ...]:
    """Run a part of a step that failed; if it raises too, halve it further.

    Raises DeviceError if the device fails permanently.
    """
    try:
        return run(Batch(rows)).tokens
    except DeviceError:
        raise
    except Exception as error:
        failed = failed_alone(rows, error)
    # Outside the handler: the error keeps the memory of the failed step alive.
    return failed or run_halves(run, rows)
