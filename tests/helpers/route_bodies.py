"""Good bodies of every route that takes one, from which tests make bad ones."""

from __future__ import annotations

from typing import Any

_PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city"],
}
_TOOL = {"name": "get_weather", "description": "The weather.", "parameters": _PARAMETERS}
_NAMED_SCHEMA = {"name": "weather", "strict": True, "schema": _PARAMETERS}
_CALL = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
_HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Weather?"}], "name": "ann"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": _CALL}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "assistant", "content": "Rain.", "reasoning_content": "I looked."},
    {"role": "user", "content": 'Call get_weather({"city": "Rome"}).'},
]
_SAMPLING = {
    "max_tokens": 8,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.01,
    "seed": 1,
    "n": 2,
    "stop": ["\n\n", "x"],
    "stop_token_ids": [5],
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "logit_bias": {"7": 1.5},
    "min_tokens": 1,
    "ignore_eos": False,
}
_STREAM = {"stream": True, "stream_options": {"include_usage": True}}
_HELLO = [{"role": "user", "content": "Hello"}]
_CLAUDE = [
    {"role": "user", "content": [{"type": "text", "text": "Weather in Oslo?"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "I look.", "signature": "s"},
            {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}},
        ],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}],
    },
]
_CLAUDE_TOOL = {"name": "get_weather", "description": "The weather.", "input_schema": _PARAMETERS}
_ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "Weather in Oslo?"}]},
    {"type": "function_call", "call_id": "call_1", **_CALL},
    {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
    {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Rain.", "annotations": []}],
    },
]

BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"messages": _HELLO, "max_tokens": 4},
        {"messages": _HELLO, **_SAMPLING, "logprobs": True, "top_logprobs": 3},
        {"messages": _HELLO, "max_completion_tokens": 5, **_STREAM},
        {
            "messages": _HISTORY,
            "tools": [{"type": "function", "function": _TOOL}],
            "tool_choice": "auto",
            "max_tokens": 60,
            **_STREAM,
        },
        {
            "messages": _HELLO,
            "tools": [{"type": "function", "function": {**_TOOL, "strict": True}}],
            "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
            "response_format": {"type": "json_schema", "json_schema": _NAMED_SCHEMA},
            "max_tokens": 20,
        },
    ],
    "/v1/completions": [
        {"prompt": "Once upon", "max_tokens": 4},
        {"prompt": ["a", "b"], **_SAMPLING, "logprobs": 2},
        {"prompt": [5, 6, 7], "max_tokens": 4, "echo": True},
        {
            "prompt": "x",
            "max_tokens": 9,
            "structured_outputs": {"json": _PARAMETERS, "whitespace_pattern": " ?"},
        },
        {"prompt": "x", "max_tokens": 9, "guided_regex": "(a|b[0-9]{1,3})+"},
        {"prompt": "x", "max_tokens": 9, "structured_outputs": {"choice": ["a", "b"]}},
        {"prompt": "x", "max_tokens": 9, "ebnf": 'root ::= "a" [0-9]+ | "b" root'},
        {"prompt": [[5, 6], [7]], "max_tokens": 4, **_STREAM},
    ],
    "/v1/embeddings": [
        {"input": "Once upon", "model": "tiny", "encoding_format": "base64"},
        {"input": [[5, 6], [7]], "dimensions": 8, "user": "ann", "truncate_prompt_tokens": 4},
        {"input": ["a", "b"], "use_activation": False, "add_special_tokens": True, "priority": 0},
    ],
    "/v1/messages": [
        {"model": "tiny", "messages": _HELLO, "max_tokens": 4},
        {
            "model": "tiny",
            "messages": _CLAUDE,
            "max_tokens": 60,
            "system": [{"type": "text", "text": "Be brief."}],
            "tools": [_CLAUDE_TOOL],
            "tool_choice": {"type": "auto"},
            "stream": True,
            "temperature": 0.7,
            "top_k": 5,
            "top_p": 0.9,
            "stop_sequences": ["\n\n"],
            "metadata": {"user_id": "ann"},
        },
        {
            "model": "tiny",
            "messages": _HELLO,
            "max_tokens": 20,
            "tools": [{**_CLAUDE_TOOL, "strict": True}],
            "tool_choice": {"type": "tool", "name": "get_weather"},
            "output_config": {"format": {"type": "json_schema", "schema": _PARAMETERS}},
        },
    ],
    "/v1/messages/count_tokens": [
        {"model": "tiny", "messages": _HELLO},
        {"model": "tiny", "messages": _CLAUDE, "system": "Be brief.", "tools": [_CLAUDE_TOOL]},
    ],
    "/v1/responses": [
        {"model": "tiny", "input": "Hello", "max_output_tokens": 4},
        {
            "model": "tiny",
            "input": _ITEMS,
            "instructions": "Be brief.",
            "tools": [{"type": "function", **_TOOL}],
            "tool_choice": "auto",
            "max_output_tokens": 60,
            "stream": True,
            "store": False,
            "temperature": 0.7,
            "metadata": {"a": "b"},
        },
        {
            "model": "tiny",
            "input": "Hello",
            "max_output_tokens": 20,
            "tools": [{"type": "function", **_TOOL, "strict": True}],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "get_weather"}],
            },
            "text": {"format": {"type": "json_schema", **_NAMED_SCHEMA}},
        },
    ],
    "/tokenize": [
        {"model": "tiny", "prompt": "Hello", "add_special_tokens": False},
        {"model": "tiny", "messages": _HISTORY, "add_generation_prompt": True},
    ],
    "/detokenize": [{"model": "tiny", "tokens": [5, 6, 7]}],
    "/ping": [{"model": "tiny"}],  # it reads no body, and neither do the next two
    "/reset_prefix_cache": [{"model": "tiny"}],
    "/v1/responses/{response_id}/cancel": [{"model": "tiny"}],
    "/v1/load_lora_adapter": [{"lora_name": "a", "lora_path": "a", "pinned": False}],
    "/v1/unload_lora_adapter": [{"lora_name": "a", "timeout_s": 0.1}],
}
