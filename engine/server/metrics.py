"""Prometheus metrics: the engine's counts, and the latencies that clients observe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_WAIT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_GAUGES = {  # engine count -> (metric, help)
    "running": ("num_requests_running", "Running requests."),
    "waiting": ("num_requests_waiting", "Requests in the queue."),
    "kv_blocks_used": ("kv_blocks_used", "Allocated KV blocks."),
    "kv_blocks_total": ("kv_blocks_total", "Blocks of the KV pool."),
    "preemptions": ("num_preemptions", "Preemptions since the start."),
    "steps": ("num_steps", "Steps since the start."),
    "graphs": ("num_graphs", "Captured CUDA graphs."),
    "graph_bytes": ("graph_bytes", "Device memory of the CUDA graphs."),
    "graph_capture_seconds": ("graph_capture_seconds", "Time to capture the CUDA graphs."),
    "adapter_evictions": ("num_lora_evictions", "LoRA adapters evicted from the device."),
    "steps_not_ahead": ("num_steps_not_ahead", "Steps that waited for the tokens of the last one."),
}
_BY_LABEL = {  # engine count -> (metric, label, help)
    "graph_replays": ("graph_replays", "size", "Steps replayed from a CUDA graph."),
    "adapter_running": ("lora_requests_running", "adapter", "Running requests of an adapter."),
    "adapter_waiting": ("lora_requests_waiting", "adapter", "Its requests in the queue."),
    "adapter_on_device": ("lora_on_device", "adapter", "1 if it is in the adapter pool."),
    "adapter_placements": ("lora_placements", "adapter", "Its copies to the device."),
    "adapter_tokens": ("lora_generation_tokens", "adapter", "Tokens generated with it."),
    "all_reduces": ("all_reduces", "algorithm", "Sums over the ranks of tensor parallelism."),
    "graph_fallbacks": ("graph_fallbacks", "reason", "Steps without a CUDA graph."),
}


class Metrics:
    """The metrics of one server, in their own registry."""

    def __init__(
        self, engine_stats: Callable[[], Mapping[str, Any]], is_ready: Callable[[], bool]
    ) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineGauges(engine_stats, is_ready))
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of served requests.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.request_success = Counter(
            "kiln:request_success",
            "Completed outputs.",
            ["finished_reason"],
            registry=self.registry,
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

    def render(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"kiln:{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"kiln:{name}", text, buckets=buckets, registry=self.registry)


class _EngineGauges(Collector):
    """Reads the engine's latest counts at each scrape."""

    def __init__(
        self, engine_stats: Callable[[], Mapping[str, Any]], is_ready: Callable[[], bool]
    ) -> None:
        self._engine_stats = engine_stats
        self._is_ready = is_ready

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield one gauge for each count that the engine has reported."""
        yield GaugeMetricFamily("kiln:engine_ready", "1 if ready to serve.", self._is_ready())
        stats = self._engine_stats()
        for count, (name, text) in _GAUGES.items():
            if count in stats:
                yield GaugeMetricFamily(f"kiln:{name}", text, stats[count])
        for count, (name, label, text) in _BY_LABEL.items():
            family = GaugeMetricFamily(f"kiln:{name}", text, labels=[label])
            for value, number in stats.get(count, {}).items():
                family.add_metric([value], number)
            yield family
