"""Prometheus metrics: the engine's counts, and the latencies that clients observe.

Each metric has Kiln's name, and vLLM's beside it where vLLM has one of the same meaning. All have
the label ``model_name``, the first served name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition
from prometheus_client.registry import Collector

from kiln.engine.server.engine_counts import EngineCounts
from kiln.engine.server.token_metrics import TokenMetrics

_WAIT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKEN_BUCKETS = tuple(base * 10**power for power in range(6) for base in (1, 2, 5))
_SHARED = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions"),
    *("prompt_tokens", "generation_tokens", "request_success"),
    *("prefix_cache_queries", "prefix_cache_hits"),
    *("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
    *("request_prompt_tokens", "request_generation_tokens", "request_queue_time_seconds"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
)
_OLDER = {"inter_token_latency_seconds": ("time_per_output_token_seconds",)}
# Kiln's name -> vLLM's names of the same.
VLLM_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {name: (name, *_OLDER.get(name, ())) for name in _SHARED}
)


class Metrics:
    """The metrics of one server, in their own registry."""

    def __init__(
        self,
        engine_stats: Callable[[], Mapping[str, Any]],
        is_ready: Callable[[], bool],
        model_name: str,
    ) -> None:
        self._own = CollectorRegistry()
        self._own.register(EngineCounts(engine_stats, is_ready))
        self.registry = CollectorRegistry()
        self.registry.register(NamedMetrics(self._own, model_name))
        self.tokens = TokenMetrics()
        self._own.register(self.tokens)
        self.request_success = self._counter(
            "request_success", "Completed outputs.", "finished_reason"
        )
        self.requests_refused = self._counter(
            "requests_refused", "HTTP requests that ended with an error, by its status.", "status"
        )
        self.requests_aborted = self._counter(
            "requests_aborted", "HTTP requests whose client left before the end."
        )
        self.prompt_length = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", _TOKEN_BUCKETS
        )
        self.output_length = self._histogram(
            "request_generation_tokens", "Tokens of a completed output.", _TOKEN_BUCKETS
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds",
            "From arrival in the engine to the first step.",
            _WAIT_BUCKETS,
        )
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From the request to its first token.", _WAIT_BUCKETS
        )
        self.e2e_request_latency = self._histogram(
            "e2e_request_latency_seconds", "From the request to its last token.", _WAIT_BUCKETS
        )

    def collect(self) -> Iterable[Metric]:
        """Return each metric once, under Kiln's name."""
        return self._own.collect()

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics and their content type: OpenMetrics if accepted, else plain text."""
        if "application/openmetrics-text" not in accept:
            return generate_latest(self.registry), "text/plain; version=0.0.4; charset=utf-8"
        # The default escaping would write kiln_x for kiln:x, although both formats allow colons.
        encode: Callable[..., bytes] = exposition.generate_latest
        text = encode(self.registry, escaping=exposition.ALLOWUTF8)
        return text, "application/openmetrics-text; version=1.0.0; charset=utf-8"

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kiln:{name}", text, labels, registry=self._own)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"kiln:{name}", text, buckets=buckets, registry=self._own)


class NamedMetrics(Collector):
    """The metrics of a registry with the model's name, under Kiln's names and vLLM's."""

    def __init__(self, own: CollectorRegistry, model_name: str) -> None:
        self._own = own
        self._labels = {"model_name": model_name}

    def collect(self) -> Iterator[Metric]:
        """Yield each metric of the registry once for each of its names."""
        for metric in self._own.collect():
            yield self._renamed(metric, metric.name)
            for name in VLLM_NAMES.get(metric.name.removeprefix("kiln:"), ()):
                yield self._renamed(metric, f"vllm:{name}")

    def _renamed(self, metric: Metric, name: str) -> Metric:
        copy = Metric(name, metric.documentation, metric.type)
        for sample in metric.samples:
            ending = sample.name.removeprefix(metric.name)  # such as _total and _bucket
            labels = {**self._labels, **sample.labels}
            copy.samples.append(sample._replace(name=name + ending, labels=labels))
        return copy
