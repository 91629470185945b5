"""The route that says what computes: the kernels, the CUDA graphs, and the all-reduce."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from typing_extensions import TypedDict

from kiln.engine.server.serving import Serving

_ALL_REDUCE = "all_reduce"


class KernelChoice(TypedDict):
    """The implementation of a kernel family, and why it was chosen."""

    implementation: str
    reason: str


class GraphStatus(TypedDict):
    """The CUDA graphs: steps replayed by size, and steps without a graph by reason."""

    captured: int
    num_bytes: int
    capture_seconds: float
    replays: dict[str, int]
    fallbacks: dict[str, int]


class AllReduceStatus(KernelChoice):
    """What sums over the ranks of tensor parallelism, and the number of sums by algorithm."""

    sums: dict[str, int]


class KernelStatus(TypedDict):
    """The response to GET /kernels. ``all_reduce`` is null if the model has one rank.

    Counts are up to 1 s old.
    """

    device: str
    dtype: str
    kernels: dict[str, KernelChoice]
    graphs: GraphStatus
    all_reduce: AllReduceStatus | None


def kernels_router(serving: Serving) -> APIRouter:
    """Return the route for one engine."""
    router = APIRouter(tags=["status"])

    @router.get("/kernels")
    async def kernels() -> KernelStatus:
        """Report which implementation of each kernel family runs, and why; graphs; all-reduce."""
        info, stats = serving.require_ready(), serving.client.stats()
        choices = {family: _choice(text) for family, text in sorted(info.kernels.items())}
        sums = choices.pop(_ALL_REDUCE, None)
        return {
            "device": info.device,
            "dtype": info.dtype,
            "kernels": choices,
            "graphs": _graphs(stats),
            "all_reduce": None if sums is None else {**sums, "sums": stats.get("all_reduces", {})},
        }

    return router


def _choice(text: str) -> KernelChoice:
    """Split the runner's "implementation: reason"."""
    implementation, _, reason = text.partition(": ")
    return {"implementation": implementation, "reason": reason}


def _graphs(stats: Mapping[str, Any]) -> GraphStatus:
    return {
        "captured": stats.get("graphs", 0),
        "num_bytes": stats.get("graph_bytes", 0),
        "capture_seconds": stats.get("graph_capture_seconds", 0.0),
        "replays": stats.get("graph_replays", {}),
        "fallbacks": stats.get("graph_fallbacks", {}),
    }
