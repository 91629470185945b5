"""Run the prompts of one HTTP request: one token stream, ``n`` outputs for each prompt."""

from __future__ import annotations

import time
import uuid
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from kiln.engine.errors import KilnError, RequestError, field_error
from kiln.engine.grammar.grammar import Grammar, grammar_of
from kiln.engine.process.token_stream import TokenStream
from kiln.engine.requests.request import CompletionOutput, Logprob, TokenOutput
from kiln.engine.requests.sampling_params import SamplingParams
from kiln.engine.requests.structured_outputs import FIELD
from kiln.engine.server.metrics import Metrics
from kiln.engine.server.protocol import GenerationRequest
from kiln.engine.server.responses import ChatFinishReason, Usage, finish_reason
from kiln.engine.server.serving import ServedModel, Serving
from kiln.engine.text.outputs import Answer, CompletionDelta, begin_answers
from kiln.engine.text.prompts import Prompt
from kiln.engine.text.replies.choice import ReplyFormats
from kiln.engine.text.replies.deltas import ReplyDelta
from kiln.engine.text.replies.reader import ReplyReader
from kiln.engine.text.replies.reply_grammar import Demands
from kiln.engine.text.tokenizer import Tokenizer


class GenerationError(KilnError):
    """One request failed in the engine; the others continue."""


