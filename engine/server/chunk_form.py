"""What chat completions and completions have in common, whole and in chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar

from kiln.engine.requests.request import CompletionOutput
from kiln.engine.server.errors import ApiError
from kiln.engine.server.generation import Generation
from kiln.engine.server.logprobs import LogprobWriter
from kiln.engine.server.responses import encode_json
from kiln.engine.server.sse import DONE, event, json_line
from kiln.engine.text.outputs import CompletionDelta


class ChunkForm:
    """Formats the response to one request: an ``EventForm`` whose stream ends with [DONE].

    It has the additions that clients of vLLM ask for. ``return_token_ids``: a chat has
    ``prompt_token_ids`` once, in its first chunk; completions have them in each choice's.
    ``token_ids`` of a choice are the new ones in a chunk. ``continuous_usage_stats``: each chunk
    has the token counts so far. ``prompt_logprobs``: as of vLLM, once in a chat and in each choice
    of completions. ``include_usage``: the last chunk has the token counts.
    """

    is_chat: ClassVar[bool]
    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]  # the field "object" of a whole response
    chunk_object: ClassVar[str]
    part_field: ClassVar[str]  # the field of a chunk's choice that has what is new

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._created = int(time.time())
        self._streaming = generation.body.streaming
        self._wants_ids = bool(generation.body.return_token_ids)
        count = generation.params.logprobs
        tokenizer = generation.serving.tokenizer
        self._logprobs = None if count is None else LogprobWriter(tokenizer, count)
        self._frames: dict[tuple[int, str], list[bytes]] = {}  # see ``_framed``
        # Whether most chunks of an output differ in nothing but their text.
        self._has_frames = not (
            self._wants_ids or count is not None or self._streaming.continuous_usage_stats
        )
        self._held: dict[int, list[int]] = {}  # ids of an output since its last chunk
        self._begun: set[int] = set()  # outputs whose prompt was sent

    def begin(self, index: int) -> object:
        """Return what the first chunk of output ``index`` has; None if there is no such chunk."""
        raise NotImplementedError

    def part(self, index: int, delta: CompletionDelta) -> object:
        """Return what a delta adds to output ``index``; an empty value if nothing."""
        raise NotImplementedError

    def written(self, part: Any) -> object:
        """Return a part as it stands in a chunk."""
        raise NotImplementedError

    def text(self, part: Any) -> tuple[str, str]:
        """Return the text of a part and what it is; ("", "") if the part has more than one text."""
        raise NotImplementedError

    def with_text(self, text: str, field: str) -> object:
        """Return the part of which ``text`` returns these."""
        raise NotImplementedError

    def choice(self, one: CompletionOutput) -> Mapping[str, object]:
        """Return a complete output."""
        raise NotImplementedError

    def positions(self, part: CompletionDelta | CompletionOutput) -> Any:
        """Return the log-probabilities of some tokens; None if they are not requested."""
        raise NotImplementedError

    def opening(self) -> bytes:
        """Return the first events of a stream."""
        begun = {one.index: self.begin(one.index) for one in self._generation.completions}
        return b"".join(
            self._chunk(self._new_choice(index, part))
            for index, part in begun.items()
            if part is not None
        )

    def chunk(self, index: int, delta: CompletionDelta) -> bytes:
        """Return the event of a delta of output ``index``, empty if all its text is held back."""
        if self._wants_ids:
            self._held.setdefault(index, []).extend(delta.token_ids)
        part = self.part(index, delta)
        if not (part or delta.logprobs or delta.finish_reason):
            return b""
        if self._has_frames and delta.finish_reason is None:
            text, field = self.text(part)
            if text:
                return self._framed(index, text, field)
        choice = self._new_choice(index, self.written(part), self.positions(delta))
        if delta.finish_reason is not None:
            choice["finish_reason"] = self._generation.finish_reason(index)
            choice["stop_reason"] = delta.stop_reason
            choice["seed"] = self._generation.completions[index].seed
        return self._chunk(choice)

    def _framed(self, index: int, text: str, field: str) -> bytes:
        """Return the event of a chunk that differs from others of its output in its text alone.

        The rest is encoded once, with the request id in the place of the text. As a JSON string of
        its own the id occurs nowhere else in a chunk, so splitting there gives what surrounds it.
        """
        frame = self._frames.get((index, field))
        if frame is None:
            mark = self._generation.request_id
            part = self.written(self.with_text(mark, field))
            chunk = self._chunk(self._new_choice(index, part))
            frame = self._frames[index, field] = chunk.split(encode_json(mark))
        return json_line(text).join(frame)

    def closing(self) -> bytes:
        """Return the last events of a stream that is complete."""
        if not self._streaming.include_usage:
            return DONE
        return event({**self._head(self.chunk_object, []), "usage": self._generation.usage}) + DONE

    def failure(self, error: ApiError) -> bytes:
        """Return the last events of a stream that failed."""
        return event(error.envelope()) + DONE

    def answer(self) -> dict[str, Any]:
        """Return the complete response body."""
        choices = []
        for one in self._generation.completions:
            ids = {"token_ids": one.token_ids} if self._wants_ids else {}
            prompt = {} if self.is_chat else self._of_prompt(one.index)
            choices.append({**self.choice(one), **ids, **prompt})
        whole = {**self._head(self.whole_object, choices), "usage": self._generation.usage}
        return {**whole, **self._of_prompt(0)} if self.is_chat else whole

    def _head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{self.id_prefix}-{self._generation.request_id}",
            "object": kind,
            "created": self._created,
            "model": self._generation.served.name,
            "choices": choices,
        }

    def _new_choice(self, index: int, part: object, logprobs: object = None) -> dict[str, Any]:
        return {"index": index, self.part_field: part, "logprobs": logprobs, "finish_reason": None}

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        """Return the event of a chunk of one choice, with the additions."""
        chunk, index = self._head(self.chunk_object, [choice]), choice["index"]
        if self._streaming.continuous_usage_stats:
            chunk["usage"] = self._generation.usage
        elif self._streaming.include_usage:
            chunk["usage"] = None
        if self._wants_ids:
            choice["token_ids"] = self._held.pop(index, [])
            if not (self._begun if self.is_chat else index in self._begun):
                (chunk if self.is_chat else choice)["prompt_token_ids"] = self._prompt(index)
            self._begun.add(index)
        return event(chunk)

    def _of_prompt(self, index: int) -> dict[str, Any]:
        """Return what an answer tells of the prompt of output ``index``."""
        told: dict[str, Any] = {}
        if self._wants_ids:
            told["prompt_token_ids"] = self._prompt(index)
        if self._generation.body.prompt_logprobs is not None:
            told["prompt_logprobs"] = [
                None if entries is None else {str(one): asdict(own) for one, own in entries.items()}
                for entries in self._generation.prompt_logprobs(index) or ()
            ]
        return told

    def _prompt(self, index: int) -> list[int]:
        return self._generation.prompt(index).token_ids
