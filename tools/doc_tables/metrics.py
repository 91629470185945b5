"""The tables of metrics, from the registry that ``/metrics`` shows."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase

from doc_tables.markdown import code, table
from kiln.engine.server.engine_counts import ENGINE_ROWS
from kiln.engine.server.metrics import VLLM_NAMES, Metrics

_OF_ALL = "model_name"  # a label of every metric


def shared_metrics() -> str:
    """Return the metrics that vLLM has too."""
    rows = []
    for metric in _metrics():
        names = VLLM_NAMES.get(_short(metric))
        if names:
            older = [f"vllm:{name}" for name in names if name != _short(metric)]
            also = f" Also {code(*older)}." if older else ""
            rows.append((_name(metric), metric.type, metric.documentation + also))
    return table(("`kiln:` and `vllm:`", "type", "meaning"), rows)


def own_metrics() -> str:
    """Return the metrics that only Kiln has."""
    rows = [
        (_name(metric), metric.type, metric.documentation)
        for metric in _metrics()
        if _short(metric) not in VLLM_NAMES
    ]
    return table(("`kiln:`", "type", "meaning"), rows)


def names() -> set[str]:
    """Return the names of all metrics, without the endings of their samples."""
    return {metric.name for metric in _metrics()}


def _metrics() -> Iterator[Metric]:
    """Yield each metric under Kiln's name, with a sample for its labels."""
    stats = {name: {"x": 1.0} if row.label else 1.0 for name, row in ENGINE_ROWS.items()}
    metrics = Metrics(lambda: stats, lambda: True, "model")
    for one in vars(metrics).values():
        if isinstance(one, MetricWrapperBase) and one._labelnames:
            one.labels(*["x"] * len(one._labelnames))
    found = [one for one in metrics.registry.collect() if one.name.startswith("kiln:")]
    return iter(sorted(found, key=lambda one: one.name))


def _short(metric: Metric) -> str:
    return metric.name.removeprefix("kiln:")


def _name(metric: Metric) -> str:
    """Return the name as it is written in a query, with its own labels."""
    labels = {label for sample in metric.samples for label in sample.labels} - {_OF_ALL, "le"}
    ending = "_total" if metric.type == "counter" else ""
    return code(_short(metric) + ending + ("{" + ", ".join(sorted(labels)) + "}" if labels else ""))
