"""A chat with a server that has OpenAI's API, Kiln's or another."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx

from kiln.engine.cli.chat.backend import Message, Piece, named
from kiln.engine.cli.events import EventReader
from kiln.engine.errors import KilnError

_SHOWN = 300  # characters of what a server says


class ServerError(KilnError):
    """A server cannot be reached, rejected a message, or sent what is no answer."""


class ServerChat:
    """A Backend at an address that ``server_url`` made. ``model`` None: the first one it lists."""

    def __init__(
        self, url: str, api_key: str | None, options: Mapping[str, Any], model: str | None
    ) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._url = url
        self._http = httpx.AsyncClient(headers=headers, timeout=httpx.Timeout(10.0, read=None))
        self._options = options
        self._wanted = model
        self.name = ""
        self.finish_reason: str | None = None

    async def open(self) -> None:
        """Ask for the models. Raises ServerError, and CommandError if the model is not there."""
        names = await self.names()
        self.name = names[0] if self._wanted is None else named(self._wanted, names)

    async def names(self) -> list[str]:
        """Return the models that the server lists, adapters included. Raises ServerError."""
        try:
            answer = await self._http.get(f"{self._url}/v1/models", timeout=10.0)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            told = f"cannot reach {self._url}: {error or type(error).__name__}"
            raise ServerError(told) from error
        if answer.status_code != 200:
            raise ServerError(f"{self._url} answered {answer.status_code}: {_reason(answer.text)}")
        try:
            names = [str(one["id"]) for one in answer.json()["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise _no_api(f"{self._url}/v1/models", answer.text) from error
        if not names:
            raise ServerError(f"{self._url} lists no model")
        return names

    async def reply(self, messages: list[Message]) -> AsyncIterator[Piece]:
        """Yield the answer as it is generated. Raises ServerError."""
        self.finish_reason = None
        body = {"model": self.name, "messages": messages, "stream": True, **self._options}
        url, ended, events = f"{self._url}/v1/chat/completions", False, EventReader()
        try:
            async with self._http.stream("POST", url, json=body) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread()).decode(errors="replace")
                    raise ServerError(f"the server answered {answer.status_code}: {_reason(text)}")
                async for chunk in answer.aiter_bytes():
                    for data in events.push(chunk):
                        ended = ended or data == "[DONE]"
                        for piece in () if data == "[DONE]" else self._read(data):
                            yield piece
        except httpx.HTTPError as error:
            told = f"{type(error).__name__} {error}".strip()
            raise ServerError(f"the connection to {self._url} broke: {told}") from error
        if not ended and self.finish_reason is None:
            raise ServerError("the server closed the stream before the end of the answer")

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    def _read(self, data: str) -> list[Piece]:
        """Return what an event adds. Raises ServerError for an error, and for what is no chunk."""
        pieces = []
        try:
            chunk = json.loads(data)
            if chunk.get("error"):
                raise ServerError(_reason(data))
            for choice in chunk["choices"]:
                delta = choice["delta"]
                thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
                pieces += [Piece(str(thought), is_reasoning=True)] if thought else []
                pieces += [Piece(str(delta["content"]))] if delta.get("content") else []
                self.finish_reason = choice.get("finish_reason") or self.finish_reason
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _no_api(f"{self._url}/v1/chat/completions", data) from error
        return pieces


def _no_api(url: str, text: str) -> ServerError:
    return ServerError(f"{url} does not answer as OpenAI's API does, but with {text[:80]!r}")


def _reason(body: str) -> str:
    """Return the message of an error body as a line, from OpenAI's envelope if it has one."""
    try:
        error = json.loads(body)["error"]
        text = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError):
        text = body
    return " ".join(str(text).split())[:_SHOWN] or "no reason given"
