"""The metrics of the engine's counts: one table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Row(NamedTuple):
    """A metric of an engine count: its type, name, help, and label if the count is a map."""

    kind: Literal["gauge", "counter"]
    name: str
    text: str
    label: str | None = None


_GAUGES = {
    "running": ("num_requests_running", "Running requests."),
    "waiting": ("num_requests_waiting", "Requests in the queue."),
    "kv_blocks_used": ("kv_blocks_used", "KV blocks that requests hold."),
    "kv_blocks_cached": (
        "kv_blocks_cached",
        "KV blocks that no request holds, kept for later ones.",
    ),
    "kv_blocks_total": ("kv_blocks_total", "Blocks of the KV pool."),
    "kv_offload_blocks": ("kv_offload_blocks", "KV blocks kept in host memory."),
    "graphs": ("num_graphs", "Captured CUDA graphs."),
    "graph_bytes": ("graph_bytes", "Device memory of the CUDA graphs."),
    "graph_capture_seconds": ("graph_capture_seconds", "Time to capture the CUDA graphs."),
    "adapter_running": ("lora_requests_running", "Running requests of an adapter.", "adapter"),
    "adapter_waiting": ("lora_requests_waiting", "Requests of an adapter in the queue.", "adapter"),
    "adapter_on_device": ("lora_on_device", "1 if in the adapter pool.", "adapter"),
}
_COUNTERS = {
    "prefix_cache_queries": (
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
    ),
    "prefix_cache_hits": ("prefix_cache_hits", "Prompt tokens that the prefix cache had."),
    "kv_offload_stored_blocks": (
        "kv_offload_stored_blocks",
        "KV blocks copied to host memory.",
    ),
    "kv_offload_loaded_blocks": (
        "kv_offload_loaded_blocks",
        "KV blocks that came back from host memory.",
    ),
    "spec_decode_num_draft_tokens": (
        "spec_decode_num_draft_tokens",
        "Drafts that steps have verified.",
    ),
    "spec_decode_num_accepted_tokens": (
        "spec_decode_num_accepted_tokens",
        "Drafts that were accepted.",
    ),
    "spec_decode_steps_without": (
        "spec_decode_steps_without_drafts",
        "Steps without drafts.",
        "reason",
    ),
    "structured_outputs_missed": (
        "structured_outputs_missed",
        "Tokens that waited for the mask of their grammar.",
    ),
    "engine_restarts": ("engine_restarts", "Engine processes started after one had ended."),
    "preemptions": ("num_preemptions", "Preemptions."),
    "steps": ("num_steps", "Steps."),
    "steps_not_ahead": ("num_steps_not_ahead", "Steps launched with no other step in flight."),
    "graph_replays": ("graph_replays", "Steps replayed from a CUDA graph.", "size"),
    "graph_fallbacks": ("graph_fallbacks", "Steps without a CUDA graph.", "reason"),
    "all_reduces": ("all_reduces", "Sums over the ranks of tensor parallelism.", "algorithm"),
    "adapter_evictions": ("num_lora_evictions", "LoRA adapters evicted from the device."),
    "adapter_placements": ("lora_placements", "Copies of an adapter to the device.", "adapter"),
    "adapter_tokens": ("lora_generation_tokens", "Tokens generated with an adapter.", "adapter"),
}
ENGINE_ROWS: Mapping[str, Row] = MappingProxyType(
    {count: Row("gauge", *entry) for count, entry in _GAUGES.items()}
    | {count: Row("counter", *entry) for count, entry in _COUNTERS.items()}
)


class EngineCounts(Collector):
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
