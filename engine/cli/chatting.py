"""The two backends of ``kiln chat``: a server by its URL, or its own engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

import httpx

from kiln.engine.cli.events import EventReader
from kiln.engine.cli.progress import LoadingDisplay
from kiln.engine.config import EngineConfig
from kiln.engine.errors import KilnError, RequestError
from kiln.engine.models.model_folder import ModelFiles
from kiln.engine.process.child import EngineProcess
from kiln.engine.process.client import EngineClient
from kiln.engine.requests.request import NewRequest
from kiln.engine.requests.sampling_params import SamplingParams
from kiln.engine.server.serving import read_defaults
from kiln.engine.text.outputs import CompletionStream
from kiln.engine.text.prompts import read_chats
from kiln.engine.text.tokenizer import Tokenizer

Message = dict[str, str]


class ServerError(KilnError):
    """A server cannot be reached, or rejected a message."""


class ServerChat:
    """A server with OpenAI's API, Kiln's or another, at an address that ``server_url`` made."""

    def __init__(self, url: str, api_key: str | None, options: dict[str, Any]) -> None:
        self._url = url
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._http = httpx.AsyncClient(headers=headers, timeout=httpx.Timeout(10.0, read=None))
        self._options = options
        self.name = ""

    async def open(self) -> None:
        """Ask for the model's name. Raises ServerError."""
        try:
            answer = await self._http.get(f"{self._url}/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerError(
                f"cannot reach {self._url}: {error or type(error).__name__}"
            ) from error
        if answer.status_code != 200:
            raise ServerError(f"{self._url} answered {answer.status_code}: {_reason(answer.text)}")
        self.name = answer.json()["data"][0]["id"]

    async def reply(self, messages: list[Message]) -> AsyncIterator[str]:
        """Yield the text of the answer as it is generated. Raises ServerError."""
        body = {"model": self.name, "messages": messages, "stream": True, **self._options}
        url = f"{self._url}/v1/chat/completions"
        try:
            async with self._http.stream("POST", url, json=body) as answer:
                if answer.status_code != 200:
                    raise ServerError(_reason((await answer.aread()).decode(errors="replace")))
                events = EventReader()
                async for chunk in answer.aiter_bytes():
                    for data in events.push(chunk):
                        if data != "[DONE]":
                            yield _text_of(data)
        except httpx.HTTPError as error:
            raise ServerError(f"the connection to {self._url} broke: {error!r}") from error

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()


class EngineChat:
    """An engine in its own process."""

    def __init__(self, config: EngineConfig, files: ModelFiles, options: dict[str, Any]) -> None:
        # The model's settings, overridden by the user's; refused before a process is started.
        defaults = asdict(read_defaults(files.folder))
        self._params = SamplingParams(**{**defaults, "max_tokens": None, **options})
        self._process = EngineProcess.spawn(config)
        self._display = LoadingDisplay()
        self._tokenizer = Tokenizer.load_if_present(files)
        self._client: EngineClient | None = None
        self._count = 0
        self.name = files.folder.name

    async def open(self) -> None:
        """Load the model. Raises what loading raises."""
        self._client = await EngineClient(self._process, self._display).__aenter__()
        try:
            await self._client.wait_ready()
        finally:
            self._display.close()

    async def reply(self, messages: list[Message]) -> AsyncIterator[str]:
        """Yield the answer as it is generated. Raises RequestError or EngineDeadError."""
        assert self._client is not None, "open first"
        context = self._client.model_info.max_model_len
        (prompt,) = read_chats(messages, self._tokenizer, context)
        self._count += 1
        new = NewRequest(f"chat-{self._count}", prompt.token_ids, self._params)
        answer = CompletionStream(self._tokenizer, self._params, prompt_token_ids=prompt.token_ids)
        async with aclosing(self._client.stream(new)) as outputs:
            async for output in outputs:
                delta = answer.push(output)
                if delta.finish_reason == "error":
                    raise RequestError(delta.message or "the engine failed")
                yield delta.text
                if answer.stopped_early:
                    break

    async def close(self) -> None:
        """Stop the engine."""
        self._display.close()
        if self._client is not None:
            await self._client.__aexit__(None, None, None)
        self._process.stop()


Chat = ServerChat | EngineChat


def _text_of(data: str) -> str:
    """Return the text of an event. Raises ServerError for an error, and for what is no chunk."""
    try:
        chunk = json.loads(data)
    except ValueError as error:
        raise ServerError(f"the server sent no JSON: {data[:80]!r}") from error
    if "error" in chunk:
        raise ServerError(chunk["error"]["message"])
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


def _reason(body: str) -> str:
    """Return the message of an error body, from OpenAI's envelope if it has one."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.strip()[:200] or "no reason given"
