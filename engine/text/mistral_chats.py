"""Chats of Mistral's models without a chat template, written by Mistral's library mistral-common.

That library writes a chat as tokens: a text cannot become a special token, whatever a message says.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from kiln.engine.errors import ModelError, RequestError, field_error
from kiln.engine.models.tekken_file import EOS
from kiln.engine.requests.sampling_params import check_surrogates
from kiln.engine.text.chat_template import Rendered
from kiln.engine.text.messages import read_messages
from kiln.engine.text.template_forms import Message, TemplateForms

_MAX_SHOWN = 200  # characters of an error message
_EFFORT = "reasoning_effort"
_ID_LENGTH = 9  # of a tool call, in letters and digits
_REASONING = ("reasoning_content", "thinking", "reasoning")


class MistralChats:
    """What stands for a chat template. ``path`` is a tekken.json, ``backend`` its tokenizer.

    Raises ModelError if the library is missing or cannot read the file.
    """

    def __init__(self, path: Path, backend: Backend) -> None:
        try:
            from mistral_common.protocol.instruct.request import ChatCompletionRequest
            from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
        except ImportError as error:
            raise ModelError(
                f"{path}: the folder has no chat template, and chats need the mistral-common "
                "library: pip install 'kiln[mistral]', or give a template by --chat-template"
            ) from error
        try:
            self._library = MistralTokenizer.from_file(str(path))
        except Exception as error:  # it raises AssertionError too
            raise ModelError(
                f"{path}: mistral-common cannot read it: {str(error)[:_MAX_SHOWN]}"
            ) from error
        self._request, self._backend = ChatCompletionRequest, backend
        special = backend.get_added_tokens_decoder().values()
        self.source = " ".join(token.content for token in special)  # shows the format of replies

    @cached_property
    def forms(self) -> TemplateForms:
        """The forms of messages that the library accepts."""
        return TemplateForms(self._trial)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        content_format: str = "auto",
        variables: Mapping[str, object] | None = None,
        **options: Any,
    ) -> Rendered:
        """Return a chat as tokens, and as their text.

        The options are those of ``ChatTemplate.render``. Nothing asks for an answer in this format,
        so ``add_generation_prompt`` changes nothing. Of the ``variables`` the library reads the
        reasoning effort, for models that have it. Raises RequestError for what it does not accept.
        """
        if not messages:
            raise RequestError("messages is empty: give at least one", "messages")
        if continue_final_message and messages[-1].get("role") != "assistant":
            raise field_error("continue_final_message", "needs a last message of the assistant")
        read = read_messages(messages, self.forms, content_format)
        shown = json.dumps([read, list(tools or ())], ensure_ascii=False)
        check_surrogates(shown, "the conversation", "messages")
        effort = (variables or {}).get(_EFFORT) if self._has_effort else None
        settings = {} if effort is None else {_EFFORT: effort}
        try:
            ids = self._encode(read, tools, continue_final_message, settings)
        except Exception as error:  # pydantic's and its own, which share no class
            said = " ".join(str(error).split())[:_MAX_SHOWN]
            raise RequestError(
                f"mistral-common, which writes this model's chats, does not accept these messages: "
                f"{said}",
                "messages",
            ) from error
        return Rendered(self._backend.decode(ids, skip_special_tokens=False), ids)

    def _encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        continued: bool,
        settings: Mapping[str, object],
    ) -> list[int]:
        request = self._request.from_openai(
            [self._fitted(message) for message in messages],
            tools=[_with_parameters(tool) for tool in tools] if tools else None,
            continue_final_message=continued,
            **settings,
        )
        ids: list[int] = self._library.encode_chat_completion(request).tokens
        # Some versions of the library end the message that is to be continued.
        ends = continued and ids[-1:] == [self._backend.token_to_id(EOS)]
        return ids[:-1] if ends else ids

    def _fitted(self, message: Message) -> Message:
        """Return a message with ids of calls that fit, and reasoning where the model reads it."""
        made = {name: value for name, value in message.items() if name not in _REASONING}
        reasoning, content = message.get(_REASONING[0]), made.get("content")
        if reasoning and self._reads_reasoning:
            chunk = {"type": "thinking", "thinking": reasoning, "closed": True}
            rest = content if isinstance(content, list) else [{"type": "text", "text": content}]
            made["content"] = [chunk, *(rest if content else [])]
        if "tool_call_id" in made:
            made["tool_call_id"] = _fitted_id(made["tool_call_id"])
        if calls := made.get("tool_calls"):
            made["tool_calls"] = [{**call, "id": _fitted_id(call.get("id"))} for call in calls]
        return made

    @cached_property
    def _reads_reasoning(self) -> bool:
        chunk = {"type": "thinking", "thinking": "x", "closed": True}
        asked = {"role": "user", "content": "x"}
        answer = {"role": "assistant", "content": [chunk, {"type": "text", "text": "x"}]}
        try:
            return bool(self._encode([asked, answer, asked], None, False, {}))
        except Exception:  # of any class: the version has no reasoning
            return False

    @property
    def _has_effort(self) -> bool:
        version = self._library.instruct_tokenizer.tokenizer.version
        return bool(getattr(version, "supports_model_settings", False))

    def _trial(self, messages: list[Message], tools: list[dict[str, Any]]) -> str:
        """Return the text of a chat that tries out a form of messages."""
        if messages[-1].get("tool_calls"):  # which is no end of a chat
            call_id = messages[-1]["tool_calls"][0]["id"]
            messages = [*messages, {"role": "tool", "tool_call_id": call_id, "content": "x"}]
        ids = self._encode(messages, tools, False, {})
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text


def _with_parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool with parameters, which the library requires."""
    return {**tool, "function": {"parameters": {}, **tool["function"]}}


def _fitted_id(given: object) -> str:
    """Return the id of a call, or nine letters and digits that stand for another client's."""
    text = str(given)
    fits = len(text) == _ID_LENGTH and text.isascii() and text.isalnum()
    return text if fits else hashlib.sha256(text.encode(errors="replace")).hexdigest()[:_ID_LENGTH]
