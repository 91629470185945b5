"""The route that tells the server's state and its metrics as JSON, for pages and scripts."""

from __future__ import annotations

import time
from collections.abc import Iterable

from fastapi import APIRouter
from prometheus_client.core import Metric
from starlette.responses import Response
from typing_extensions import TypedDict

import kiln
from kiln.engine.server.errors import ApiError
from kiln.engine.server.openapi import describe_answer
from kiln.engine.server.responses import encode_json
from kiln.engine.server.serving import Serving


class ServedModelInfo(TypedDict):
    """What is served: its names, the longest prompt and output together, and where it runs.

    ``budget``: how many tokens a step computes at most, and why.
    """

    names: list[str]
    max_model_len: int
    device: str
    dtype: str
    budget: str


class HistogramValues(TypedDict):
    """The values of a histogram: ``counts[i]`` were at most ``bounds[i]``; the last count: all."""

    bounds: list[float]
    counts: list[float]
    sum: float


class Stats(TypedDict):
    """The response to GET /stats.

    ``state`` is ``ready``, or the code of the error that a request would get now, such as
    ``loading``; ``message`` is its text. ``model`` is null until the model is loaded. ``values``
    and ``histograms`` are the metrics of GET /metrics by their names without ``kiln:``; one with a
    label is a map by the label's value. Those of the engine are up to 1 s old.
    """

    time: float
    version: str
    state: str
    message: str
    model: ServedModelInfo | None
    values: dict[str, float | dict[str, float]]
    histograms: dict[str, HistogramValues]


def stats_router(serving: Serving) -> APIRouter:
    """Return the route for one engine."""
    router = APIRouter(tags=["status"])

    @router.get("/stats", **describe_answer(Stats))
    async def stats() -> Response:
        """Return the server's state and the numbers of GET /metrics, as JSON."""
        state, message, model = "ready", "", None
        try:
            info = serving.require_ready()
            model = ServedModelInfo(
                names=list(serving.settings.served_model_names),
                max_model_len=info.max_model_len,
                device=info.device,
                dtype=info.dtype,
                budget=info.budget,
            )
        except ApiError as error:
            state, message = error.code or "unavailable", error.message
        values, histograms = _values_of(serving.metrics.collect())
        answer: Stats = {
            "time": time.time(),
            "version": kiln.__version__,
            "state": state,
            "message": message,
            "model": model,
            "values": values,
            "histograms": histograms,
        }
        return Response(encode_json(answer), media_type="application/json")

    return router


def _values_of(
    metrics: Iterable[Metric],
) -> tuple[dict[str, float | dict[str, float]], dict[str, HistogramValues]]:
    values: dict[str, float | dict[str, float]] = {}
    histograms: dict[str, HistogramValues] = {}
    for metric in metrics:
        name = metric.name.removeprefix("kiln:")
        samples = [one for one in metric.samples if not one.name.endswith("_created")]
        if metric.type == "histogram":
            buckets = [one for one in samples if one.name.endswith("_bucket")]
            histograms[name] = {
                "bounds": [float(one.labels["le"]) for one in buckets[:-1]],
                "counts": [one.value for one in buckets],
                "sum": next(one.value for one in samples if one.name.endswith("_sum")),
            }
        elif len(samples) == 1 and not samples[0].labels:
            values[name] = samples[0].value
        else:
            values[name] = {value: one.value for one in samples for value in one.labels.values()}
    return values, histograms
