"""Every field of the two bodies of generation, what it does, and which values do nothing.

A field acts; or it is neutral, accepted because it has no meaning for generation; or it is refused
by name, except at values that ask for nothing. The request models are checked against this table,
and ``/docs`` shows it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import create_model

from kiln.engine.requests.neutral_settings import NEUTRAL_SETTINGS
from kiln.engine.server.fields import Only, StrictModel
from kiln.engine.server.output_fields import OLDER_NAMES

Kind = Literal["acting", "neutral", "refused"]


@dataclass(frozen=True, slots=True)
class FieldRow:
    """One field. ``values`` are the accepted ones of a neutral or refused field; empty: any."""

    name: str
    kind: Kind
    says: str
    values: tuple[Any, ...] = ()


def rows(kind: Kind, values: tuple[Any, ...] = (), **fields: str) -> list[FieldRow]:
    """Return a row for each field, given by name and what it does."""
    return [FieldRow(name, kind, says, values) for name, says in fields.items()]


def refused(*names: str, values: tuple[Any, ...] = (None,)) -> list[FieldRow]:
    """Return a row for each field that Kiln does not support."""
    return rows("refused", values, **dict.fromkeys(names, "Not supported yet"))


def _neutral(says: str, *names: str, values: tuple[Any, ...] = ()) -> list[FieldRow]:
    return rows("neutral", values, **dict.fromkeys(names, says))


def _settings(*names: str) -> list[FieldRow]:
    """Return sampling settings of vLLM's that Kiln refuses unless they are neutral."""
    return [row for name in names for row in refused(name, values=NEUTRAL_SETTINGS[name])]


