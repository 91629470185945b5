"""Turn the bodies of Anthropic's routes into those of chat completions."""

from __future__ import annotations

import json
from typing import Any

from kiln.engine.server.anthropic.blocks import (
    AssistantTurn,
    SystemTurn,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserTurn,
)
from kiln.engine.server.anthropic.body import (
    CountTokensRequest,
    CustomTool,
    MessagesRequest,
    OneTool,
    ToolMode,
)
from kiln.engine.server.fields import without_nulls

# Fields of a chat, as patterns -> their names in Anthropic's bodies, for errors.
NAMES = {
    r"messages\[.*": "messages",  # theirs have other numbers
    r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    r"response_format(\.json_schema)?": "output_config.format",
}
_EFFORTS = {"xhigh": "high", "max": "high"}


def chat_prompt(body: CountTokensRequest) -> dict[str, Any]:
    """Return the fields of a chat that its prompt depends on."""
    messages = chat_messages(body)
    effort = body.output_config.effort if body.output_config is not None else None
    chat = without_nulls(
        messages=messages,
        model=body.model,
        tools=[_tool(tool) for tool in body.tools or ()] or None,
        response_format=_format(body),
        reasoning_effort=None if effort is None else _EFFORTS.get(effort, effort),
    )
    if body.tools and body.tool_choice is not None:
        chat["tool_choice"] = _choice(body.tool_choice)
        if body.tool_choice.disable_parallel_tool_use:
            chat["parallel_tool_calls"] = False
    if body.thinking is not None and body.thinking.type != "adaptive":
        chat["chat_template_kwargs"] = {"enable_thinking": body.thinking.type == "enabled"}
    if messages[-1]["role"] == "assistant":  # the answer continues this message
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    return chat


def chat_request(body: MessagesRequest) -> dict[str, Any]:
    """Return the body of a chat with the same answer."""
    return chat_prompt(body) | without_nulls(
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences or None,
        user=None if body.metadata is None else body.metadata.user_id,
        stream=body.stream,
    )


def chat_messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    """Return the messages of a chat: tool results become messages, turns of one user are joined."""
    made: list[dict[str, Any]] = []
    if body.system:
        made.append({"role": "system", "content": _parts(body.system)})
    for message in body.messages:
        if isinstance(message, AssistantTurn):
            made.append(_assistant(message))
        else:
            _add_turn(made, message)
    return made


def _add_turn(made: list[dict[str, Any]], message: UserTurn | SystemTurn) -> None:
    """Add a turn's blocks in their order; each result of a tool is a message of its own."""
    content: Any = message.content
    for block in [content] if isinstance(content, str) else content or [""]:
        if isinstance(block, ToolResultBlock):
            parts = _parts(block.content or "")
            made.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": parts})
        elif made and made[-1]["role"] == message.role:
            made[-1]["content"] += _parts(block)
        else:
            made.append({"role": message.role, "content": _parts(block)})


def _assistant(message: AssistantTurn) -> dict[str, Any]:
    content: Any = message.content
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    text = "".join(block.text for block in content if isinstance(block, TextBlock))
    thinking = [block.thinking for block in content if isinstance(block, ThinkingBlock)]
    calls = [_call(block) for block in content if isinstance(block, ToolUseBlock)]
    made: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        made |= {"content": text or None, "tool_calls": calls}
    if thinking:
        made["reasoning_content"] = "".join(thinking)
    return made


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.id, "type": "function", "function": function}


def _parts(content: Any) -> list[dict[str, Any]]:
    """Return a text, a text block or several as the parts of a chat's message."""
    blocks = content if isinstance(content, list) else [content]
    texts = [block if isinstance(block, str) else block.text for block in blocks]
    return [{"type": "text", "text": text} for text in texts]


def _tool(tool: CustomTool) -> dict[str, Any]:
    function = without_nulls(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )
    return {"type": "function", "function": function}


def _choice(choice: ToolMode | OneTool) -> Any:
    if isinstance(choice, OneTool):
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _format(body: CountTokensRequest) -> dict[str, Any] | None:
    """Return the response format of a chat."""
    config = body.output_config
    form = body.output_format or (None if config is None else config.format)
    if form is None:
        return None
    return {"type": form.type, "json_schema": {"schema": form.schema_}}
