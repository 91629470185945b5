"""What each field means of the objects inside bodies, and of answers; ``/docs`` shows it.

It continues the tables of ``field_table`` and ``route_fields``, which are about whole bodies.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

Fields = Mapping[str, str]

_NO_EFFECT = "No effect"
_REFUSED = "Not supported yet"
# Fields that mean the same wherever they are. A field of an object that has its own words below is
# not looked up here.
ANYWHERE: Fields = MappingProxyType(
    {
        "type": "Tells what kind of object this is",
        "object": "Tells what kind of object this is",
        "cache_control": _NO_EFFECT,
        "status": _NO_EFFECT,
        "caller": _NO_EFFECT,
        "namespace": _REFUSED,
        "parsed": _NO_EFFECT,
        "parsed_arguments": _NO_EFFECT,
        "annotations": _NO_EFFECT,
        "citations": _NO_EFFECT,
        "defer_loading": _NO_EFFECT,
        "allowed_callers": _NO_EFFECT,
    }
)
# Parameters in the path of a route.
PARAMETERS: Fields = MappingProxyType(
    {
        "model": "A name of the model, or of a LoRA adapter",
        "response_id": "Of a response; none is kept, so none is found",
    }
)
_STRICT = "True: the arguments of every call follow the schema; default: false"
_NAME_OF_TOOL = "The name of the function, by which the model calls it"
_FORM_OF_THOUGHT = "omitted: thinking blocks have no text; default: they have it"
_NAMED_SCHEMA: Fields = {
    "schema": "A JSON Schema, which the output follows",
    "name": _NO_EFFECT,
    "description": _NO_EFFECT,
    "strict": "No effect: the schema always holds",
}

_CHAT_PARTS: Mapping[str, Fields] = {
    "Message": {
        "role": "Who speaks; developer is another name of system",
        "content": "A text, or a list of text parts; an assistant's may be null; default: null",
        "name": "For the chat template; default: none",
        "tool_calls": "The calls that an assistant made in this turn; default: none",
        "tool_call_id": "Of a tool's message: the id of the call that it answers; default: none",
        "reasoning_content": "The reasoning behind an answer; default: none",
        "reasoning": "Another name of reasoning_content; default: none",
        "thinking": "Another name of reasoning_content; default: none",
        "refusal": _REFUSED,
        "audio": _REFUSED,
        "function_call": _REFUSED,
    },
    "ContentPart": {"type": "One of the names of a text part", "text": "The text"},
    "EarlierToolCall": {
        "id": "By which a tool's message refers to the call; default: none",
        "type": "Only functions can be called; default: function",
        "function": "The function, and the arguments of the call",
        "index": _NO_EFFECT,
    },
    "CalledFunction": {
        "name": "The name of the function",
        "arguments": "A JSON object as text; default: no arguments",
    },
    "Tool": {"function": "The function that the model may call"},
    "ToolFunction": {
        "name": _NAME_OF_TOOL,
        "description": "What it does, for the model; default: none",
        "parameters": "A JSON Schema of its arguments; default: it takes none",
        "strict": _STRICT,
    },
    "FunctionChoice": {"function": "The function that the model must call, once"},
    "FunctionName": {"name": "The name of one of the tools"},
    "AllowedToolsChoice": {"allowed_tools": "Which tools may be called, and whether one must be"},
    "AllowedTools": {
        "mode": "auto: the model may call one of them; required: it must",
        "tools": "The tools that may be called, by their names",
    },
    "StreamOptions": {
        "include_usage": "End with a chunk of the token counts; default: false",
        "continuous_usage_stats": "Every chunk has the token counts so far; default: false",
        "include_obfuscation": "No effect: nothing is padded",
    },
    "JsonSchemaFormat": {"json_schema": "The schema, with a name"},
    "NamedSchema": _NAMED_SCHEMA,
    "StructuredOutputs": {
        "json": "A JSON Schema, an object or its text; default: none",
        "regex": "A regular expression that the whole output matches; default: none",
        "choice": "Texts, one of which is the output; default: none",
        "grammar": "A grammar in GBNF or Lark, told apart by its text; default: none",
        "json_object": "True: any JSON object; default: false",
        "disable_any_whitespace": "True: JSON without white space between tokens; default: false",
        "disable_additional_properties": "True: objects of a JSON Schema have only the properties "
        "that it lists, unless it says otherwise; default: false",
        "whitespace_pattern": "A regular expression of the white space in JSON; default: up to two "
        "spaces, or a line break and its indentation",
        "structural_tag": _REFUSED,
    },
}
_ANTHROPIC_PARTS: Mapping[str, Fields] = {
    "CacheControl": {"ttl": _NO_EFFECT},
    "CustomTool": {
        "type": "Only tools that the client runs are supported; default: custom",
        "name": _NAME_OF_TOOL,
        "description": "What it does, for the model; default: none",
        "input_schema": "A JSON Schema of its input",
        "strict": "True: the input of every call follows the schema; default: false",
        "eager_input_streaming": "No effect: input is streamed as it is made",
        "input_examples": _NO_EFFECT,
    },
    "ToolMode": {
        "type": "auto: the model may call tools; any: at least one; none: it does not see them",
        "disable_parallel_tool_use": "True: at most one call; default: false",
        "name": _REFUSED,
    },
    "OneTool": {
        "name": "The tool that the model must call, once",
        "disable_parallel_tool_use": _NO_EFFECT,
    },
    "ThinkingEnabled": {
        "budget_tokens": "No effect: max_tokens limits thinking and answer together",
        "display": _FORM_OF_THOUGHT,
    },
    "ThinkingAdaptive": {"display": _FORM_OF_THOUGHT},
    "OutputConfig": {
        "effort": "A variable for the chat template, if it reads it; default: the template's own",
        "format": "The JSON Schema that the text follows; default: any text",
    },
    "OutputFormat": {"schema": "A JSON Schema, which the text follows"},
    "Metadata": {"user_id": "A label in the access log; default: none"},
    "TextBlock": {"text": "The text"},
    "ThinkingBlock": {
        "thinking": "The reasoning behind an answer",
        "signature": "No effect: it is not checked",
    },
    "ToolUseBlock": {
        "id": "By which a tool_result refers to the call",
        "name": "The name of the tool",
        "input": "The input of the call",
    },
    "ToolResultBlock": {
        "tool_use_id": "The id of the call that it answers",
        "content": "What the tool returned, a text or text blocks; default: nothing",
        "is_error": "No effect: the content tells the model",
    },
    "UserTurn": {"role": "Who speaks", "content": "A text, or text and tool_result blocks"},
    "AssistantTurn": {
        "role": "Who speaks",
        "content": "A text, or text, thinking and tool_use blocks",
    },
    "SystemTurn": {"role": "Who speaks", "content": "A text, or text blocks"},
}
_RESPONSES_PARTS: Mapping[str, Fields] = {
    "ResponseTool": {
        "name": _NAME_OF_TOOL,
        "description": "What it does, for the model; default: none",
        "parameters": "A JSON Schema of its arguments; default: it takes none",
        "strict": _STRICT,
        "output_schema": _NO_EFFECT,
    },
    "ReasoningConfig": {
        "effort": "A variable for the chat template, if it reads it; default: the template's own",
        "summary": "No effect: reasoning is sent as text",
        "generate_summary": "No effect: reasoning is sent as text",
    },
    "TextConfig": {
        "format": "The form of the text; default: any text",
        "verbosity": _NO_EFFECT,
    },
    "ResponseSchemaFormat": _NAMED_SCHEMA,
    "ResponseFunctionChoice": {"name": "The name of the function that must be called, once"},
    "ResponseAllowedTools": {
        "mode": "auto: the model may call one of them; required: it must",
        "tools": "The tools that may be called, by their names",
    },
    "ResponseStreamOptions": {
        "include_obfuscation": "No effect: nothing is padded",
        "include_usage": "No effect: the last event always has the token counts",
    },
    "InputText": {"type": "One of the names of a text part", "text": "The text"},
    "OutputText": {"text": "The text", "logprobs": _NO_EFFECT},
    "MessageItem": {
        "type": "Tells what kind of item this is; default: message",
        "role": "Who speaks; developer is another name of system",
        "content": "A text, or a list of text parts",
        "id": _NO_EFFECT,
        "phase": _NO_EFFECT,
    },
    "FunctionCallItem": {
        "call_id": "By which the output of the function refers to the call",
        "name": "The name of the function",
        "arguments": "A JSON object as text",
        "id": _NO_EFFECT,
        "async": _REFUSED,
        "async_": _REFUSED,
    },
    "FunctionCallOutputItem": {
        "call_id": "The id of the call that it answers",
        "output": "What the function returned, a text or a list of text parts",
        "id": _NO_EFFECT,
        "name": _NO_EFFECT,
    },
    "SummaryText": {"text": "The text"},
    "ReasoningText": {"type": "One of the names of a reasoning part", "text": "The text"},
    "ReasoningItem": {
        "id": _NO_EFFECT,
        "summary": "The reasoning, if there is no content; default: none",
        "content": "The reasoning; default: none",
        "encrypted_content": _REFUSED,
    },
}
_ADAPTERS: Mapping[str, Fields] = {
    "LoadAdapterRequest": {
        "lora_name": "The name by which requests ask for the adapter",
        "lora_path": "Its folder, inside --lora-root",
        "pinned": "True: it is never evicted from the device; default: false",
    },
    "UnloadAdapterRequest": {
        "lora_name": "The name of the adapter",
        "timeout_s": "How many seconds to wait for its requests to end; default: 30",
    },
}
PARTS: Mapping[str, Fields] = MappingProxyType(
    {**_ADAPTERS, **_CHAT_PARTS, **_ANTHROPIC_PARTS, **_RESPONSES_PARTS}
)
