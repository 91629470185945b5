"""The offline Python API, with vLLM's names: the engine runs in this process."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Unpack

from kiln.engine.config import EngineConfig
from kiln.engine.config_forms import Settings, offline_config
from kiln.engine.core import EngineCore, Progress
from kiln.engine.errors import EngineClosedError, RequestError
from kiln.engine.models.model_folder import find_model_files
from kiln.engine.requests.pooling import EmbeddingRequestOutput, PoolingParams
from kiln.engine.requests.request import NewRequest, RequestOutput, TokenOutput
from kiln.engine.requests.sampling_params import SamplingParams
from kiln.engine.text.embeddings import EmbeddingJob, read_texts, require_embedder
from kiln.engine.text.outputs import Answer, CompletionStream, begin_answers
from kiln.engine.text.prompts import (
    Prompt,
    PromptInput,
    read_chats,
    read_prompts,
    spread_lora,
    spread_params,
    spread_priority,
    truncated,
)
from kiln.engine.text.template_forms import Message
from kiln.engine.text.tokenizer import Tokenizer
from kiln.jit_kernels.compile.ready import ready_guard


class LLM:
    """A model loaded in this process, for batches of prompts.

    ``model`` is a folder in Hugging Face format or a hub id; without a tokenizer it accepts only
    token ids, and so it does with ``skip_tokenizer_init``. ``chat_template`` is a file, the text of
    a template in the place of the model's own, or the name of one of these. The other keywords are
    those of ``kiln.engine.config_forms.Settings``. ``seed`` fixes the tokens of requests without a
    seed, which otherwise differ from one LLM to the next. ``speculative_config`` is
    ``{"method": "ngram", "num_speculative_tokens": 3, …}``. ``tensor_parallel_size`` above 1 shares
    the model with that many less one processes, which ``close`` stops; the end of a ``with`` block
    does so too. Raises ConfigError or ModelError if the model cannot be served, AdapterError naming
    an adapter, TypeError on an unknown keyword.

    >>> llm = LLM("path/to/model", device="cpu", dtype="float32")  # doctest: +SKIP
    >>> outputs = llm.generate(["Hello"], SamplingParams(temperature=0))  # doctest: +SKIP
    >>> outputs[0].outputs[0].text  # doctest: +SKIP
    ', how are you?'
    """

    def __init__(
        self,
        model: str,
        *,
        skip_tokenizer_init: bool = False,
        chat_template: str | None = None,
        progress: Progress | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        config = offline_config(model, settings)
        self._load(config, skip_tokenizer_init, progress, chat_template)

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        *,
        skip_tokenizer_init: bool = False,
        progress: Progress | None = None,
    ) -> LLM:
        """Return an LLM with all settings of a config, ``max_waiting`` included.

        Raises what the constructor raises.
        """
        llm = cls.__new__(cls)
        llm._load(config, skip_tokenizer_init, progress)
        return llm

    def _load(
        self,
        config: EngineConfig,
        skip_tokenizer_init: bool,
        progress: Progress | None,
        chat_template: str | None = None,
    ) -> None:
        files = find_model_files(config.model)
        config = replace(config, model=config.model.at(files.folder, files.tokenizer))
        self.tokenizer = None
        if not skip_tokenizer_init:
            self.tokenizer = Tokenizer.load_if_present(files, chat_template)
        self._core: EngineCore | None = EngineCore(config, progress)
        ready_guard().declare_ready()
        self._request_ids = itertools.count()
        self._lock = threading.Lock()  # of the engine: one call at a time
        self._process_id = os.getpid()

    @property
    def core(self) -> EngineCore:
        """The engine. Raises EngineClosedError after ``close``, and in a fork of this process."""
        if os.getpid() != self._process_id:
            raise EngineClosedError(
                f"this LLM belongs to process {self._process_id}, and its threads and its device "
                f"are not in process {os.getpid()}, a fork of it: make an LLM after the fork"
            )
        if self._core is None:
            raise EngineClosedError("this LLM was closed: make a new one")
        return self._core

    def __enter__(self) -> LLM:
        """Return the LLM."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the LLM."""
        self.close()

    def close(self) -> None:
        """Free all memory and stop the processes of other ranks, after the calls that run.

        Nothing can be generated then. May be repeated; in a fork of this process it does nothing.
        """
        if os.getpid() != self._process_id:
            return
        with self._lock:
            core, self._core = self._core, None
        if core is None:
            return
        # Imported here, as by the core: the rest works without torch.
        from kiln.engine.runner.memory import free_unused

        device_type = core.runner.device_type
        core.close()
        del core
        free_unused(device_type)

    def reset_prefix_cache(self) -> bool:
        """Forget the keys and values of earlier prompts and outputs. Returns True, as in vLLM."""
        with self._lock:
            self.core.reset_prefix_cache()
        return True

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate ``n`` outputs for each prompt and return them in the order of the prompts.

        A prompt is a text, a list of token ids, or vLLM's ``{"prompt": …}`` or
        ``{"prompt_token_ids": …}``, with a ``cache_salt`` if only prompts with the same one may
        share cached prefixes; ``sampling_params`` are one for all or one for each, and so
        are ``lora``, the name of an adapter or None, and ``priority``: a lower one is served
        earlier if ``scheduling_policy`` is "priority". The whole batch is checked before it runs.
        Calls from several threads wait for each other. Raises RequestError naming the prompt and
        the field, EngineClosedError after ``close`` and in a fork of the process.

        >>> greedy = SamplingParams(temperature=0, max_tokens=8)  # doctest: +SKIP
        >>> llm.generate([[1, 2, 3], "Hello"], greedy)[0].outputs[0].token_ids  # doctest: +SKIP
        [17, 4, 4, 2]
        """
        read = read_prompts(prompts, self.tokenizer, self._max_read(sampling_params))
        return self._run(read, spread_params(sampling_params, len(read)), lora, priority)

    def chat(  # noqa: PLR0913 (vLLM's keywords)
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template.

        ``lora`` and ``priority`` as in ``generate``. ``chat_template`` is another template, as a
        file, as text or by its name, ``chat_template_content_format`` "string" or "openai" (parts)
        the form of content that it gets, and ``chat_template_kwargs`` are variables of it.
        ``tools`` are shown to the model. With ``continue_final_message`` the answer is the rest of
        the last message. Raises RequestError.

        >>> llm.chat([{"role": "user", "content": "Hello"}])[0].outputs[0].text  # doctest: +SKIP
        'Hi! How can I help?'
        """
        template = None
        if chat_template is not None:
            if self.tokenizer is None:
                raise RequestError("chat_template: there is no tokenizer", "chat_template")
            template = self.tokenizer.other_template(chat_template)
        read = read_chats(
            messages,
            self.tokenizer,
            self._max_read(sampling_params),
            chat_template=template,
            content_format=chat_template_content_format,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return self._run(read, spread_params(sampling_params, len(read)), lora, priority)

    def embed(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        pooling_params: PoolingParams | None = None,
        *,
        lora: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt, in the order of the prompts.

        The model's folder has the format of sentence-transformers, or ``task`` is "embed". Prompts,
        ``lora`` and ``priority`` as in ``generate``. Raises RequestError naming the prompt and the
        field, EmbeddingError if the engine fails at a prompt, EngineClosedError after ``close`` and
        in a fork of the process.

        >>> len(llm.embed("Hello")[0].outputs.embedding)  # doctest: +SKIP
        1024
        """
        params = pooling_params or PoolingParams()
        job = EmbeddingJob(require_embedder(self.core.runner.embedder, params), params)
        read = read_texts(prompts, self.tokenizer, params, self.core.max_model_len)
        adapters, levels = spread_lora(lora, len(read)), spread_priority(priority, len(read))
        with self._lock:
            for index, one in enumerate(zip(read, adapters, levels, strict=True)):
                with _naming(index):
                    self._check(job.ask(str(next(self._request_ids)), *one))
            self._serve(job.requests.values(), job.take)
        return job.results()

    def _max_read(self, params: SamplingParams | Sequence[SamplingParams] | None) -> int:
        """Return how many tokens a prompt may have before it is truncated."""
        each = [params] if isinstance(params, SamplingParams) else params or ()
        cut = any(isinstance(one, SamplingParams) and one.truncate_prompt_tokens for one in each)
        return sys.maxsize if cut else self.core.max_model_len

    def _run(
        self,
        prompts: list[Prompt],
        params: list[SamplingParams],
        lora: str | Sequence[str | None] | None,
        priority: int | Sequence[int] | None,
    ) -> list[RequestOutput]:
        """Check and queue every request, and run steps until all have finished."""
        with self._lock:
            return self._run_alone(prompts, params, lora, priority)

    def _run_alone(
        self,
        prompts: list[Prompt],
        params: list[SamplingParams],
        lora: str | Sequence[str | None] | None,
        priority: int | Sequence[int] | None,
    ) -> list[RequestOutput]:
        answers: dict[str, Answer] = {}
        results: list[RequestOutput] = []
        firsts: list[CompletionStream] = []
        adapters = spread_lora(lora, len(prompts))
        levels = spread_priority(priority, len(prompts))
        for given, each, adapter, level in zip(prompts, params, adapters, levels, strict=True):
            request_id = str(next(self._request_ids))
            prompt = truncated(given, each, self.core.max_model_len)
            tokenizer = self.tokenizer if each.detokenize else None
            with _naming(len(results)):
                made = begin_answers(
                    request_id, prompt, each, tokenizer, adapter=adapter, priority=level
                )
                self._check(made[0].new)
            answers |= {answer.new.request_id: answer for answer in made}
            outputs = [answer.stream.completion for answer in made]
            results.append(RequestOutput(request_id, given.text, prompt.token_ids, outputs))
            firsts.append(made[0].stream)

        def take(output: TokenOutput) -> None:
            """Make text of tokens at the end of a request, or at once if text can end it."""
            answer = answers[output.request_id]
            if output.finish_reason is None and not answer.new.params.stop:
                answer.stream.hold(output)
                return
            answer.stream.push(output)
            if answer.stream.stopped_early:
                self.core.abort(output.request_id)

        self._serve([answer.new for answer in answers.values()], take)
        for result, first in zip(results, firsts, strict=True):
            result.prompt_logprobs = first.prompt_logprobs
            result.num_cached_tokens = first.num_cached_tokens
        return results

    def _serve(self, requests: Iterable[NewRequest], take: Callable[[TokenOutput], None]) -> None:
        """Queue requests, and run steps until all have finished; ``take`` gets their outputs."""
        try:
            self.core.clear()  # of the last batch, if Ctrl-C came again while it was dropped
            # From here on the garbage collector skips all objects that exist now: steps create many
            # objects, and a full collection of a process with torch takes a tenth of a second.
            gc.freeze()
            for new in requests:
                self.core.add(new)
            while self.core.has_work:
                for output in self.core.step():
                    take(output)
        finally:  # after an error or Ctrl-C, drop the whole batch from the engine
            gc.unfreeze()
            self.core.clear()

    def _check(self, new: NewRequest) -> None:
        if new.params.stop_strings and self.tokenizer is None:
            raise RequestError("stop needs a tokenizer: use stop_token_ids", "stop")
        self.core.check(new)
        self.core.grammars.check(new)


@contextmanager
def _naming(index: int) -> Iterator[None]:
    """Say in an error which prompt it concerns."""
    try:
        yield
    except RequestError as error:
        raise type(error)(f"prompt {index}: {error}", error.param) from None
