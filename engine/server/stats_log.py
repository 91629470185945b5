"""A line in the log each ten seconds while requests run, with the words of vLLM's."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kiln.engine.server.token_metrics import TokenMetrics

STATS_SECONDS = 10.0

logger = logging.getLogger(__name__)


class _Counts(NamedTuple):
    """Tokens that were counted since the start."""

    prompt: float = 0.0
    generated: float = 0.0
    queries: float = 0.0
    hits: float = 0.0
    drafts: float = 0.0
    accepted: float = 0.0

    def since(self, before: _Counts) -> _Counts:
        """Return what was added. A count that fell belongs to a new engine, which began at 0."""
        pairs = zip(self, before, strict=True)
        return _Counts(*(now if now < then else now - then for now, then in pairs))


class StatsLog:
    """Logs throughput, requests, KV pool and hit rates, whenever it is told to ``look``."""

    def __init__(
        self,
        tokens: TokenMetrics,
        engine_stats: Callable[[], Mapping[str, Any]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokens = tokens
        self._engine_stats = engine_stats
        self._clock = clock
        self._last, self._last_time = _Counts(), clock()
        self._hit_rate = 0.0  # of the newest prompts
        self._has_told = True  # that no request runs

    def look(self) -> None:
        """Log what happened since the last call, unless nothing did.

        The line after the end of the last request says that none runs.
        """
        stats, now = self._engine_stats(), self._clock()
        counts = _Counts(
            self._tokens.prompt,
            self._tokens.generated,
            stats.get("prefix_cache_queries", 0),
            stats.get("prefix_cache_hits", 0),
            stats.get("spec_decode_num_draft_tokens", 0),
            stats.get("spec_decode_num_accepted_tokens", 0),
        )
        added, seconds = counts.since(self._last), max(now - self._last_time, 1e-9)
        self._last, self._last_time = counts, now
        if added.queries:
            self._hit_rate = added.hits / added.queries
        runs = bool(stats.get("running", 0) or stats.get("waiting", 0))
        if runs or added.prompt or added.generated or not self._has_told:
            self._log(added, seconds, stats)
        self._has_told = not runs

    def _log(self, added: _Counts, seconds: float, stats: Mapping[str, Any]) -> None:
        used = stats.get("kv_blocks_used", 0) / max(1, stats.get("kv_blocks_total", 0))
        fields = {
            "prompt_tokens_per_second": round(added.prompt / seconds, 1),
            "generation_tokens_per_second": round(added.generated / seconds, 1),
            "running": int(stats.get("running", 0)),
            "waiting": int(stats.get("waiting", 0)),
            "kv_cache_usage": round(used, 4),
            "prefix_cache_hit_rate": round(self._hit_rate, 4),
        }
        text = (
            f"Avg prompt throughput: {fields['prompt_tokens_per_second']} tokens/s, "
            f"Avg generation throughput: {fields['generation_tokens_per_second']} tokens/s, "
            f"Running: {fields['running']} reqs, Waiting: {fields['waiting']} reqs, "
            f"GPU KV cache usage: {used:.1%}, Prefix cache hit rate: {self._hit_rate:.1%}"
        )
        if added.drafts:
            rate = added.accepted / added.drafts
            fields["draft_acceptance_rate"] = round(rate, 4)
            text += f", Draft acceptance rate: {rate:.1%}"
        logger.info("%s", text, extra={"fields": fields})
