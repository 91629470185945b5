"""Prometheus metrics: the engine's counts, and the latencies that clients observe.

Each metric has Kiln's name, and vLLM's beside it where vLLM has one of the same meaning. All have
the label ``model_name``, the first served name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics import exposition
from prometheus_client.registry import Collector

_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_WAIT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKEN_BUCKETS = tuple(base * 10**power for power in range(6) for base in (1, 2, 5))


class Row(NamedTuple):
    """A metric of an engine count: its type, name, help, and label if the count is a map."""

    kind: Literal["gauge", "counter"]
    name: str
    text: str
    label: str | None = None


ENGINE_ROWS: Mapping[str, Row] = MappingProxyType(
    {
        "running": Row("gauge", "num_requests_running", "Running requests."),
        "waiting": Row("gauge", "num_requests_waiting", "Requests in the queue."),
        "kv_blocks_used": Row("gauge", "kv_blocks_used", "Allocated KV blocks."),
        "kv_blocks_total": Row("gauge", "kv_blocks_total", "Blocks of the KV pool."),
        "preemptions": Row("counter", "num_preemptions", "Preemptions."),
        "steps": Row("counter", "num_steps", "Steps."),
        "steps_not_ahead": Row(
            "counter", "num_steps_not_ahead", "Steps that waited for the tokens of the last one."
        ),
        "graphs": Row("gauge", "num_graphs", "Captured CUDA graphs."),
        "graph_bytes": Row("gauge", "graph_bytes", "Device memory of the CUDA graphs."),
        "graph_capture_seconds": Row(
            "gauge", "graph_capture_seconds", "Time to capture the CUDA graphs."
        ),
        "graph_replays": Row(
            "counter", "graph_replays", "Steps replayed from a CUDA graph.", "size"
        ),
        "graph_fallbacks": Row(
            "counter", "graph_fallbacks", "Steps without a CUDA graph.", "reason"
        ),
        "all_reduces": Row(
            "counter", "all_reduces", "Sums over the ranks of tensor parallelism.", "algorithm"
        ),
        "adapter_evictions": Row(
            "counter", "num_lora_evictions", "LoRA adapters evicted from the device."
        ),
        "adapter_running": Row(
            "gauge", "lora_requests_running", "Running requests of an adapter.", "adapter"
        ),
        "adapter_waiting": Row(
            "gauge", "lora_requests_waiting", "Requests of an adapter in the queue.", "adapter"
        ),
        "adapter_on_device": Row("gauge", "lora_on_device", "1 if in the adapter pool.", "adapter"),
        "adapter_placements": Row(
            "counter", "lora_placements", "Copies of an adapter to the device.", "adapter"
        ),
        "adapter_tokens": Row(
            "counter", "lora_generation_tokens", "Tokens generated with an adapter.", "adapter"
        ),
    }
)
# Kiln's name -> vLLM's names of the same.
VLLM_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "num_requests_running": ("num_requests_running",),
        "num_requests_waiting": ("num_requests_waiting",),
        "kv_cache_usage_perc": ("kv_cache_usage_perc",),
        "num_preemptions": ("num_preemptions",),
        "prompt_tokens": ("prompt_tokens",),
        "generation_tokens": ("generation_tokens",),
        "request_success": ("request_success",),
        "request_prompt_tokens": ("request_prompt_tokens",),
        "request_generation_tokens": ("request_generation_tokens",),
        "request_queue_time_seconds": ("request_queue_time_seconds",),
        "time_to_first_token_seconds": ("time_to_first_token_seconds",),
        "inter_token_latency_seconds": (
            "inter_token_latency_seconds",
            "time_per_output_token_seconds",  # its older name
        ),
        "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
    }
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
        self._own.register(_EngineCounts(engine_stats, is_ready))
        self.registry = CollectorRegistry()
        self.registry.register(_Named(self._own, model_name))
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of served requests.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
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
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of an output.", _STEP_BUCKETS
        )
        self.e2e_request_latency = self._histogram(
            "e2e_request_latency_seconds", "From the request to its last token.", _WAIT_BUCKETS
        )

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics and their content type: OpenMetrics if accepted, else plain text."""
        if "application/openmetrics-text" not in accept:
            return generate_latest(self.registry), "text/plain; version=0.0.4; charset=utf-8"
        # The default escaping would write kiln_x for kiln:x, although both formats allow colons.
        text = exposition.generate_latest(self.registry, escaping=exposition.ALLOWUTF8)
        return text, "application/openmetrics-text; version=1.0.0; charset=utf-8"

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kiln:{name}", text, labels, registry=self._own)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"kiln:{name}", text, buckets=buckets, registry=self._own)


class _Named(Collector):
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


class _EngineCounts(Collector):
    """Reads the engine's latest counts at each scrape."""

    def __init__(
        self, engine_stats: Callable[[], Mapping[str, Any]], is_ready: Callable[[], bool]
    ) -> None:
        self._engine_stats = engine_stats
        self._is_ready = is_ready

    def collect(self) -> Iterator[Metric]:
        """Yield a metric for each count that the engine has reported."""
        yield GaugeMetricFamily("kiln:engine_ready", "1 if ready to serve.", self._is_ready())
        stats = self._engine_stats()
        if stats.get("kv_blocks_total"):
            used = stats["kv_blocks_used"] / stats["kv_blocks_total"]
            yield GaugeMetricFamily(
                "kiln:kv_cache_usage_perc", "Allocated KV blocks; 1: all.", used
            )
        for count, row in ENGINE_ROWS.items():
            family = GaugeMetricFamily if row.kind == "gauge" else CounterMetricFamily
            if row.label is not None:
                metric = family(f"kiln:{row.name}", row.text, labels=[row.label])
                for value, number in stats.get(count, {}).items():
                    metric.add_metric([value], number)
                yield metric
            elif count in stats:
                yield family(f"kiln:{row.name}", row.text, stats[count])
