"""A chat with an engine in a process of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from kiln.engine.cli.chat.backend import Message, Piece
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
from kiln.engine.text.replies.choice import choose_formats
from kiln.engine.text.tokenizer import Tokenizer


class EngineChat:
    """A Backend that loads a model, and the LoRA adapters of its configuration."""

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        options: Mapping[str, Any],
        chat_template: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        # The model's settings, overridden by the user's; refused before a process is started.
        defaults = asdict(read_defaults(files.folder))
        self._params = SamplingParams(**{**defaults, "max_tokens": None, **options})
        choose_formats((), reasoning_parser=reasoning_parser)
        self._process = EngineProcess.spawn(config)
        try:  # while the process imports torch
            self._tokenizer = Tokenizer.load_if_present(files, chat_template)
            templates = [] if self._tokenizer is None else self._tokenizer.chat_template_sources
            self._formats = choose_formats(templates, reasoning_parser=reasoning_parser)
        except KilnError:
            self._process.stop()
            raise
        self._display = LoadingDisplay()
        self._client: EngineClient | None = None
        self._count = 0
        self._base = files.folder.name
        self._adapters = [module.name for module in config.lora.modules]
        self.name = self._base
        self.finish_reason: str | None = None

    async def open(self) -> None:
        """Load the model. Raises what loading raises."""
        self._client = await EngineClient(self._process, self._display).__aenter__()
        try:
            await self._client.wait_ready()
        finally:
            self._display.close()

    async def names(self) -> list[str]:
        """Return the name of the model, and those of its adapters."""
        return [self._base, *self._adapters]

    async def reply(self, messages: list[Message]) -> AsyncIterator[Piece]:
        """Yield the answer as it is generated. Raises RequestError or EngineDeadError."""
        assert self._client is not None, "open first"
        self.finish_reason = None
        context = self._client.model_info.max_model_len
        (prompt,) = read_chats(messages, self._tokenizer, context)
        self._count += 1
        adapter = self.name if self.name in self._adapters else None
        new = NewRequest(f"chat-{self._count}", prompt.token_ids, self._params, adapter)
        marks = self._formats.marks(with_tools=False)
        shown = frozenset[int]() if self._tokenizer is None else self._tokenizer.ids_of(marks)
        answer = CompletionStream(
            self._tokenizer, self._params, prompt_token_ids=prompt.token_ids, shown=shown
        )
        reader = self._formats.reader(prompt=prompt.text or "")
        async with aclosing(self._client.stream(new)) as outputs:
            async for output in outputs:
                delta = answer.push(output)
                if delta.finish_reason == "error":
                    raise RequestError(delta.message or "the engine failed")
                read = reader.push(delta.text, last=delta.finish_reason is not None)
                if read.reasoning:
                    yield Piece(read.reasoning, is_reasoning=True)
                if read.content:
                    yield Piece(read.content)
                self.finish_reason = delta.finish_reason
                if answer.stopped_early:
                    break

    async def close(self) -> None:
        """Stop the engine."""
        self._display.close()
        if self._client is not None:
            await self._client.__aexit__(None, None, None)
        self._process.stop()
