"""Admit the bodies of other APIs as chats, which they are translated to."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from kiln.engine.errors import RequestError
from kiln.engine.server.admission import admit
from kiln.engine.server.disconnect import unless_gone
from kiln.engine.server.errors import ApiError, from_engine, from_validation
from kiln.engine.server.generation import Generation
from kiln.engine.server.protocol import ChatCompletionRequest
from kiln.engine.server.serving import Serving
from kiln.engine.text.prompts import Prompt

T = TypeVar("T")
Translate = Callable[[], Mapping[str, Any]]


class Translated:
    """A body of another API.

    ``names`` is for errors: a pattern for the beginning of a chat's field -> what it is there.
    """

    def __init__(
        self, serving: Serving, request: Request, translate: Translate, names: Mapping[str, str]
    ) -> None:
        self._serving = serving
        self._request = request
        self._translate = translate
        self._names = names

    async def admit(self) -> Generation:
        """Return the generation of the chat. Raises ApiError with the body's own names."""
        try:
            return await admit(self._serving, self._request, await self._chat())
        except ApiError as error:
            raise self._renamed(error) from error

    async def prompt(self) -> Prompt:
        """Return the tokens of the chat's prompt, of any length. Raises ApiError."""
        try:
            chat = await self._chat()
            self._serving.require_model(chat.model)
            tokenizer = self._serving.tokenizer
            [prompt] = await self._run(lambda: chat.read_prompts(tokenizer, sys.maxsize))
        except RequestError as error:
            raise self._renamed(from_engine(error)) from error
        except ApiError as error:
            raise self._renamed(error) from error
        return prompt

    async def _chat(self) -> ChatCompletionRequest:
        def work() -> ChatCompletionRequest:
            try:
                return ChatCompletionRequest.model_validate(self._translate())
            except ValidationError as error:
                raise from_validation(error, ChatCompletionRequest) from None

        return await self._run(work)

    async def _run(self, work: Callable[[], T]) -> T:
        """Run work outside the event loop."""
        size = len(await self._request.body())  # cached
        return await unless_gone(self._request.receive, self._serving.threads.run(work, size))

    def _renamed(self, error: ApiError) -> ApiError:
        """Give an error the names of the body's own fields."""
        param = error.param or ""
        for pattern, name in self._names.items():
            found = re.match(rf"{pattern}(?![\w])", param)
            if found is not None:
                error.param = found.expand(name) + param[found.end() :]
                error.message = error.message.replace(param, error.param, 1)
                break
        return error
