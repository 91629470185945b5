"""Completions in OpenAI's format, whole and streamed."""

from __future__ import annotations

import time

from kiln.engine.requests.request import CompletionOutput
from kiln.engine.server.generation import Generation
from kiln.engine.server.logprobs import LogprobWriter
from kiln.engine.server.responses import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    finish_reason,
)
from kiln.engine.text.outputs import CompletionDelta


class CompletionForm:
    """Formats the response to a completions request; ``echo`` prepends the prompt to outputs."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._model = generation.served.name
        self._include_usage = generation.body.include_usage
        self._echo = generation.body.echoes
        self._id = f"cmpl-{generation.request_id}"
        self._created = int(time.time())
        count = generation.params.logprobs
        tokenizer = generation.serving.tokenizer
        self._logprobs = None if count is None else LogprobWriter(tokenizer, count)

    def opening(self) -> list[Completion]:
        """Return the echoed prompts, if requested."""
        if not self._echo:
            return []
        indices = range(len(self._generation.completions))
        return [self._chunk(self._choice(index, self._prompt(index))) for index in indices]

    def chunk(self, index: int, delta: CompletionDelta) -> Completion | None:
        """Return the chunk of a delta of output ``index``; None if all its text is held back."""
        if not (delta.text or delta.logprobs or delta.finish_reason):
            return None
        choice = self._choice(index, delta.text, self._write_logprobs(delta))
        if delta.finish_reason is not None:
            choice["finish_reason"] = finish_reason(delta.finish_reason)
            choice["stop_reason"] = delta.stop_reason
            choice["seed"] = self._generation.completions[index].seed
        return self._chunk(choice)

    def usage_chunk(self) -> Completion:
        """Return the last chunk, with the token counts and no choices."""
        return {**self._chunk(), "usage": self._generation.usage}

    def answer(self) -> Completion:
        """Return the complete response body."""
        choices = [self._whole(one) for one in self._generation.completions]
        return {**self._chunk(*choices), "usage": self._generation.usage}

    def _whole(self, one: CompletionOutput) -> CompletionChoice:
        """Return a complete output."""
        prompt, text = self._prompt(one.index), one.text
        logprobs = self._write_logprobs(one)
        ended, by = finish_reason(one.finish_reason), one.stop_reason
        if self._generation.body.only_echoes:
            text, logprobs, ended, by = "", None, "length", None
        reported = self._generation.prompt_logprobs(one.index)
        if self._echo and self._logprobs is not None and reported is not None:
            ids = self._generation.prompts[one.index // self._generation.params.n].token_ids
            logprobs = self._logprobs.echoed(ids, reported, logprobs, prompt)
        return {
            "index": one.index,
            "text": prompt + text,
            "logprobs": logprobs,
            "finish_reason": ended,
            "stop_reason": by,
            "seed": one.seed,
        }

    def _chunk(self, *choices: CompletionChoice) -> Completion:
        chunk: Completion = {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": list(choices),
        }
        if self._include_usage:
            chunk["usage"] = None
        return chunk

    def _choice(
        self, index: int, text: str, logprobs: CompletionLogprobs | None = None
    ) -> CompletionChoice:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _prompt(self, index: int) -> str:
        """Return the text to echo before output ``index``."""
        generation = self._generation
        prompt = generation.prompts[index // generation.params.n]
        if not self._echo:
            return ""
        if prompt.text is None and generation.serving.tokenizer is not None:
            return generation.serving.tokenizer.decode(prompt.token_ids)
        return prompt.text or ""

    def _write_logprobs(
        self, part: CompletionDelta | CompletionOutput
    ) -> CompletionLogprobs | None:
        return None if self._logprobs is None else self._logprobs.completion(part)
