"""A launched step, until its tokens are there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kiln.engine.requests.batch import Batch
from kiln.engine.requests.late_masks import Bound


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launched step: what the runner returned, or the error that it raised.

    ``begun``: when its launch began, in seconds of ``time.monotonic``. The sampling of a late step
    is launched when it is ``bound`` to its masks.
    """

    batch: Batch
    begun: float
    launched: Any = None
    error: Exception | None = None
    bound: Bound | None = None
