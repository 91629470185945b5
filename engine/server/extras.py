"""What clients of vLLM ask responses for besides OpenAI's fields: token ids, and running usage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kiln.engine.server.generation import Generation
from kiln.engine.text.outputs import CompletionDelta


class Extras:
    """Adds to the chunks of one stream, or to one response, what its request asks for.

    With ``return_token_ids``, a chat has ``prompt_token_ids`` once, in the response or the first
    chunk, and completions have them in each choice; ``token_ids`` are those of a choice, in chunks
    the new ones. With ``continuous_usage_stats`` each chunk has the token counts so far.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._wants_ids = bool(generation.body.return_token_ids)
        self._wants_usage = generation.body.continuous_usage
        self._held: dict[int, list[int]] = {}  # ids of an output since its last chunk
        self._begun: set[int] = set()  # outputs whose prompt was sent

    def collect(self, index: int, delta: CompletionDelta) -> None:
        """Remember the token ids of a delta for the next chunk of output ``index``."""
        if self._wants_ids:
            self._held.setdefault(index, []).extend(delta.token_ids)

    def chunk(self, chunk: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a chunk of one output, or with the last token counts, with the additions."""
        new = dict(chunk)
        if self._wants_usage and not new.get("usage"):
            new["usage"] = self._generation.usage
        if self._wants_ids and new["choices"]:
            (choice,) = new["choices"]
            index = choice["index"]
            more = {"token_ids": self._held.pop(index, [])}
            if index not in self._begun:
                place = new if self._is_chat(new) else more
                place |= {"prompt_token_ids": self._prompt(index)}
                self._begun |= set(range(self._generation.params.n)) if place is new else {index}
            new["choices"] = [{**choice, **more}]
        return new

    def answer(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a whole response with the additions."""
        if not self._wants_ids:
            return answer
        choices = [
            {**choice, "token_ids": completion.token_ids}
            for choice, completion in zip(
                answer["choices"], self._generation.completions, strict=True
            )
        ]
        if self._is_chat(answer):
            return {**answer, "choices": choices, "prompt_token_ids": self._prompt(0)}
        prompts = [{"prompt_token_ids": self._prompt(choice["index"])} for choice in choices]
        choices = [{**choice, **ids} for choice, ids in zip(choices, prompts, strict=True)]
        return {**answer, "choices": choices}

    def _prompt(self, index: int) -> list[int]:
        generation = self._generation
        return generation.prompts[index // generation.params.n].token_ids

    @staticmethod
    def _is_chat(answer: Mapping[str, Any]) -> bool:
        return str(answer["object"]).startswith("chat.")
