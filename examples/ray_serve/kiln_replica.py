"""A replica: an actor of Ray Serve with one ``kiln serve`` of its own."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
from kiln_call import Call, Head, Headers, NotServed, passed_on
from kiln_process import KilnProcess
from ray import serve

REPLICA_HEADER = b"x-kiln-replica"
_PROBE_SECONDS = 5.0
_STOP_SECONDS = 5.0  # Ray has let the requests end before it stops a replica
_LAST_ANSWERS_SECONDS = 0.5  # for answers that are on their way when the server has ended
# Codes of Kiln's 503 for requests that no engine had. Errors of Anthropic's routes have no code.
_NOT_SERVED = frozenset(("draining", "loading", "restarting", ""))


class Replica:
    """Passes requests on to its server, and is as healthy as that is.

    ``arguments``: those of ``kiln serve``. ``folder``: where relative paths in them start.
    """

    async def __init__(self, arguments: list[str], folder: str) -> None:  # type: ignore[misc]
        self._id = serve.get_replica_context().replica_id.unique_id
        self._loop = asyncio.get_running_loop()
        self._is_ending = False
        # In this thread, which lives as long as the replica: see KilnProcess.
        self._process = KilnProcess(arguments, Path(folder), self._ended)
        url = await asyncio.to_thread(self._process.wait_for_url)
        # Time and number of requests are limited by Kiln. Each request connects anew: whether an
        # idle connection still works is only known after a request was sent on it.
        self._client = httpx.AsyncClient(
            base_url=url,
            timeout=None,
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,
        )
        print(f"replica {self._id} serves on {url}", flush=True)

    async def check_health(self) -> None:
        """Raise an error if the server hangs; Ray then replaces the replica.

        Readiness does not count: a server that loads its engine again says so to each request, and
        ends if it cannot.
        """
        response = await self._client.get("/health/live", timeout=_PROBE_SECONDS)
        if response.status_code != httpx.codes.OK:
            raise RuntimeError(f"/health/live is {response.status_code}: {response.text[:200]}")

    async def handle(self, call: Call) -> AsyncGenerator[Head | NotServed | bytes, None]:
        """Yield the head of the server's answer, then its body as it arrives; or NotServed.

        If Ray cancels this, the connection closes, and Kiln aborts the request.
        """
        if self._is_ending:
            yield NotServed(self._id, "refused")
            return
        request = self._client.build_request(
            call.method, call.target, headers=list(call.headers), content=call.body
        )
        try:
            response = await self._client.send(request, stream=True)
        except httpx.ConnectError:
            self._end()  # nobody listens any more: the server is ending
            yield NotServed(self._id, "refused")
            return
        try:
            chunks = response.aiter_raw()
            if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                body = b"".join([chunk async for chunk in chunks])
                code = _error_code(body)
                # Kiln's header for requests that an engine had when it ended.
                is_lost = response.headers.get("x-should-retry") == "false"
                if code in _NOT_SERVED and not is_lost:
                    yield NotServed(self._id, code or "not ready")
                    return
                chunks = _one(body)
            if call.adapter and response.is_success:
                await self.note_adapter(call.adapter)
            headers = passed_on(response.headers.raw)
            yield Head(response.status_code, (*headers, (REPLICA_HEADER, self._id.encode())))
            async for chunk in chunks:
                yield chunk
        finally:
            await response.aclose()

    async def metrics(self, headers: Headers) -> tuple[str, int, bytes]:
        """Return the replica's id, and status and body of the server's /metrics."""
        response = await self._client.get("/metrics", headers=list(headers))
        return self._id, response.status_code, response.content

    async def note_adapter(self, name: str) -> None:
        """Tell Ray that this replica has an adapter. ``with_adapters`` wraps it."""
        raise NotImplementedError("made by with_adapters")

    def _ended(self) -> None:
        """End the actor too; called in another thread."""
        self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        """End the actor with its server, so that Ray starts another one at once."""
        if not self._is_ending:
            self._is_ending = True
            self._loop.call_later(_LAST_ANSWERS_SECONDS, os._exit, 1)

    def __del__(self) -> None:
        """Stop the server; Ray calls this at the end of a replica."""
        if hasattr(self, "_process"):
            self._process.stop(_STOP_SECONDS)


def with_adapters(max_adapters: int) -> type[Replica]:
    """Return a class of replicas, of which Ray knows the ``max_adapters`` adapters used last."""

    class AdapterReplica(Replica):
        @serve.multiplexed(max_num_models_per_replica=max_adapters)
        async def note_adapter(self, name: str) -> str:
            return name  # Kiln has loaded it: Ray only keeps the list

    return AdapterReplica


async def _one(body: bytes) -> AsyncGenerator[bytes, None]:
    """Yield a body that was read whole."""
    yield body


def _error_code(body: bytes) -> str:
    """Return the code of an error in OpenAI's form; "" for another body."""
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, LookupError, TypeError):
        return ""
