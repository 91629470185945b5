"""Parse the prompts and sampling parameters of ``LLM`` calls, in all accepted forms."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

from kiln.engine.errors import RequestError, field_error, too_long
from kiln.engine.requests.sampling_params import SamplingParams, check_surrogates, shown
from kiln.engine.requests.waiting import MAX_PRIORITY
from kiln.engine.text.template_forms import Message
from kiln.engine.text.tokenizer import Tokenizer
from kiln.engine.text.tools import read_tools


class TextPrompt(TypedDict):
    """vLLM's explicit form of a text prompt."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """vLLM's explicit form of a prompt of token ids."""

    prompt_token_ids: Sequence[int]
    cache_salt: NotRequired[str]


PromptInput = str | Sequence[int] | TextPrompt | TokensPrompt


@dataclass(frozen=True, slots=True)
class Prompt:
    """A parsed prompt: its token ids, and its text if it was given as text."""

    token_ids: list[int]
    text: str | None = None
    cache_salt: str | None = None


def read_prompts(
    prompts: PromptInput | Sequence[PromptInput],
    tokenizer: Tokenizer | None,
    max_tokens: int,
    *,
    add_special_tokens: bool = True,
) -> list[Prompt]:
    """Parse one prompt or many. Raises RequestError naming the first malformed one.

    A text that must have more than ``max_tokens`` tokens is rejected without tokenizing it.
    ``add_special_tokens``: BOS and the like before a text.
    """
    is_ids = isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], int)
    one = isinstance(prompts, str | Mapping) or is_ids
    many = [prompts] if one else prompts
    if not isinstance(many, Iterable):
        raise RequestError(f"prompts is a {type(prompts).__name__}, not a text or a list", "prompt")
    return [
        _read(prompt, index, tokenizer, max_tokens, add_special_tokens)
        for index, prompt in enumerate(many)
    ]


def truncated(prompt: Prompt, params: SamplingParams, context: int) -> Prompt:
    """Return the last ``truncate_prompt_tokens`` tokens of a prompt, if they are limited.

    -1 leaves room for ``max_tokens`` in the ``context``, or for one token.
    """
    most = params.truncate_prompt_tokens
    if most == -1:
        most = max(1, context - (params.max_tokens or 1))
    return last_tokens(prompt, most)


def last_tokens(prompt: Prompt, most: int | None) -> Prompt:
    """Return a prompt of the last ``most`` tokens of a longer one; None: of all."""
    if most is None or len(prompt.token_ids) <= most:
        return prompt
    return Prompt(prompt.token_ids[-most:], cache_salt=prompt.cache_salt)


def spread_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """Return one SamplingParams for each of ``count`` prompts. Raises RequestError."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    listed = list(params)
    if not all(isinstance(entry, SamplingParams) for entry in listed):
        raise RequestError("sampling_params must be SamplingParams, or a list of them")
    if len(listed) != count:
        raise RequestError(f"{len(listed)} sampling_params, {count} prompts: give one or {count}")
    return listed


def spread_lora(lora: str | Sequence[str | None] | None, count: int) -> list[str | None]:
    """Return the name of a LoRA adapter, or None, for each of ``count`` prompts.

    Raises RequestError.
    """
    if lora is None or isinstance(lora, str):
        return [lora] * count
    listed = list(lora)
    if not all(name is None or isinstance(name, str) for name in listed):
        raise RequestError("lora must be the name of an adapter, None, or a list of these", "lora")
    if len(listed) != count:
        raise RequestError(f"{len(listed)} entries of lora, {count} prompts: give one or {count}")
    return listed


def spread_priority(priority: int | Sequence[int] | None, count: int) -> list[int]:
    """Return the priority of each of ``count`` prompts, by default 0. Raises RequestError."""
    if priority is None:
        return [0] * count
    listed = list(priority) if isinstance(priority, Iterable) else [priority] * count
    for one in listed:
        if type(one) is not int or abs(one) > MAX_PRIORITY:
            raise RequestError(f"priority must be a 64-bit integer, got {shown(one)}", "priority")
    if len(listed) != count:
        raise RequestError(
            f"{len(listed)} entries of priority, {count} prompts: give one or {count}", "priority"
        )
    return listed


def _read(
    prompt: object,
    index: int,
    tokenizer: Tokenizer | None,
    max_tokens: int,
    add_special_tokens: bool,
) -> Prompt:
    salt = None
    if isinstance(prompt, Mapping):
        forms, salt = {*prompt} - {"cache_salt"}, prompt.get("cache_salt")
        if len(forms) != 1 or not forms <= {"prompt", "prompt_token_ids"}:
            raise RequestError(
                f"prompt {index} has the keys {sorted(map(str, prompt))[:8]}: give one of "
                "'prompt' and 'prompt_token_ids', and 'cache_salt' if it needs one",
                "prompt",
            )
        if salt is not None and not (isinstance(salt, str) and salt):
            raise RequestError(
                f"prompt {index}: cache_salt is {shown(salt)}: must be a text that is not empty",
                "cache_salt",
            )
        prompt = prompt[forms.pop()]
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError(
                f"prompt {index} is text, but there is no tokenizer: give token ids",
                "prompt",
            )
        check_surrogates(prompt, f"prompt {index}", "prompt")
        _check_length(prompt, f"prompt {index}", tokenizer, max_tokens)
        return Prompt(tokenizer.encode(prompt, add_special_tokens), prompt, salt)
    return Prompt(_token_ids(prompt, index), cache_salt=salt)


def _check_length(
    text: str, which: str, tokenizer: Tokenizer, max_tokens: int, param: str = "prompt"
) -> None:
    if tokenizer.surely_exceeds(text, max_tokens):
        problem = f"{which} has {len(text)} characters, which are more: shorten it"
        raise too_long(max_tokens, problem, param)


def _token_ids(prompt: object, index: int) -> list[int]:
    try:
        if isinstance(prompt, Iterable):
            return [operator.index(token) for token in prompt]
    except TypeError:
        pass
    raise RequestError(
        f"prompt {index} is {str(prompt)[:80]!r}: must be a text or a list of token ids", "prompt"
    )


def read_chats(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
    tokenizer: Tokenizer | None,
    max_tokens: int,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_special_tokens: bool = False,
    **options: Any,
) -> list[Prompt]:
    """Render and tokenize one conversation or many.

    ``options`` are those of ``Tokenizer.render_chat``. Templates write BOS and the like themselves,
    so ``add_special_tokens`` adds a second one to most. A conversation that must have more than
    ``max_tokens`` tokens is rejected before it is tokenized. Raises RequestError.
    """
    if tokenizer is None:
        raise RequestError("there is no tokenizer: give token ids", "messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError("messages must be a list of messages, with at least one", "messages")
    read = read_tools(tools)
    chats: Sequence[Any] = [messages] if isinstance(messages[0], Mapping) else messages
    variables = dict(chat_template_kwargs or {})
    made = []
    for index, chat in enumerate(chats):
        text, ids = tokenizer.render_chat(list(chat), tools=read, variables=variables, **options)
        check_surrogates(text, f"conversation {index}", "messages")
        _check_length(text, f"conversation {index} of messages", tokenizer, max_tokens, "messages")
        if ids is None:
            ids = tokenizer.encode(text, add_special_tokens)
        elif add_special_tokens:
            raise field_error("add_special_tokens", "this model's chats are tokens, with a BOS")
        made.append(Prompt(ids, text))
    return made
