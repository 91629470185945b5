"""What the host knows of each of the last steps: when, how long, of what, and in which graph."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Literal, NamedTuple

from kiln.engine.requests.batch import Batch, StepOutput

MOST_STEPS = 2000  # that are kept

StepKind = Literal["decode", "prefill", "mixed"]


class StepRecord(NamedTuple):
    """A step as the host saw it. Times are in seconds, of ``time.monotonic``.

    The step behind may be launched before this one ends. So ``seconds`` of two steps overlap, and
    the device has nothing to do only where no step is in flight.
    """

    number: int  # from 1 on
    begun: float  # when its launch began
    seconds: float  # from then until its tokens were in host memory
    waited: float  # the part of them at the end in which the host only waited for the device
    kind: StepKind  # decode: the last token of each request, and drafts; prefill: parts of prompts
    requests: int
    tokens: int  # that were computed, drafts included
    drafts: int  # that were verified
    generated: int  # tokens that requests got
    graph: str  # the size of the CUDA graph that ran it; "": none did
    why_eager: str  # the reason why none did; "": one did


# Like StepRecord(*values), in a third of the time.
_new_record = partial(tuple.__new__, StepRecord)


class StepLog:
    """The records of the last steps that nobody has taken yet; the oldest are dropped."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=MOST_STEPS)

    def add(
        self,
        number: int,
        batch: Batch,
        output: StepOutput,
        generated: int,
        times: tuple[float, float, float],
    ) -> None:
        """Record a step. ``times``: its launch began, the host waited for it, its tokens came."""
        begun, asked, done = times
        rows, tokens = len(batch.requests), batch.num_tokens
        kind: StepKind = "decode"
        drafts = tokens - rows
        if not batch.row_tokens:
            of = batch.columns
            pairs = zip(of.num_tokens, of.num_samples, strict=True)
            kind = "mixed" if any(one == samples for one, samples in pairs) else "prefill"
            drafts = sum(max(samples - 1, 0) for samples in of.num_samples)
        self._records.append(
            _new_record(
                (
                    *(number, begun, done - begun, done - asked),
                    *(kind, rows, tokens, drafts, generated),
                    *output[1:],
                )
            )
        )

    def take(self) -> list[StepRecord]:
        """Return the records that were not taken yet, oldest first."""
        records = list(self._records)
        self._records.clear()
        return records
