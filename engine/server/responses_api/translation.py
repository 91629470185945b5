"""Turn the body of /v1/responses into that of chat completions."""

from __future__ import annotations

from typing import Any

from kiln.engine.server.fields import without_nulls
from kiln.engine.server.responses_api.body import (
    ResponseAllowedTools,
    ResponseFunctionChoice,
    ResponseSchemaFormat,
    ResponsesRequest,
    ResponseTool,
    TextConfig,
)
from kiln.engine.server.responses_api.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
)

# Fields of a chat, as patterns -> their names in this body, for errors.
NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    r"response_format(\.json_schema)?": "text.format",
    r"messages(\[.*)?": "input",  # the items have other numbers
    r"tools\[(\d+)\]\.function": r"tools[\1]",
}
_OF_FUNCTIONS = {"name", "description", "parameters", "strict"}


def chat_request(body: ResponsesRequest) -> dict[str, Any]:
    """Return the body of a chat with the same answer."""
    return without_nulls(
        messages=chat_messages(body),
        model=body.model,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stream=body.stream,
        user=body.user,
        priority=body.priority,
        cache_salt=body.cache_salt,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        tools=[_tool(tool) for tool in body.tools or ()] or None,
        tool_choice=_choice(body.tool_choice),
        response_format=_format(body.text),
        parallel_tool_calls=body.parallel_tool_calls,
    )


def chat_messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the messages of a chat; the items of one turn of the model become one message."""
    made: list[dict[str, Any]] = []
    if body.instructions:
        made.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*made, {"role": "user", "content": body.input}]
    for item in body.input:
        _add(made, item)
    return made


def _add(made: list[dict[str, Any]], item: Item) -> None:
    match item:
        case MessageItem(role="assistant"):
            _turn(made)["content"] = _text(item.content)
        case MessageItem():
            made.append({"role": item.role, "content": _parts(item.content)})
        case FunctionCallOutputItem():
            content = _parts(item.output)
            made.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        case FunctionCallItem():
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            _turn(made, calls=True).setdefault("tool_calls", []).append(call)
        case ReasoningItem():
            text = "".join(part.text for part in item.content or item.summary or [])
            if text:
                message = _turn(made)
                message["reasoning_content"] = message.get("reasoning_content", "") + text


def _turn(made: list[dict[str, Any]], calls: bool = False) -> dict[str, Any]:
    """Return the model's message that an item belongs to: the last one, or a new one.

    Only ``calls`` belong to a message that already has content or calls.
    """
    last = made[-1] if made else {}
    is_begun = last.get("content") is not None or "tool_calls" in last
    if last.get("role") != "assistant" or (is_begun and not calls):
        last = {"role": "assistant", "content": None}
        made.append(last)
    return last


def _parts(content: Any) -> Any:
    """Return the content of a chat's message."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in content]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _format(text: TextConfig | None) -> dict[str, Any] | None:
    """Return the response format of a chat."""
    form = None if text is None else text.format
    if form is None:
        return None
    if not isinstance(form, ResponseSchemaFormat):
        return {"type": form.type}
    named = form.model_dump(by_alias=True, exclude={"type"})
    return {"type": form.type, "json_schema": named}


def _choice(choice: Any) -> Any:
    """Return a tool choice in a chat's form."""
    match choice:
        case ResponseFunctionChoice():
            return {"type": "function", "function": {"name": choice.name}}
        case ResponseAllowedTools():
            allowed = {"mode": choice.mode, "tools": [_choice(one) for one in choice.tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _tool(tool: ResponseTool) -> dict[str, Any]:
    function = tool.model_dump(include=_OF_FUNCTIONS, exclude_none=True)
    return {"type": "function", "function": function}
