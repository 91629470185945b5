"""POST /v1/embeddings, with OpenAI's fields and vLLM's."""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from fastapi import APIRouter
from pydantic import model_validator
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from kiln.engine.errors import EmbeddingError, KilnError, RequestError
from kiln.engine.requests.check import check_tokens
from kiln.engine.requests.pooling import PoolingParams
from kiln.engine.requests.request import NewRequest
from kiln.engine.server.admission import read_request
from kiln.engine.server.disconnect import unless_gone
from kiln.engine.server.errors import ApiError, from_engine
from kiln.engine.server.exchange import Tokens, Work, note_work
from kiln.engine.server.field_table import model_of
from kiln.engine.server.fields import CacheSalt, Int, Priority, StrictModel, prompt_field
from kiln.engine.server.gen_ai import embedding_attributes
from kiln.engine.server.openapi import describe_body
from kiln.engine.server.responses import encode_json
from kiln.engine.server.route_fields import EMBEDDINGS
from kiln.engine.server.serving import Serving
from kiln.engine.server.threads import LARGE
from kiln.engine.text.embeddings import EmbeddingJob, read_texts, require_embedder

MAX_INPUTS = 2048  # OpenAI's limit
# A call sends its inputs in groups, and at most two groups are in the engine at a time. So the
# engine's queue keeps room for other calls, and the next group is queued before the last one ends.
_GROUP, _GROUPS = 64, 2
_NUMBER_BYTES = 20  # of a number in JSON

if TYPE_CHECKING:

    class _Rows(StrictModel): ...

else:
    _Rows = model_of("EmbeddingRows", EMBEDDINGS)


class EmbeddingsRequest(_Rows):
    """The body of POST /v1/embeddings."""

    model: str | None = None
    input: prompt_field(MAX_INPUTS)  # type: ignore[valid-type]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: Int | None = None
    add_special_tokens: bool | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    user: str | None = None

    @model_validator(mode="after")
    def _check_input(self) -> EmbeddingsRequest:
        if not self.input and not isinstance(self.input, str):
            raise ApiError(400, "input: the list is empty", "input")
        return self

    def pooling_params(self) -> PoolingParams:
        """Return what is asked of the embeddings. Raises RequestError."""
        return PoolingParams(self.dimensions, self.use_activation, self.truncate_prompt_tokens)


class EmbeddingItem(TypedDict):
    """The embedding of one input; as base64 it is its little-endian float32 numbers."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    """The tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(TypedDict):
    """The response to POST /v1/embeddings, in the order of the inputs."""

    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


def embeddings_router(serving: Serving) -> APIRouter:
    """Return the route for one engine."""
    router = APIRouter(prefix="/v1", tags=["embeddings"])

    @router.post("/embeddings", **describe_body(EmbeddingsRequest, EmbeddingList))
    async def create_embeddings(request: Request) -> Response:
        """Return the embeddings of texts."""
        body = await read_request(serving, request, EmbeddingsRequest)
        info = serving.require_ready()
        served = serving.require_model(body.model)
        params = body.pooling_params()
        job = EmbeddingJob(require_embedder(info.embedder, params), params)
        told = partial(embedding_attributes, job, body.model, served.name)
        note_work(request, Work(served.name, body.user, lambda: Tokens(job.num_tokens, 0), told))
        started = time.monotonic()
        try:
            await _read(serving, request, body, served.adapter, job)
            await unless_gone(request.receive, _compute(serving, job))
        except KilnError as error:
            raise _told(error, request.state.request_id) from error
        _measure(serving, job, time.monotonic() - started)
        as_text = body.encoding_format == "base64"

        def write() -> bytes:
            return encode_json(_answer(job, served.name, as_text=as_text))

        size = len(job.requests) * job.embedder.size * _NUMBER_BYTES
        data = write() if size < LARGE else await serving.threads.run(write, size)
        return Response(data, media_type="application/json")

    return router


async def _read(
    serving: Serving,
    request: Request,
    body: EmbeddingsRequest,
    adapter: str | None,
    job: EmbeddingJob,
) -> None:
    """Tokenize and check the inputs. Raises RequestError, and ClientDisconnect."""
    info, name = serving.require_ready(), uuid.uuid4().hex

    def work() -> None:
        special = body.add_special_tokens is not False
        context, tokenizer = info.max_model_len, serving.tokenizer
        read = read_texts(body.input, tokenizer, job.params, context, add_special_tokens=special)
        for index, prompt in enumerate(read):
            salted = replace(prompt, cache_salt=body.cache_salt)
            new = job.ask(f"{name}-{index}", salted, adapter, body.priority or 0)
            try:
                check_tokens(new, context, info.vocab_size, info.image_token_ids)
            except RequestError as error:
                raise type(error)(f"input {index}: {error}", error.param) from None

    await serving.threads.run_for(request, work)


async def _compute(serving: Serving, job: EmbeddingJob) -> None:
    """Wait for all embeddings. Raises KilnError; what is not computed yet is dropped then."""
    requests = list(job.requests.values())
    groups = iter([requests[first : first + _GROUP] for first in range(0, len(requests), _GROUP)])
    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(_GROUPS):
                tasks.create_task(_compute_groups(serving, job, groups))
    except ExceptionGroup as several:
        raise several.exceptions[0] from None


async def _compute_groups(
    serving: Serving, job: EmbeddingJob, groups: Iterator[list[NewRequest]]
) -> None:
    for group in groups:
        async with aclosing(serving.client.stream(*group)) as outputs:
            async for output in outputs:
                job.take(output)


def _told(error: KilnError, request_id: str) -> ApiError:
    """Return an error for the client, by whose name a prompt is an input."""
    told = from_engine(error)
    if told.param == "prompt":
        told.message, told.param = told.message.replace("prompt", "input"), "input"
    if isinstance(error, EmbeddingError):
        told.message = told.message.replace("prompt", "input", 1)
        told.message += f"; see request {request_id} in the server's log"
    return told


def _measure(serving: Serving, job: EmbeddingJob, seconds: float) -> None:
    metrics = serving.metrics
    for name, new in job.requests.items():
        metrics.tokens.add_prompt(len(new.prompt_token_ids))
        metrics.prompt_length.observe(len(new.prompt_token_ids))
        metrics.request_success.labels("stop").inc()
        metrics.e2e_request_latency.observe(seconds)
        if (waited := job.outputs[name].queue_seconds) is not None:
            metrics.queue_time.observe(waited)


def _answer(job: EmbeddingJob, model: str, *, as_text: bool) -> EmbeddingList:
    def form(vector: Any) -> list[float] | str:
        if as_text:
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        numbers: list[float] = vector.tolist()
        return numbers

    data: list[EmbeddingItem] = [
        {"object": "embedding", "index": index, "embedding": form(job.vectors[name])}
        for index, name in enumerate(job.requests)
    ]
    usage: EmbeddingUsage = {"prompt_tokens": job.num_tokens, "total_tokens": job.num_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}
