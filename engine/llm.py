"""The offline Python API: the engine in this process, with vLLM's names."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kiln.engine.chat_template import Message
from kiln.engine.config import (
    DType,
    EngineConfig,
    KVCacheDType,
    KVConfig,
    LoadFormat,
    ModelConfig,
    SchedulerConfig,
)
from kiln.engine.core import EngineCore, Progress
from kiln.engine.errors import RequestError
from kiln.engine.model_folder import resolve_model_folder
from kiln.engine.outputs import CompletionStream
from kiln.engine.prompts import Prompt, PromptInput, read_chats, read_prompts, spread_params
from kiln.engine.request import NewRequest, RequestOutput
from kiln.engine.sampling_params import SamplingParams
from kiln.engine.tokenizer import Tokenizer
from kiln.jit_kernels.ready import ready_guard


class LLM:
    """A model loaded in this process, for batches of prompts.

    ``model`` is a folder in Hugging Face format or a hub id; a folder without a tokenizer takes
    prompts of token ids. ``max_model_len`` is in tokens; ``num_kv_blocks`` None sizes the KV pool
    from the memory there is. The other settings are those of ``kiln.engine.config``.
    Raises ConfigError or ModelError when the model cannot be served.

    >>> llm = LLM("path/to/model", device="cpu", dtype="float32")  # doctest: +SKIP
    >>> outputs = llm.generate(["Hello"], SamplingParams(temperature=0))  # doctest: +SKIP
    >>> outputs[0].outputs[0].text  # doctest: +SKIP
    ', how are you?'
    """

    def __init__(  # noqa: PLR0913 (one keyword for each thing that a user may set)
        self,
        model: str,
        *,
        device: str = "auto",
        dtype: DType = "auto",
        load_format: LoadFormat = "auto",
        max_model_len: int | None = None,
        block_size: int = 16,
        num_kv_blocks: int | None = None,
        gpu_memory_utilization: float | None = None,
        kv_memory_gib: float | None = None,
        kv_cache_dtype: KVCacheDType = "auto",
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        max_chunk_tokens: int | None = None,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> None:
        folder = resolve_model_folder(model)
        kv = KVConfig(
            block_size, num_kv_blocks, gpu_memory_utilization, kv_memory_gib, kv_cache_dtype
        )
        config = EngineConfig(
            ModelConfig(str(folder), dtype, device, load_format, max_model_len, seed=seed),
            kv,
            # Offline there is nobody to turn away: the whole batch waits its turn.
            SchedulerConfig(max_num_seqs, max_num_batched_tokens, max_chunk_tokens, sys.maxsize),
        )
        self.tokenizer = Tokenizer.load_if_present(folder)
        self.core = EngineCore(config, progress)
        ready_guard().declare_ready()
        self._request_ids = itertools.count()

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate ``n`` answers to each prompt and return them in the order of the prompts.

        A prompt is a text, a list of token ids, or vLLM's ``{"prompt": …}`` or
        ``{"prompt_token_ids": …}``; settings are one for all or one for each. The whole batch is
        checked before any of it runs. Raises RequestError naming the prompt and the field.

        >>> greedy = SamplingParams(temperature=0, max_tokens=8)  # doctest: +SKIP
        >>> llm.generate([[1, 2, 3], "Hello"], greedy)[0].outputs[0].token_ids  # doctest: +SKIP
        [17, 4, 4, 2]
        """
        read = read_prompts(prompts, self.tokenizer)
        return self._run(read, spread_params(sampling_params, len(read)))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template.

        ``chat_template_kwargs`` are further variables of the template. Raises RequestError.

        >>> llm.chat([{"role": "user", "content": "Hello"}])[0].outputs[0].text  # doctest: +SKIP
        'Hi! How can I help?'
        """
        read = read_chats(
            messages,
            self.tokenizer,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            **(chat_template_kwargs or {}),
        )
        return self._run(read, spread_params(sampling_params, len(read)))

    def _run(self, prompts: list[Prompt], params: list[SamplingParams]) -> list[RequestOutput]:
        """Check every request, queue them all, and step until the last has finished."""
        children: dict[str, _Child] = {}
        results: list[RequestOutput] = []
        for prompt, each in zip(prompts, params, strict=True):
            request_id = str(next(self._request_ids))
            made = [self._child(request_id, prompt, each, index) for index in range(each.n)]
            self._check(made[0].new, len(results))
            children |= {child.new.request_id: child for child in made}
            answers = [child.stream.completion for child in made]
            results.append(RequestOutput(request_id, prompt.text, prompt.token_ids, answers))
        try:
            for child in children.values():
                self.core.add(child.new)
            self._step_until_done(children)
        finally:  # after an error or Ctrl-C the engine holds nothing of this batch
            for request_id in children:
                self.core.abort(request_id)
        return results

    def _step_until_done(self, children: dict[str, _Child]) -> None:
        while self.core.has_work:
            for output in self.core.step():
                stream = children[output.request_id].stream
                stream.push(output)
                if stream.stopped_early:
                    self.core.abort(output.request_id)

    def _child(self, parent: str, prompt: Prompt, params: SamplingParams, index: int) -> _Child:
        """Make the request of one of a prompt's ``n`` answers."""
        params, ids = params.for_answer(index), prompt.token_ids
        new = NewRequest(f"{parent}-{index}", ids, params)
        return _Child(
            new, CompletionStream(self.tokenizer, params, prompt_token_ids=ids, index=index)
        )

    def _check(self, new: NewRequest, index: int) -> None:
        try:
            if new.params.stop_strings and self.tokenizer is None:
                raise RequestError("stop needs a tokenizer: use stop_token_ids", "stop")
            self.core.check(new)
        except RequestError as error:
            raise type(error)(f"prompt {index}: {error}", error.param) from None


@dataclass(frozen=True, slots=True)
class _Child:
    """One of the ``n`` answers to a prompt, on its way."""

    new: NewRequest
    stream: CompletionStream
