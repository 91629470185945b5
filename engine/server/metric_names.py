"""The names of metrics: Kiln's, and vLLM's beside it where vLLM has one of the same meaning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

_SHARED = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions"),
    *("prompt_tokens", "generation_tokens", "request_success"),
    *("request_prompt_tokens", "request_generation_tokens", "request_queue_time_seconds"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
)
_OLDER = {"inter_token_latency_seconds": ("time_per_output_token_seconds",)}
# Kiln's name -> vLLM's names of the same.
VLLM_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {name: (name, *_OLDER.get(name, ())) for name in _SHARED}
)


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
