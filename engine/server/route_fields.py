"""Every field of the bodies of the routes beside chat and completions, and what it does.

It continues the table of ``field_table``; ``/docs`` shows both.
"""

from __future__ import annotations

from kiln.engine.server.field_table import FieldRow, refused, rows

_MODEL = "A name of the served model, the default, or of a LoRA adapter"
_COUNT_TOKENS = (
    *rows(
        "acting",
        model=_MODEL,
        messages="The conversation: text, thinking, tool_use and tool_result blocks; is_error has "
        "no effect",
        system="The system prompt, a text or text blocks; default: none",
        tools="Tools that the client runs: name, description and input_schema; with strict the "
        "input follows the schema; default: none",
        tool_choice="auto, the default; none; any: at least one call; tool: a call of that tool; "
        "disable_parallel_tool_use: at most one call",
        thinking="enabled and disabled set enable_thinking of the chat template; budget_tokens has "
        "no effect; display omitted: thinking blocks have no text; "
        "default: as the chat template does",
        output_config="effort is a variable for the chat template, if it reads it; format: the "
        "JSON Schema that the text follows; default: neither",
        output_format="Older name of output_config.format; default: none",
    ),
    *rows("neutral", cache_control="No effect, here and in blocks and tools"),
    *rows("neutral", (None, "standard"), speed="No effect"),
    *rows(
        "neutral",
        (None, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
        context_management="No effect",
    ),
    *refused("mcp_servers", values=(None, [])),
)
_MESSAGES = (
    *_COUNT_TOKENS,
    *rows(
        "acting",
        max_tokens="The most tokens to generate, thinking included",
        temperature="0 to 1; 0 is greedy; default: the model's own, else 1",
        top_p="Sample from the most likely tokens with this much probability together; default: "
        "the model's own, else 1",
        top_k="Sample from this many most likely tokens; default: the model's own, else all",
        stop_sequences="Up to 16 strings that end the output; the answer says which did; "
        "default: none",
        stream="Send the answer as server-sent events; default: false",
        metadata="user_id is a label in the access log; default: none",
    ),
    *rows("neutral", service_tier="No effect"),
    *rows("refused", thread="Conversations are not kept: send all messages"),
    *refused("container", "inference_geo"),
)
_RESPONSES = (
    *rows(
        "acting",
        model=_MODEL,
        input="A text, or items: messages, function calls and their outputs, reasoning",
        instructions="A system message before the input; default: none",
        max_output_tokens="The most tokens to generate; default: up to the context",
        temperature="0 is greedy; default: the model's own, else 1",
        top_p="Sample from the most likely tokens with this much probability together; default: "
        "the model's own, else 1",
        tools="Functions that the client runs; with strict the arguments follow the schema; "
        "default: none",
        tool_choice="auto, the default; none: the model does not see the tools; required: at least "
        "one call; one function, which is called once; or allowed_tools",
        parallel_tool_calls="False: at most one call; default: true",
        reasoning="effort is a variable for the chat template, if it reads it; no summary is made; "
        "default: the template's own",
        text="format: text, json_object, or json_schema with a schema that the text follows; "
        "verbosity has no effect; default: any text",
        stream="Send the answer as server-sent events; default: false",
        user="A label in the access log; default: none",
        priority="Lower is served earlier; other than 0 only with --scheduling-policy priority; "
        "default: 0",
        cache_salt="Cached prefixes are shared only among requests with the same salt; default: "
        "none, which is one of them",
        metadata="Repeated in the response; default: none",
    ),
    *rows(
        "neutral",
        stream_options="No effect: nothing is obfuscated",
        include="No effect: reasoning is sent as text",
        max_tool_calls="No effect: it counts built-in tools",
        service_tier="No effect",
        prompt_cache_key="No effect",
        prompt_cache_retention="No effect",
        safety_identifier="No effect",
    ),
    *rows("neutral", (None, "disabled"), truncation="No effect"),
    *rows("neutral", (None, 0), top_logprobs="No effect"),
    *rows(
        "refused",
        store="True is refused: responses are not kept",
        background="True is refused: responses are not kept",
        previous_response_id="Responses are not kept: send the whole conversation",
        conversation="Responses are not kept: send the whole conversation",
    ),
    *refused("prompt"),
    *refused("context_management", values=(None, [])),
)
_TOKENIZE = rows(
    "acting",
    model=_MODEL,
    prompt="A text; default: none, as there are messages",
    messages="A conversation, as in a chat; default: none, as there is a prompt",
    tools="Functions that the model may call; default: none",
    chat_template_kwargs="Variables for the chat template; default: none",
    add_generation_prompt="False: do not ask for a new message; default: true",
    continue_final_message="The answer would be the rest of the last message; default: false",
    add_special_tokens="Add BOS and the like; default: true for a prompt, false for messages",
    return_token_strs="Also return the tokens as they stand in the vocabulary; default: false",
)
EMBEDDINGS = (
    *rows(
        "acting",
        model=_MODEL,
        input="A text, a list of texts, a list of token ids, or a list of such lists, at most 2048",
        encoding_format="float, the default, or base64: little-endian float32 numbers",
        dimensions="Keep this many numbers of each embedding, before its length becomes 1; "
        "default: all",
        use_activation="Whether embeddings get length 1; default: as the model's folder says",
        truncate_prompt_tokens="Keep this many tokens at the end of an input; -1: what fits; "
        "default: all, and an input that does not fit is refused",
        add_special_tokens="Add what the tokenizer adds around a text; default: true",
        priority="Lower is served earlier; other than 0 only with --scheduling-policy priority; "
        "default: 0",
        cache_salt="Cached prefixes are shared only among requests with the same salt; default: "
        "none, which is one of them",
        user="A label in the access log; default: none",
    ),
    *rows("neutral", (None, "float32"), embed_dtype="No effect"),
    *rows("neutral", (None, "native", "little"), endianness="No effect"),
    *rows("neutral", (None, "left"), truncation_side="No effect"),
    *refused("messages", "mm_processor_kwargs", "request_id"),
)
ROUTE_TABLES: dict[str, tuple[FieldRow, ...]] = {
    "CountTokensRequest": _COUNT_TOKENS,
    "EmbeddingsRequest": EMBEDDINGS,
    "MessagesRequest": _MESSAGES,
    "ResponsesRequest": _RESPONSES,
    "TokenizeRequest": tuple(_TOKENIZE),
    "DetokenizeRequest": tuple(rows("acting", model=_MODEL, tokens="Token ids")),
}