@dataclass(slots=True)
class Generation:
    """The outputs of one HTTP request.

    ``read`` each output of ``tokens`` after ``start``, or ``collect`` them; ``completions`` are
    complete then.
    """

    serving: Serving
    served: ServedModel
    body: GenerationRequest
    prompts: list[Prompt]
    params: SamplingParams
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: float = field(default_factory=time.monotonic)
    cached_tokens: int = 0
    queue_seconds: float | None = None  # of the first output
    first_token_seconds: float | None = None
    tokens: TokenStream = field(init=False)  # set by ``start``
    _answers: dict[str, Answer] = field(default_factory=dict)
    _readers: dict[int, ReplyReader] = field(default_factory=dict)
    _last_token: dict[str, float] = field(default_factory=dict)  # arrival of the newest token

    def __post_init__(self) -> None:
        """Create the engine requests."""
        tools, formats = self.body.reply_tools, self.serving.settings.replies
        tokenizer, shown = self.serving.tokenizer, frozenset[int]()
        if tools is not None and tokenizer is not None:
            shown = tokenizer.ids_of(formats.marks(with_tools=bool(tools)))
            self.params = _ending_replies(self.params, tokenizer, formats)
        params, adapter, priority = self.params, self.served.adapter, self.body.priority or 0
        for number, prompt in enumerate(self.prompts):
            first, salted = number * params.n, replace(prompt, cache_salt=self.body.cache_salt)
            form = self._grammar(prompt)
            for answer in begin_answers(
                self.request_id, salted, params, tokenizer, first, adapter, shown, priority, form
            ):
                self._answers[answer.new.request_id] = answer
                if tools is not None:
                    self._readers[answer.stream.completion.index] = formats.reader(
                        tools, prompt=prompt.text or "", parallel=self.body.keeps_all_calls
                    )

    def _grammar(self, prompt: Prompt) -> Grammar | None:
        """Return the grammar of a chat's reply; None if it may be anything, or there is no chat."""
        tools, tokenizer = self.body.reply_tools, self.serving.tokenizer
        if tools is None or tokenizer is None:
            return None
        form = self.params.structured_outputs
        content = None if form is None else grammar_of(form)
        demands = Demands(tools, self.body.chosen_tools, self.body.keeps_all_calls, content)
        formats = self.serving.settings.replies
        return formats.grammar(demands, prompt.text or "", tokenizer.special_id)

    @property
    def completions(self) -> list[CompletionOutput]:
        """The outputs in the order of their indices."""
        return [answer.stream.completion for answer in self._answers.values()]

    def prompt(self, index: int) -> Prompt:
        """Return the prompt of output ``index``."""
        return self.prompts[index // self.params.n]

    def prompt_logprobs(self, index: int) -> list[dict[int, Logprob] | None] | None:
        """Return the log-probabilities of the prompt of output ``index``, if requested."""
        first = index - index % self.params.n
        return self._answers[f"{self.request_id}-{first}"].stream.prompt_logprobs

    @property
    def usage(self) -> Usage:
        """The token counts so far; a prompt counts once, regardless of ``n``."""
        prompt = sum(len(prompt.token_ids) for prompt in self.prompts)
        completion = sum(len(one.token_ids) for one in self.completions)
        if self.body.only_echoes:  # the engine generates a token, which nobody gets
            completion = 0
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    @property
    def grammar(self) -> str | None:
        """The grammar of the outputs, if they have one."""
        return next((answer.new.grammar for answer in self._answers.values()), None)

    async def check_grammar(self, grammar: str) -> None:
        """Raise RequestError if the engine could not use the grammar of the outputs."""
        try:
            if self.serving.tokenizer is None:
                raise field_error(FIELD, "the model is loaded without a tokenizer, which it needs")
            await self.serving.grammars.check(grammar)
        except RequestError as error:
            raise self.body.with_own_name(error) from error

    def start(self) -> TokenStream:
        """Send the requests to the engine and return ``tokens``, the stream of their outputs.

        Closing it early aborts the unfinished requests in the engine. Raises EngineDeadError.
        """
        self.tokens = self.serving.client.stream(*(one.new for one in self._answers.values()))
        return self.tokens

    def read(self, output: TokenOutput) -> tuple[int, CompletionDelta]:
        """Return the index of an output, and what it adds. Raises GenerationError."""
        answer = self._answers[output.request_id]
        delta = answer.stream.push(output)
        if answer.stream.stopped_early:
            self.tokens.drop(output.request_id)
        if delta.finish_reason == "error":
            raise self._failure(delta.message or "the engine failed")
        self._measure(answer, output, delta)
        return answer.stream.completion.index, delta

    def _failure(self, message: str) -> KilnError:
        """Return the error of an output: of its grammar, which is the client's, or another."""
        where = message.find(f"{FIELD}: ")
        if self.grammar is None or where < 0:
            return GenerationError(message)
        return self.body.with_own_name(RequestError(message[where:], FIELD))

    def reply(self, index: int, delta: CompletionDelta) -> ReplyDelta:
        """Return what a delta adds to the message of output ``index`` of a chat.

        To be called for each delta of ``read``, in their order.
        """
        return self._readers[index].push(delta.text, last=delta.finish_reason is not None)

    def whole_reply(self, index: int) -> ReplyDelta:
        """Return the whole message of output ``index`` of a chat, after ``collect``."""
        return self._readers[index].push(self.completions[index].text, last=True)

    def finish_reason(self, index: int) -> ChatFinishReason | None:
        """Return OpenAI's reason for the end of output ``index``."""
        reason, reader = (
            finish_reason(self.completions[index].finish_reason),
            self._readers.get(index),
        )
        forced = self.body.chosen_tools.forced  # OpenAI's reason is then "stop"
        called = reason == "stop" and reader is not None and reader.has_calls and not forced
        return "tool_calls" if called else reason

    async def collect(self) -> list[CompletionOutput]:
        """Wait for all outputs and return them.

        Raises EngineDeadError, RequestError, SlowReaderError or GenerationError.
        """

        def take(output: TokenOutput) -> bool:
            self.read(output)
            return False

        async with aclosing(self.start()) as tokens:
            await tokens.feed(take)
        return self.completions

    def _measure(self, answer: Answer, output: TokenOutput, delta: CompletionDelta) -> None:
        metrics: Metrics = self.serving.metrics
        now = time.monotonic()
        last = self._last_token.get(output.request_id)
        self._last_token[output.request_id] = now
        if last is not None:
            metrics.tokens.next(len(delta.token_ids), now - last)
        else:
            metrics.tokens.first(len(delta.token_ids))
            metrics.time_to_first_token.observe(now - self.started)
            if self.first_token_seconds is None:
                self.first_token_seconds = now - self.started
                self.queue_seconds = output.queue_seconds
            if output.queue_seconds is not None:
                metrics.queue_time.observe(output.queue_seconds)
            if answer.stream.completion.index % self.params.n == 0:  # once, as in ``usage``
                self.cached_tokens += output.num_cached_tokens
                metrics.tokens.add_prompt(len(answer.new.prompt_token_ids))
                metrics.prompt_length.observe(len(answer.new.prompt_token_ids))
        if delta.finish_reason is not None:
            metrics.request_success.labels(delta.finish_reason).inc()
            metrics.e2e_request_latency.observe(now - self.started)
            metrics.output_length.observe(len(answer.stream.completion.token_ids))


def _ending_replies(
    params: SamplingParams, tokenizer: Tokenizer, formats: ReplyFormats
) -> SamplingParams:
    """Return the parameters with the stop tokens of the model's replies.

    They are added unless ``ignore_eos`` is set, because they end a reply as an EOS token does.
    """
    stops = sorted(tokenizer.ids_of(formats.stops) - tokenizer.eos_token_ids)
    if params.ignore_eos or not stops:
        return params
    return replace(params, stop_token_ids=(*(params.stop_token_ids or ()), *stops))