COMMON = (
    *rows(
        "acting",
        model="A name of the served model, the default, or of a LoRA adapter",
        max_tokens="The most tokens of one output; default: 16 in completions, up to the context "
        "in a chat",
        min_tokens="No stop token or stop string ends the output before this many tokens; "
        "default: 0",
        temperature="0 is greedy; default: the model's own, else 1",
        top_p="Sample from the most likely tokens with this much probability together; default: "
        "the model's own, else 1",
        top_k="Sample from this many most likely tokens; 0 or -1 for all; default: the model's "
        "own, else 0",
        min_p="Least probability of a token, relative to the most likely one; default: the "
        "model's own, else 0",
        seed="The same seed and settings sample the same tokens; default: one drawn at random, "
        "which the answer has",
        n="Outputs for each prompt, 1 to 128; more than run at once wait in the queue; default: 1",
        stop="Up to 16 strings that end the output; default: none",
        stop_token_ids="Token ids that end the output; default: none but the EOS tokens",
        ignore_eos="Continue after the EOS token; default: false",
        skip_special_tokens="Remove special tokens from the text; default: true",
        include_stop_str_in_output="Keep the stop string in the text; default: false",
        stream="Send the output as server-sent events; default: false",
        stream_options="How to stream; default: no chunk has token counts",
        presence_penalty="Subtracted from the logits of tokens already generated, -2 to 2; "
        "default: 0",
        frequency_penalty="Subtracted for each time a token was generated, -2 to 2; default: 0",
        repetition_penalty="Divides the positive logits of tokens in prompt or output, 0.01 to 10; "
        "default: the model's own, else 1",
        prompt_logprobs="Return log-probabilities of the prompt's tokens, and of this many most "
        "likely ones at each, 0 to 20; not in a stream; default: none",
        logit_bias="Added to the logits of token ids, -100 to 100; default: nothing",
        allowed_token_ids="The only token ids that may be sampled; default: all",
        bad_words="Texts that the output does not contain: no token that completes one is sampled; "
        "default: none",
        response_format="text, json_object, or json_schema with a schema that the output follows; "
        "default: text",
        structured_outputs="What the output must look like: one of json, regex, choice, grammar "
        "(GBNF or Lark) and json_object, with options for white space; default: any text",
        return_token_ids="Also return the token ids of prompt and outputs; default: false",
        truncate_prompt_tokens="Keep this many tokens at the end of the prompt; -1: what fits; "
        "default: all, and a prompt that does not fit is refused",
        add_special_tokens="Add BOS and the like; default: true for a prompt, false for a chat",
        priority="Lower is served earlier; other than 0 only with --scheduling-policy priority; "
        "default: 0",
        cache_salt="Cached prefixes are shared only among requests with the same salt; default: "
        "none, which is one of them",
        user="A label in the access log; default: none",
    ),
    *[
        FieldRow(name, "acting", f"Another name of structured_outputs.{kind}; default: none")
        for name, kind in OLDER_NAMES.items()
    ],
    *_neutral(
        "No effect: labels for the client's own use",
        *("metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "store"),
    ),
    *_neutral("No effect", "service_tier", values=(None, "auto", "default")),
    *_settings(
        *("best_of", "early_stopping", "length_penalty"),
        *("logits_processors", "repetition_detection"),
        *("spaces_between_special_tokens", "thinking_token_budget"),
        "use_beam_search",
    ),
    *refused(
        *("kv_transfer_params", "vllm_xargs", "request_id"),
        *("lora_path", "rid", "custom_logit_processor", "session_params"),
    ),
    *refused("return_tokens_as_token_ids", "return_hidden_states", values=(None, False)),
)
CHAT = (
    *COMMON,
    *rows(
        "acting",
        messages="The conversation",
        max_completion_tokens="Another name of max_tokens; default: the same",
        logprobs="Return log-probabilities; default: false",
        top_logprobs="Also those of this many most likely tokens, 0 to 20; default: 0",
        tools="Functions that the model may call; with strict the arguments follow the schema; "
        "default: none",
        tool_choice="auto, the default; none: the model does not see the tools; required: at least "
        "one call; one function, which is called once; or allowed_tools",
        chat_template_kwargs="Variables for the chat template, such as enable_thinking; "
        "default: none",
        reasoning_effort="A variable for the chat template; no effect if it does not read it; "
        "default: the template's own",
        add_generation_prompt="False: do not ask for a new message; go on where the chat ends; "
        "default: true",
        continue_final_message="The output is the rest of the last message; default: false",
        parallel_tool_calls="False: at most one tool call; no effect without tools; default: true",
    ),
    *_neutral("No effect: answers are as long as the model makes them", "verbosity"),
    *_neutral("No effect", "modalities", values=(None, ["text"])),
    *_neutral("No effect", "echo", values=(None, False)),
    *_neutral("No effect", *("include_reasoning", "separate_reasoning"), values=(None, True)),
    *_neutral("No effect", "stream_reasoning", values=(None, True)),
    *refused("functions", "documents", values=(None, [])),
    *refused("function_call", values=(None, "none", "auto")),
    *refused(
        *("audio", "prediction", "web_search_options", "chat_template", "media_io_kwargs"),
        "mm_processor_kwargs",
    ),
)
COMPLETION = (
    *COMMON,
    *rows(
        "acting",
        prompt="A text, a list of texts, a list of token ids, or a list of such lists",
        echo="Begin each output with its prompt, its log-probabilities included; with max_tokens 0 "
        "there is nothing else; default: false",
        logprobs="Return log-probabilities of this many most likely tokens, 0 to 20; default: none",
    ),
    *refused("suffix", values=(None, "")),
)
TABLES: dict[str, tuple[FieldRow, ...]] = {
    "ChatCompletionRequest": CHAT,
    "CompletionRequest": COMPLETION,
}


def model_of(name: str, listed: Iterable[FieldRow]) -> type[StrictModel]:
    """Return a model of the fields of some rows that do not act."""
    fields: dict[str, Any] = {
        row.name: (Annotated[Any, Only(*row.values)] if row.values else Any, None)
        for row in listed
        if row.kind != "acting"
    }
    return create_model(name, __base__=StrictModel, **fields)
