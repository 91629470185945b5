"""The routes of the served models: the model under each of its names, and its LoRA adapters."""

from __future__ import annotations

from dataclasses import asdict
from typing import Literal

from fastapi import APIRouter
from typing_extensions import TypedDict

from kiln.engine.errors import EngineDeadError
from kiln.engine.server.serving import ServedModel, Serving


class ModelCard(TypedDict):
    """One entry of GET /v1/models. ``max_model_len`` and ``task`` are null while the model loads.

    ``root`` is the first name of the model. ``parent`` is that name for a LoRA adapter, and null
    for the model itself. ``permission`` is empty; older clients of OpenAI read the field.
    ``default_sampling_params`` act where a request leaves a field out.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    task: Literal["generate", "embed"] | None
    default_sampling_params: dict[str, float]
    permission: list[None]


class ModelList(TypedDict):
    """The response to GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


def models_router(serving: Serving) -> APIRouter:
    """Return the routes for one engine."""
    router = APIRouter(prefix="/v1", tags=["models"])

    @router.get("/models")
    async def list_models() -> ModelList:
        """List the served model and its LoRA adapters."""
        names = (*serving.settings.served_model_names, *serving.adapters)
        cards = [_card(serving, serving.require_model(name)) for name in names]
        return {"object": "list", "data": cards}

    @router.get("/models/{model:path}")
    async def get_model(model: str) -> ModelCard:
        """Describe the served model or one of its LoRA adapters."""
        return _card(serving, serving.require_model(model))

    return router


def _card(serving: Serving, served: ServedModel) -> ModelCard:
    try:
        info = serving.client.model_info
    except EngineDeadError:
        info = None  # it loads, or has died
    root = serving.settings.served_model_name
    return {
        "id": served.name,
        "object": "model",
        "created": serving.started,
        "owned_by": "kiln",
        "root": root,
        "parent": None if served.adapter is None else root,
        "max_model_len": None if info is None else info.max_model_len,
        "task": None if info is None else "embed" if info.embedder else "generate",
        "default_sampling_params": asdict(serving.settings.defaults),
        "permission": [],
    }
