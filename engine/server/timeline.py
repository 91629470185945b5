"""The route that tells of single steps: when each ran, how long, and in which CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from kiln.engine.process.step_ring import SeenStep
from kiln.engine.requests.step_log import StepKind
from kiln.engine.server.errors import ApiError
from kiln.engine.server.openapi import describe_answer
from kiln.engine.server.responses import encode_json
from kiln.engine.server.serving import Serving

_SINCE = {
    "name": "since",
    "in": "query",
    "description": "The position of the first record: ``next`` of the answer before",
    "schema": {"type": "integer", "minimum": 0, "default": 0},
}


class StepEntry(TypedDict):
    """A step as the engine's host saw it. Times are in seconds.

    Its launch began at ``begun``, in Unix time. ``seconds`` later its tokens were in host memory;
    for the last ``waited`` of them the host only waited for the device. A step may be launched
    before the one ahead of it has ended. ``engine`` counts the engine processes, from 1 on, and
    ``number`` the steps of one. A ``decode`` step computes the last token of each request, and its
    ``drafts``; ``prefill``: parts of prompts; ``mixed``: both. ``tokens`` were computed, and
    requests got ``generated`` ones. ``graph``: the size of the CUDA graph that ran it; null: none
    did, and ``why_eager`` is the reason.
    """

    engine: int
    number: int
    begun: float
    seconds: float
    waited: float
    kind: StepKind
    requests: int
    tokens: int
    drafts: int
    generated: int
    graph: str | None
    why_eager: str | None


class Timeline(TypedDict):
    """The response to GET /timeline: the steps from position ``first`` on, oldest first.

    ``first`` is above what was asked for if older records are gone. Ask with ``since=next`` for
    those that follow.
    """

    first: int
    next: int
    steps: list[StepEntry]


def timeline_router(serving: Serving) -> APIRouter:
    """Return the route for one engine."""
    router = APIRouter(tags=["status"])
    to_unix = time.time() - time.monotonic()

    @router.get("/timeline", **describe_answer(Timeline, parameters=[_SINCE]))
    async def timeline(request: Request) -> Response:
        """Return the last steps, at most 2000: when each ran, how long, and in which graph.

        The engine sends records for 30 s after it was asked, a few times a second: the first answer
        may have none yet.
        """
        since = _position(request.query_params.get("since", "0"))
        serving.client.watch_steps()
        first, steps = serving.client.steps.since(since)
        answer: Timeline = {
            "first": first,
            "next": first + len(steps),
            "steps": _entries(steps, to_unix),
        }
        return Response(encode_json(answer), media_type="application/json")

    return router


def _position(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        message = f"since: must be a whole number from 0 on, got {text[:80]!r}"
        raise ApiError(400, message, "since")
    return int(text)


def _entries(steps: Sequence[SeenStep], to_unix: float) -> list[StepEntry]:
    return [
        {
            "engine": engine,
            "number": record.number,
            "begun": record.begun + to_unix,
            "seconds": record.seconds,
            "waited": record.waited,
            "kind": record.kind,
            "requests": record.requests,
            "tokens": record.tokens,
            "drafts": record.drafts,
            "generated": record.generated,
            "graph": record.graph or None,
            "why_eager": record.why_eager or None,
        }
        for engine, record in steps
    ]
