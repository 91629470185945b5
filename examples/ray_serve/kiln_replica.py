"""A replica: an actor of Ray Serve with one ``kiln serve`` of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
from kiln_call import Call, Head, Headers, passed_on
from kiln_process import KilnProcess
from ray import serve

REPLICA_HEADER = b"x-kiln-replica"
_PROBE_SECONDS = 5.0
_STOP_SECONDS = 5.0  # Ray has let the requests end before it stops a replica


class Replica:
    """Passes requests on to its server, and is as healthy as that is.

    ``arguments``: those of ``kiln serve``. ``folder``: where relative paths in them start.
    """

    async def __init__(self, arguments: list[str], folder: str) -> None:  # type: ignore[misc]
        # In this thread, which lives as long as the replica: see KilnProcess.
        self._process = KilnProcess(arguments, Path(folder), _end_replica)
        url = await asyncio.to_thread(self._process.wait_for_url)
        self._id = serve.get_replica_context().replica_id.unique_id
        # Time and number of requests are limited by Kiln.
        self._client = httpx.AsyncClient(
            base_url=url, timeout=None, limits=httpx.Limits(), trust_env=False
        )
        print(f"replica {self._id} serves on {url}", flush=True)

    async def check_health(self) -> None:
        """Raise an error if the server is not ready or hangs; Ray then replaces the replica."""
        for path in ("/health/ready", "/health/live"):
            response = await self._client.get(path, timeout=_PROBE_SECONDS)
            if response.status_code != httpx.codes.OK:
                raise RuntimeError(f"{path} is {response.status_code}: {response.text[:200]}")

    async def handle(self, call: Call) -> AsyncGenerator[Head | bytes, None]:
        """Yield the head of the server's answer, then its body as it arrives.

        If Ray cancels this, the connection closes, and Kiln aborts the request.
        """
        async with self._client.stream(
            call.method, call.target, headers=list(call.headers), content=call.body
        ) as response:
            if call.adapter and response.is_success:
                await self.note_adapter(call.adapter)
            headers = passed_on(response.headers.raw)
            yield Head(response.status_code, (*headers, (REPLICA_HEADER, self._id.encode())))
            async for chunk in response.aiter_raw():
                yield chunk

    async def metrics(self, headers: Headers) -> tuple[str, int, bytes]:
        """Return the replica's id, and status and body of the server's /metrics."""
        response = await self._client.get("/metrics", headers=list(headers))
        return self._id, response.status_code, response.content

    async def note_adapter(self, name: str) -> None:
        """Tell Ray that this replica has an adapter. ``with_adapters`` wraps it."""
        raise NotImplementedError("made by with_adapters")

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


def _end_replica() -> None:
    """End the actor with its server: Ray sees it at once, and sends requests elsewhere."""
    os._exit(1)
