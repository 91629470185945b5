"""Turn a request's tokens into its output: text, log-probabilities and finish reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kiln.engine.grammar.grammar import Grammar, grammar_of
from kiln.engine.requests.request import (
    CompletionOutput,
    FinishReason,
    Logprob,
    NewRequest,
    TokenLogprobs,
    TokenOutput,
    merged,
)
from kiln.engine.requests.sampling_params import SamplingParams
from kiln.engine.text.bad_words import with_bad_words
from kiln.engine.text.detokenizer import Detokenizer
from kiln.engine.text.prompts import Prompt
from kiln.engine.text.tokenizer import Tokenizer


class CompletionDelta(NamedTuple):
    """The part of an output that one ``TokenOutput`` adds.

    ``text`` may differ from the text of ``token_ids``: an incomplete character and a possible stop
    string are held back for a later delta. ``message`` explains an error. ``text_offsets`` as in
    CompletionOutput.
    """

    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    message: str | None = None
    text_offsets: list[int] | None = None


class CompletionStream:
    """One streaming output; ``completion`` accumulates it.

    The text keeps the special tokens in ``shown``, whatever ``skip_special_tokens`` says.

    Stop strings are detected here, because the core handles no text; but one that is the text of a
    special token is a stop token of the core, since such text may be left out of the output. If
    ``stopped_early`` becomes true, the caller must abort the request in the core and push no more.
    Without a tokenizer the text stays empty. ``prompt_logprobs`` and ``num_cached_tokens`` are
    those of RequestOutput. They are set when the first token arrives.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        *,
        prompt_token_ids: Sequence[int] = (),
        index: int = 0,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        reports = params.logprobs is not None
        self.completion = CompletionOutput(
            index, logprobs=[] if reports else None, text_offsets=[] if reports else None
        )
        self.stop_tokens = _stop_tokens(tokenizer, params)
        self.stopped_early = False
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.num_cached_tokens = 0
        self._params = params
        self._tokenizer = tokenizer
        self._text: list[str] = []
        self._held: TokenOutput | None = None
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(
                tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                stop=params.stop_strings,
                include_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
                context=prompt_token_ids,
                with_offsets=reports,
                shown=shown,
            )
        # Whether an output between the first and the last brings tokens and their text alone.
        self._is_plain = not (
            tokenizer is None
            or reports
            or params.stop_strings
            or params.prompt_logprobs is not None
        )

    def hold(self, output: TokenOutput) -> None:
        """Keep an output for the next push. It must not end the request, nor may its text."""
        held = self._held
        if held is None:
            self._held = output
            return
        held.token_ids.extend(output.token_ids)
        if held.logprobs is not None:
            held.logprobs.extend(output.logprobs or ())

    def push(self, output: TokenOutput) -> CompletionDelta:
        """Add the output of a step and return the delta; ``completion.text`` is set at the end."""
        if self._held is not None:
            output, self._held = merged((self._held, output)), None
        if self._is_plain and output.finish_reason is None and output.seed is None:
            return self._push_plain(output.token_ids)
        text, stopped_by, used = self._decode(output)
        token_ids, logprobs = output.token_ids[:used], output.logprobs
        reason, stop_reason = output.finish_reason, output.stop_reason
        if stopped_by is not None:
            self.stopped_early = reason is None
            reason, stop_reason = "stop", None
        if output.seed is not None:
            self.completion.seed = output.seed
            self.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = [None, *(self._logprobs(output.prompt_logprobs) or ())]
        delta = CompletionDelta(
            text=text,
            token_ids=token_ids,
            logprobs=self._logprobs(None if logprobs is None else logprobs[:used]),
            finish_reason=reason,
            stop_reason=stop_reason if stopped_by is None else stopped_by,
            message=output.message,
            text_offsets=self._offsets(used),
        )
        self._append(delta)
        return delta

    def _push_plain(self, token_ids: list[int]) -> CompletionDelta:
        """Add tokens that bring text and nothing else, as most do."""
        assert self._detokenizer is not None
        text = self._detokenizer.push(token_ids)
        self._text.append(text)
        self.completion.token_ids += token_ids
        return CompletionDelta(text, token_ids)

    def _decode(self, output: TokenOutput) -> tuple[str, str | None, int]:
        """Return the new text, the stop string that ended it, and how many tokens were used.

        Queued outputs are merged, so tokens may follow a stop string; those are discarded, as if
        the request had been aborted in time.
        """
        detokenizer, count = self._detokenizer, len(output.token_ids)
        if detokenizer is None:
            return "", None, count
        shown, includes, ended_by = output.token_ids, self._params.include_stop_str_in_output, None
        if output.finish_reason == "stop":
            ended_by = self.stop_tokens.get(shown[-1])
            if ended_by is not None or not includes:
                shown = shown[:-1]  # the stop token is in token_ids, but not in the text
        before = detokenizer.num_tokens
        text = detokenizer.push(shown)
        if detokenizer.stopped_by is not None:
            count = detokenizer.num_tokens - before
        if output.finish_reason is not None:
            text += detokenizer.finish()
        if detokenizer.stopped_by is None and ended_by is not None:
            return text + (ended_by if includes else ""), ended_by, count
        return text, detokenizer.stopped_by, count

    def _offsets(self, count: int) -> list[int] | None:
        """Return where the last ``count`` tokens begin; None without log-probabilities."""
        if self.completion.text_offsets is None:
            return None
        if self._detokenizer is None:
            return [0] * count
        known, position = self._detokenizer.offsets, self._detokenizer.position
        known += [position] * (len(self.completion.token_ids) + count - len(known))
        return known[len(known) - count :]

    def _append(self, delta: CompletionDelta) -> None:
        completion = self.completion
        self._text.append(delta.text)
        completion.token_ids += delta.token_ids
        if completion.logprobs is not None:
            completion.logprobs += delta.logprobs or []
        if completion.text_offsets is not None:
            completion.text_offsets += delta.text_offsets or []
        completion.finish_reason = delta.finish_reason
        completion.stop_reason = delta.stop_reason
        completion.error = delta.message
        if delta.finish_reason is not None:
            completion.text = "".join(self._text)

    def _logprobs(self, logprobs: list[TokenLogprobs] | None) -> list[dict[int, Logprob]] | None:
        """Return vLLM's format: for each position, the sampled token and the most likely ones."""
        if logprobs is None:
            return None
        return [
            {
                token_id: Logprob(logprob, rank, self._token_text(token_id))
                for token_id, logprob, rank in [(at.token_id, at.logprob, at.rank), *at.top]
            }
            for at in logprobs
        ]

    def _token_text(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_text(token_id)


@dataclass(frozen=True, slots=True)
class Answer:
    """One of the ``n`` outputs for a prompt: its request to the engine, and its stream."""

    new: NewRequest
    stream: CompletionStream


def begin_answers(  # noqa: PLR0913 (all that an answer depends on)
    name: str,
    prompt: Prompt,
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    first: int = 0,
    adapter: str | None = None,
    shown: frozenset[int] = frozenset(),
    priority: int = 0,
    grammar: Grammar | None = None,
) -> list[Answer]:
    """Return the ``n`` outputs for a prompt, with indices from ``first`` on, from an adapter.

    Each request id is ``name`` plus the index. The text has the special tokens in ``shown``.
    ``grammar`` is that of the whole output; None: that of the structured outputs in ``params``, if
    any. Raises RequestError for bad words without a tokenizer, and for a grammar that cannot be
    read.
    """
    made = []
    params = with_bad_words(params, tokenizer)
    if grammar is None and params.structured_outputs is not None:
        grammar = grammar_of(params.structured_outputs)
    text = None if grammar is None else grammar.text
    params = params.replace(structured_outputs=None)  # the engine needs its grammar only
    for index in range(first, first + params.n):
        own, ids = params.for_answer(index - first), prompt.token_ids
        stream = CompletionStream(tokenizer, own, prompt_token_ids=ids, index=index, shown=shown)
        stops = tuple(stream.stop_tokens)
        salt = prompt.cache_salt
        new = NewRequest(f"{name}-{index}", ids, own, adapter, stops, priority, salt, text)
        made.append(Answer(new, stream))
    return made


def _stop_tokens(tokenizer: Tokenizer | None, params: SamplingParams) -> dict[int, str]:
    """Return the special tokens whose text is a stop string, with that string."""
    if tokenizer is None:
        return {}
    found = {tokenizer.special_id(stop): stop for stop in params.stop_strings}
    return {token: stop for token, stop in found.items() if token is not None}
