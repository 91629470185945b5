"""The routes of LoRA adapters: load, unload and list."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from typing_extensions import TypedDict

from kiln.engine.errors import KilnError
from kiln.engine.requests.adapter_job import AdapterInfo
from kiln.engine.server.body import read_body
from kiln.engine.server.disconnect import unless_gone
from kiln.engine.server.errors import ApiError, from_adapter_job
from kiln.engine.server.fields import StrictModel
from kiln.engine.server.openapi import describe_body
from kiln.engine.server.serving import Serving

_MAX_PATH = 4096  # characters
_MAX_NAME = 128
_ERRORS = {
    403: "The path is outside of --lora-root, or the server has none",
    409: "Requests use the adapter, or the place that it needs",
}


class LoadAdapterRequest(StrictModel):
    """The body of POST /v1/load_lora_adapter. ``lora_path`` is a folder inside ``--lora-root``."""

    lora_name: Annotated[str, Field(min_length=1, max_length=_MAX_NAME)]
    lora_path: Annotated[str, Field(min_length=1, max_length=_MAX_PATH)]
    pinned: bool | None = None  # never evicted from the device


class UnloadAdapterRequest(StrictModel):
    """The body of POST /v1/unload_lora_adapter."""

    lora_name: Annotated[str, Field(min_length=1, max_length=_MAX_NAME)]
    timeout_s: Annotated[float, Field(ge=0, le=3600)] = 30.0  # for its requests to end


class AdapterCard(TypedDict):
    """A loaded adapter. Its requests, and whether it is on the device, are up to 1 s old."""

    lora_name: str
    lora_path: str
    pinned: bool
    max_rank: int
    num_bytes: int
    on_device: bool
    running: int
    waiting: int


class AdapterList(TypedDict):
    """The response to GET /v1/lora_adapters."""

    data: list[AdapterCard]


class Unloaded(TypedDict):
    """The response to POST /v1/unload_lora_adapter."""

    lora_name: str
    status: str


def adapter_router(serving: Serving) -> APIRouter:
    """Return the routes for one engine."""
    router = APIRouter(prefix="/v1", tags=["LoRA adapters"])

    @router.post("/load_lora_adapter", **describe_body(LoadAdapterRequest, AdapterCard, _ERRORS))
    async def load_lora_adapter(request: Request) -> AdapterCard:
        """Load a LoRA adapter from a folder inside ``--lora-root``."""
        body = await read_body(request, LoadAdapterRequest, serving.threads)
        serving.require_ready()
        if body.lora_name in serving.settings.served_model_names:
            message = f"lora_name: {body.lora_name!r} is a name of the model: use another"
            raise ApiError(400, message, "lora_name", "adapter_refused")
        calls = serving.client.adapters
        job = calls.load(body.lora_name, body.lora_path, pinned=bool(body.pinned))
        try:
            info = await unless_gone(request.receive, job)
        except KilnError as error:
            raise from_adapter_job(error) from error
        return _card(info, serving.client.stats())

    @router.post("/unload_lora_adapter", **describe_body(UnloadAdapterRequest, Unloaded, _ERRORS))
    async def unload_lora_adapter(request: Request) -> Unloaded:
        """Unload a LoRA adapter; 409 if it is still in use after ``timeout_s`` seconds."""
        body = await read_body(request, UnloadAdapterRequest, serving.threads)
        serving.require_ready()
        job = serving.client.adapters.unload(body.lora_name, body.timeout_s)
        try:
            await unless_gone(request.receive, job)
        except KilnError as error:
            raise from_adapter_job(error) from error
        return {"lora_name": body.lora_name, "status": "unloaded"}

    @router.get("/lora_adapters")
    async def list_lora_adapters() -> AdapterList:
        """List the loaded LoRA adapters."""
        stats = serving.client.stats()
        return {"data": [_card(info, stats) for info in serving.adapters.values()]}

    return router


def _card(info: AdapterInfo, stats: dict[str, Any]) -> AdapterCard:
    def count(name: str) -> int:
        return int(stats.get(name, {}).get(info.name, 0))

    return {
        "lora_name": info.name,
        "lora_path": info.path,
        "pinned": info.pinned,
        "max_rank": info.max_rank,
        "num_bytes": info.num_bytes,
        "on_device": bool(count("adapter_on_device")),
        "running": count("adapter_running"),
        "waiting": count("adapter_waiting"),
    }
