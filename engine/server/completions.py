"""Completions in OpenAI's format, whole and streamed."""

from __future__ import annotations

from kiln.engine.requests.request import CompletionOutput
from kiln.engine.server.chunk_form import ChunkForm
from kiln.engine.server.responses import CompletionChoice, CompletionLogprobs, finish_reason
from kiln.engine.text.outputs import CompletionDelta


class CompletionForm(ChunkForm):
    """Formats the response to a completions request; ``echo`` prepends the prompt to outputs."""

    is_chat = False
    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"
    part_field = "text"

    def begin(self, index: int) -> str | None:
        """Return the echoed prompt, if requested."""
        return self._prompt_text(index) if self._generation.body.echo else None

    def part(self, index: int, delta: CompletionDelta) -> str:
        """Return the new text."""
        return delta.text

    def written(self, part: str) -> str:
        """Return the new text."""
        return part

    def text(self, part: str) -> tuple[str, str]:
        """Return the new text."""
        return part, "text"

    def with_text(self, text: str, field: str) -> str:
        """Return the text."""
        return text

    def choice(self, one: CompletionOutput) -> CompletionChoice:
        """Return a complete output."""
        body, text, logprobs = self._generation.body, one.text, self.positions(one)
        ended, by = finish_reason(one.finish_reason), one.stop_reason
        if body.only_echoes:
            text, logprobs, ended, by = "", None, "length", None
        if body.echo:
            prompt = self._prompt_text(one.index)
            text = prompt + text
            reported = self._generation.prompt_logprobs(one.index)
            if self._logprobs is not None and reported is not None:
                ids = self._prompt(one.index)
                logprobs = self._logprobs.echoed(ids, reported, logprobs, prompt)
        return {
            "index": one.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": ended,
            "stop_reason": by,
            "seed": one.seed,
        }

    def positions(self, part: CompletionDelta | CompletionOutput) -> CompletionLogprobs | None:
        """Return the log-probabilities of some tokens; None if they are not requested."""
        return None if self._logprobs is None else self._logprobs.completion(part)

    def _prompt_text(self, index: int) -> str:
        prompt, tokenizer = self._generation.prompt(index), self._generation.serving.tokenizer
        if prompt.text is None and tokenizer is not None:
            return tokenizer.decode(prompt.token_ids)
        return prompt.text or ""
