"""Chats with tools and reasoning over HTTP: an engine that writes what the test says."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from one_life import OneLife
from reply_texts import FORMATS, NOW, TOOLS, WEATHER
from scripted_engine import Writer

from kiln.engine.server.app import create_app
from kiln.engine.server.serving import ServerSettings
from kiln.engine.text.replies.choice import choose_formats
from kiln.engine.text.tokenizer import Tokenizer

TEMPLATE = Path(__file__).parents[1] / "text" / "replies" / "templates" / "hermes.jinja"
MESSAGES = [{"role": "user", "content": "What is the weather?"}]
BODY = {"messages": MESSAGES, "tools": TOOLS}
SPECIAL = ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|channel|>", "<|message|>", "<|call|>"]
SPECIAL += ["<|start|>", "<|end|>", "<|return|>", "<|constrain|>", "<|other|>"]
SPECIAL += ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"]
SPECIAL += ["<｜tool▁call▁end｜>", "<｜tool▁sep｜>"]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folders):
    return with_marks(tokenizer_folders["byte-level"])


def with_marks(folder):
    """A tokenizer in which the marks of all formats are special tokens."""
    loaded = Tokenizer.load(folder)
    loaded.backend.add_special_tokens(SPECIAL)
    template = TEMPLATE.read_text(encoding="utf-8")
    eos = loaded.eos_token_ids
    return Tokenizer(loaded.backend, chat_templates={"default": template}, eos_ids=eos)


def post(writer, tokenizer, parser, body, reasoning=None):
    settings = ServerSettings(("tiny",), replies=choose_formats([], parser, reasoning))
    app = create_app(OneLife(writer), tokenizer, settings)

    async def send():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            return await http.post("/v1/chat/completions", json=body)

    return asyncio.run(send())


def whole(writer, tokenizer, parser, body, **options):
    answer = post(writer, tokenizer, parser, body, **options)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(writer, tokenizer, parser, body, **options):
    """The events of a stream, and for each output the message that they add up to."""
    answer = post(writer, tokenizer, parser, {**body, "stream": True}, **options)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    outputs = {}
    for choice in (choice for event in events for choice in event["choices"]):
        output = outputs.setdefault(choice["index"], {"text": "", "reasoning": "", "calls": []})
        delta = choice["delta"]
        output["text"] += delta.get("content") or ""
        output["reasoning"] += delta.get("reasoning_content", "")
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                assert set(part) == {"index", "id", "type", "function"}
                assert (part["type"], part["index"]) == ("function", len(output["calls"]))
                output["calls"].append({"name": part["function"]["name"], "arguments": ""})
            else:
                assert set(part["function"]) == {"arguments"}
            output["calls"][part["index"]]["arguments"] += part["function"]["arguments"]
        output["reason"] = choice["finish_reason"]
    return events, [outputs[index] for index in sorted(outputs)]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.parser)
def test_calls_are_answered_whole_and_streamed(tokenizer, form):
    text = form.write([WEATHER, NOW])
    writer = Writer(tokenizer, text)
    (choice,) = whole(writer, tokenizer, form.parser, BODY)["choices"]
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == (None, "tool_calls")
    found = [call["function"] for call in message["tool_calls"]]
    assert [(call["name"], json.loads(call["arguments"])) for call in found] == [WEATHER, NOW]
    assert {call["type"] for call in message["tool_calls"]} == {"function"}
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    _, (output,) = streamed(writer, tokenizer, form.parser, BODY)
    assert (output["text"], output["reason"]) == ("", "tool_calls")
    assert output["calls"] == found


def test_without_tools_marks_that_are_special_tokens_stay_hidden(tokenizer):
    text = "a[TOOL_CALLS]f[ARGS]{}<|other|>"
    for body in ({"messages": MESSAGES}, {**BODY, "tool_choice": "none"}):
        (choice,) = whole(Writer(tokenizer, text), tokenizer, "mistral", body)["choices"]
        assert choice["message"]["content"] == "af{}"
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"


def test_with_tools_other_special_tokens_stay_hidden(tokenizer):
    writer = Writer(tokenizer, "a<|other|>b[TOOL_CALLS]f[ARGS]{}")
    (choice,) = whole(writer, tokenizer, "mistral", BODY)["choices"]
    assert choice["message"]["content"] == "ab"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


def test_harmony_is_read_without_tools_too(tokenizer):
    text = "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>final"
    writer = Writer(tokenizer, text + "<|message|>Hi.<|return|>")
    (choice,) = whole(writer, tokenizer, "openai", {"messages": MESSAGES})["choices"]
    assert choice["message"]["content"] == "Hi."
    assert choice["message"]["reasoning_content"] == choice["message"]["reasoning"] == "I think."


def test_harmony_ends_at_its_own_tokens(tokenizer):
    stops = tokenizer.ids_of(["<|call|>", "<|return|>"])
    for body, wanted in ((BODY, stops), ({**BODY, "ignore_eos": True}, set())):
        writer = Writer(tokenizer, "x")
        whole(writer, tokenizer, "openai", {**body, "stop_token_ids": [7]})
        assert set(writer.requests[0].params.stop_token_ids) == {7, *wanted}


@pytest.mark.parametrize("stream", [False, True])
def test_each_output_is_read_on_its_own(tokenizer, stream):
    form = FORMATS[0]
    texts = [form.write([WEATHER]), "Text.", f"<think>A.</think>B.\n{form.write([NOW])}"]
    body, reasoning = {**BODY, "n": 3}, "qwen3"
    writer = Writer(tokenizer, *texts)
    if stream:
        _, found = streamed(writer, tokenizer, "hermes", body, reasoning=reasoning)
        names = [[call["name"] for call in one["calls"]] for one in found]
        texts = [(one["text"], one["reasoning"], one["reason"]) for one in found]
    else:
        choices = whole(writer, tokenizer, "hermes", body, reasoning=reasoning)["choices"]
        messages = [choice["message"] for choice in choices]
        calls = [message.get("tool_calls", ()) for message in messages]
        names = [[call["function"]["name"] for call in one] for one in calls]
        texts = [
            (
                choice["message"]["content"] or "",
                choice["message"].get("reasoning_content", ""),
                choice["finish_reason"],
            )
            for choice in choices
        ]
    assert names == [["get_weather"], [], ["now"]]
    assert texts == [("", "", "tool_calls"), ("Text.", "", "stop"), ("B.", "A.", "tool_calls")]


def test_a_call_that_is_cut_off_is_not_completed(tokenizer):
    text = FORMATS[0].write([WEATHER])
    cut = text[: text.index('"days"')]
    writer = Writer(tokenizer, cut, end="length")
    (choice,) = whole(writer, tokenizer, "hermes", BODY)["choices"]
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "Zürich", '
    _, (output,) = streamed(writer, tokenizer, "hermes", BODY)
    assert (output["calls"], output["reason"]) == ([call["function"]], "length")


def test_log_probabilities_and_usage_count_all_tokens(tokenizer):
    writer = Writer(tokenizer, FORMATS[0].write([WEATHER]))
    count = len(writer.ids[0]) + 1
    body = {**BODY, "logprobs": True, "stream_options": {"include_usage": True}}
    events, _ = streamed(writer, tokenizer, "hermes", body)
    parts = [choice["logprobs"] for event in events for choice in event["choices"]]
    assert sum(len(part["content"]) for part in parts if part) == count
    assert events[-1]["usage"]["completion_tokens"] == count
    del body["stream_options"]
    answer = whole(writer, tokenizer, "hermes", body)
    assert len(answer["choices"][0]["logprobs"]["content"]) == count
    assert answer["usage"]["completion_tokens"] == count


def test_a_chunk_that_says_nothing_is_not_sent(tokenizer):
    writer = Writer(tokenizer, FORMATS[0].write([WEATHER]))
    events, _ = streamed(writer, tokenizer, "hermes", BODY)
    opening, *others = (event["choices"][0] for event in events)
    assert opening["delta"] == {"role": "assistant", "content": ""}
    assert all(choice["delta"] or choice["finish_reason"] for choice in others)
    assert len(events) < len(writer.ids[0])


def test_only_the_first_call_is_kept_where_the_request_says_so(tokenizer):
    writer = Writer(tokenizer, FORMATS[0].write([WEATHER, NOW]))
    body = {**BODY, "parallel_tool_calls": False}
    (choice,) = whole(writer, tokenizer, "hermes", body)["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]
    _, (output,) = streamed(writer, tokenizer, "hermes", body)
    assert [call["name"] for call in output["calls"]] == ["get_weather"]


NAMED = {"type": "function", "function": {"name": WEATHER[0]}}


@pytest.mark.parametrize(
    ("choice", "reason"), [("auto", "tool_calls"), ("required", "tool_calls"), (NAMED, "stop")]
)
def test_a_call_that_is_demanded_is_in_the_grammar(tokenizer, choice, reason):
    """OpenAI ends an answer that had to be one call of one function with "stop"."""
    form = FORMATS[0]
    writer = Writer(tokenizer, form.write([WEATHER]))
    body = {**BODY, "tool_choice": choice}
    (answer,) = whole(writer, tokenizer, form.parser, body)["choices"]
    assert answer["finish_reason"] == reason
    _, (output,) = streamed(Writer(tokenizer, form.write([WEATHER])), tokenizer, form.parser, body)
    assert output["reason"] == reason
    grammar = writer.requests[0].grammar
    assert (grammar is None) == (choice == "auto")
    if choice != "auto":
        names = [tool["function"]["name"] for tool in TOOLS]
        offered = [name for name in names if name in grammar]
        assert offered == (names if choice == "required" else [WEATHER[0]])


def test_calls_cannot_be_demanded_of_a_model_without_a_format(tokenizer):
    answer = post(Writer(tokenizer, "x"), tokenizer, "none", {**BODY, "tool_choice": "required"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tool_choice"
    assert "see --tool-call-parser" in answer.json()["error"]["message"]
