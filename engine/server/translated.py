"""Admit the bodies of other APIs as chats, which they are translated to."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request

from kiln.engine.errors import RequestError
from kiln.engine.server.admission import admit
from kiln.engine.server.errors import ApiError, from_engine, from_validation
from kiln.engine.server.generation import Generation
from kiln.engine.server.protocol import ChatCompletionRequest
from kiln.engine.server.serving import Serving
from kiln.engine.text.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Translated:
    """A body of another API.

    ``names`` is for errors: a pattern for the beginning of a chat's field -> what it is there.
    """

    serving: Serving
    request: Request
    translate: Callable[[], Mapping[str, Any]]
    names: Mapping[str, str]

    async def admit(self) -> Generation:
        """Return the generation of the chat. Raises ApiError with the body's own names."""
        with self._own_names():
            return await admit(self.serving, self.request, await self._chat())

    async def prompt(self) -> Prompt:
        """Return the tokens of the chat's prompt, of any length. Raises ApiError."""
        with self._own_names():
            chat = await self._chat()
            self.serving.require_model(chat.model)
            tokenizer = self.serving.tokenizer
            [prompt] = await self.serving.threads.run_for(
                self.request, lambda: chat.read_prompts(tokenizer, sys.maxsize)
            )
            return prompt

    async def _chat(self) -> ChatCompletionRequest:
        def work() -> ChatCompletionRequest:
            try:
                return ChatCompletionRequest.model_validate(self.translate())
            except ValidationError as error:
                raise from_validation(error, ChatCompletionRequest) from None

        return await self.serving.threads.run_for(self.request, work)

    @contextmanager
    def _own_names(self) -> Iterator[None]:
        """Give errors the names of the body's own fields. Raises ApiError."""
        try:
            yield
        except (ApiError, RequestError) as error:
            told = error if isinstance(error, ApiError) else from_engine(error)
            param = told.param or ""
            for pattern, name in self.names.items():
                found = re.match(rf"{pattern}(?![\w])", param)
                if found is not None:
                    told.param = found.expand(name) + param[found.end() :]
                    told.message = told.message.replace(param, told.param, 1)
                    break
            raise told from error
