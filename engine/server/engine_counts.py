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


ENGINE_ROWS: Mapping[str, Row] = MappingProxyType(
    {
        "running": Row("gauge", "num_requests_running", "Running requests."),
        "waiting": Row("gauge", "num_requests_waiting", "Requests in the queue."),
        "kv_blocks_used": Row("gauge", "kv_blocks_used", "KV blocks that requests hold."),
        "kv_blocks_cached": Row(
            "gauge", "kv_blocks_cached", "KV blocks that no request holds, kept for later ones."
        ),
        "kv_blocks_total": Row("gauge", "kv_blocks_total", "Blocks of the KV pool."),
        "prefix_cache_queries": Row(
            "counter", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        ),
        "prefix_cache_hits": Row(
            "counter", "prefix_cache_hits", "Prompt tokens that the prefix cache had."
        ),
        "spec_decode_num_draft_tokens": Row(
            "counter", "spec_decode_num_draft_tokens", "Drafts that steps have verified."
        ),
        "spec_decode_num_accepted_tokens": Row(
            "counter", "spec_decode_num_accepted_tokens", "Drafts that were accepted."
        ),
        "spec_decode_steps_without": Row(
            "counter", "spec_decode_steps_without_drafts", "Steps without drafts.", "reason"
        ),
        "preemptions": Row("counter", "num_preemptions", "Preemptions."),
        "steps": Row("counter", "num_steps", "Steps."),
        "steps_not_ahead": Row(
            "counter", "num_steps_not_ahead", "Steps launched with no other step in flight."
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
