"""The streams of chat completions and completions, with what clients of vLLM ask for besides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast

from kiln.engine.server.errors import ApiError
from kiln.engine.server.forms import Form
from kiln.engine.server.generation import Generation
from kiln.engine.server.responses import Answer, Chunk
from kiln.engine.server.sse import DONE, event
from kiln.engine.text.outputs import CompletionDelta


class ChunkEvents:
    """A stream of chunks that ends with [DONE], with the additions that the request asks for.

    ``return_token_ids``: a chat has ``prompt_token_ids`` once, in its first chunk; completions have
    them in each choice's. ``token_ids`` of a choice are the new ones in a chunk.
    ``continuous_usage_stats``: each chunk has the token counts so far. ``prompt_logprobs``: as of
    vLLM, once in a chat and in each choice of completions. ``include_usage``: the last chunk has
    the token counts.
    """

    def __init__(self, form: Form, generation: Generation) -> None:
        self._form = form
        self._generation = generation
        self._wants_ids = bool(generation.body.return_token_ids)
        self._wants_usage = generation.body.continuous_usage
        self._held: dict[int, list[int]] = {}  # ids of an output since its last chunk
        self._begun: set[int] = set()  # outputs whose prompt was sent

    def opening(self) -> bytes:
        """Return the first events of a stream."""
        return b"".join(event(self._more(chunk)) for chunk in self._form.opening())

    def chunk(self, index: int, delta: CompletionDelta) -> bytes:
        """Return the event of a delta of output ``index``, empty if it says nothing yet."""
        if self._wants_ids:
            self._held.setdefault(index, []).extend(delta.token_ids)
        chunk = self._form.chunk(index, delta)
        return b"" if chunk is None else event(self._more(chunk))

    def closing(self) -> bytes:
        """Return the last events of a stream that is complete."""
        wants_usage = self._generation.body.include_usage
        return (event(self._form.usage_chunk()) if wants_usage else b"") + DONE

    def failure(self, error: ApiError) -> bytes:
        """Return the last events of a stream that failed."""
        return event(error.envelope()) + DONE

    def answer(self) -> Answer:
        """Return the complete response body."""
        answer = self._form.answer()
        completions, is_chat = self._generation.completions, _is_chat(answer)
        choices = []
        for index, choice in enumerate(answer["choices"]):
            ids = {"token_ids": completions[index].token_ids} if self._wants_ids else {}
            choices.append({**choice, **ids, **({} if is_chat else self._of_prompt(index))})
        whole = self._of_prompt(0) if is_chat else {}
        return cast(Answer, {**answer, "choices": choices, **whole})

    def _more(self, chunk: Chunk) -> Chunk:
        """Return the chunk of one output with the additions."""
        new: dict[str, Any] = dict(chunk)
        if self._wants_usage:
            new["usage"] = self._generation.usage
        if self._wants_ids:
            (choice,) = chunk["choices"]
            index = choice["index"]
            ids = {"token_ids": self._held.pop(index, [])}
            if _is_chat(chunk) and not self._begun:
                new["prompt_token_ids"] = self._prompt(0)
            elif not _is_chat(chunk) and index not in self._begun:
                ids["prompt_token_ids"] = self._prompt(index)
            self._begun.add(index)
            new["choices"] = [{**choice, **ids}]
        return cast(Chunk, new)

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
        generation = self._generation
        return generation.prompts[index // generation.params.n].token_ids


def _is_chat(answer: Mapping[str, Any]) -> bool:
    return str(answer["object"]).startswith("chat.")
