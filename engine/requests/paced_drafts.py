"""Drafts of the device in the steps where they are worth their time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from kiln.engine.requests.batch import Batch, SampledTokens
from kiln.engine.requests.drafts import NO_DRAFT, Draft
from kiln.engine.requests.request import Request

# Reading the weights takes about as long as computing this many tokens, by kind of device. On an
# H100 a 16-bit weight is read in the time of some 150 products, whatever the model.
FIXED_TOKENS: Mapping[str, int] = MappingProxyType({"cuda": 128, "cpu": 8})
FEW, PROMPTS = "few drafts are accepted", "prompts are computed"
_FALLS, _RISES = 0.2, 0.5  # the weight of a step in the mean, which forgets a bad time quickly
_SHORTEST_PAUSE, _LONGEST_PAUSE = 8, 256  # steps


class PacedDrafter:
    """Asks the device for ``num_tokens`` drafts of each row, where that pays.

    The time of a step is taken to grow as ``fixed_tokens`` plus its tokens. So drafts pay if the
    mean number of accepted ones in a row is above their share of that time. The mean is measured as
    long as they pay. After that one step tries them again after a pause, which doubles each time.
    The step before one with drafts makes them, so this is decided a step ahead.
    """

    def __init__(self, num_tokens: int, fixed_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.num_drafts = self.num_accepted = 0
        self.steps_without: Counter[str] = Counter()  # by reason
        self._fixed = fixed_tokens
        self._mean = float(num_tokens)
        self._pause = self._left = _SHORTEST_PAUSE
        self._is_on = False
        self.wanted = 0

    def begin(self, num_rows: int, *, with_prompts: bool) -> None:
        """Begin a step, and decide about the next one.

        Beside prompts there are no drafts, because such a step would fit in no graph.
        """
        self._is_on = self.wanted > 0 and not with_prompts
        if num_rows and not self._is_on:
            self.steps_without[PROMPTS if with_prompts else FEW] += 1
        pays = self._mean * (self._fixed + num_rows) > self.num_tokens * num_rows
        if pays:
            self._pause = self._left = _SHORTEST_PAUSE
        else:
            self._left -= 1
        is_trial = self._left < 0
        if is_trial:
            self._pause = self._left = min(2 * self._pause, _LONGEST_PAUSE)
        self.wanted = self.num_tokens if pays or is_trial else 0

    def propose(self, request: Request, most: int) -> Draft:
        """Return drafts of the device, if this step has any."""
        return Draft(min(most, self.num_tokens)) if self._is_on else NO_DRAFT

    def observe(self, batch: Batch, sampled: Mapping[str, SampledTokens]) -> None:
        """Count the drafts of a step, and update the mean of those that the device made."""
        rows = accepted = 0
        for row in batch.requests:
            tokens = sampled.get(row.request_id)
            if row.num_samples > 1 and tokens is not None and tokens.token_ids:
                found = row.num_samples - 1 if row.is_late else tokens.num_drafts
                self.num_drafts += found
                self.num_accepted += min(found, len(tokens.token_ids) - 1)
                rows += not row.is_late
                accepted += 0 if row.is_late else len(tokens.token_ids) - 1
        if rows:
            change = accepted / rows - self._mean
            self._mean += (_RISES if change > 0 else _FALLS) * change
