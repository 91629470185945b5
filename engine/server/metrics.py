"""What Prometheus scrapes: the engine's counts as they are, and the latencies that clients see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_WAIT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_GAUGES = {  # the engine's count -> the metric and its help
    "running": ("num_requests_running", "Requests that compute in each step."),
    "waiting": ("num_requests_waiting", "Requests that wait for room."),
    "kv_blocks_used": ("kv_blocks_used", "Blocks of the KV pool that hold tokens."),
    "kv_blocks_total": ("kv_blocks_total", "Blocks of the KV pool."),
    "preemptions": ("num_preemptions", "Times that a request gave up its blocks, since start."),
    "steps": ("num_steps", "Steps that the engine has run, since start."),
}


class Metrics:
    """The counters of one server, in a registry of their own."""

    def __init__(
        self, engine_stats: Callable[[], Mapping[str, float]], is_ready: Callable[[], bool]
    ) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineGauges(engine_stats, is_ready))
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of answered requests.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.request_success = Counter(
            "kiln:request_success",
            "Answers given in full.",
            ["finished_reason"],
            registry=self.registry,
        )
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From the request to its first token.", _WAIT_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of an answer.", _STEP_BUCKETS
        )
        self.e2e_request_latency = self._histogram(
            "e2e_request_latency_seconds", "From the request to its last token.", _WAIT_BUCKETS
        )

    def render(self) -> bytes:
        """Return everything in Prometheus's text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"kiln:{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"kiln:{name}", text, buckets=buckets, registry=self.registry)


class _EngineGauges(Collector):
    """Reads the engine's latest counts at each scrape."""

    def __init__(
        self, engine_stats: Callable[[], Mapping[str, float]], is_ready: Callable[[], bool]
    ) -> None:
        self._engine_stats = engine_stats
        self._is_ready = is_ready

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield one gauge for each count that the engine has told."""
        yield GaugeMetricFamily("kiln:engine_ready", "1 if requests are served.", self._is_ready())
        stats = self._engine_stats()
        for count, (name, text) in _GAUGES.items():
            if count in stats:
                yield GaugeMetricFamily(f"kiln:{name}", text, stats[count])
