"""Whatever is sent, the answer is a named error in a line or two, and the server goes on."""

import json
import re
import socket

import httpx
import pytest

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


def _good(**changes):
    return {"prompt": [5, 6], "max_tokens": 2, **changes}


def _chat(**changes):
    return {"messages": USER, "max_tokens": 2, **changes}


TOOL = {"role": "tool", "content": "x"}
CALL = "messages[0].tool_calls[0].function"
NAMED = {"type": "function", "function": {"name": "f"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}


def _tool(**changes):
    return {"type": "function", "function": {"name": "f", "parameters": {}, **changes}}


def _call(arguments):
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


# (path, body, the field to blame, a part of the message)
WRONG = [
    (COMPLETIONS, _good(temprature=1), "temprature", "did you mean temperature?"),
    (COMPLETIONS, _good(zzz=1), "zzz", "not a known field"),
    (CHAT, _chat(prompt="x"), "prompt", "not a known field"),
    (COMPLETIONS, {}, "prompt", "required"),
    (CHAT, {}, "messages", "required"),
    (COMPLETIONS, [], None, "must be a JSON object"),
    (COMPLETIONS, "text", None, "must be a JSON object"),
    (COMPLETIONS, _good(prompt=5), "prompt", "must be a string, got 5"),
    (COMPLETIONS, _good(prompt=None), "prompt", "must be a string"),
    (COMPLETIONS, _good(prompt={}), "prompt", "must be a string"),
    (COMPLETIONS, _good(prompt=["a", 5]), "prompt[1]", "must be a string, got 5"),
    (COMPLETIONS, _good(prompt=[1, "a"]), "prompt[1]", "must be an integer, got 'a'"),
    (COMPLETIONS, _good(prompt=[[1], [True]]), "prompt[1][0]", "must be an integer, got True"),
    (COMPLETIONS, _good(prompt=[1.5, 2]), "prompt[0]", "must be a string"),
    (COMPLETIONS, _good(prompt=[]), "prompt", "empty"),
    (COMPLETIONS, _good(prompt=""), "prompt", "empty"),
    (COMPLETIONS, _good(prompt=[[]]), "prompt", "empty"),
    (COMPLETIONS, _good(prompt=[-1]), "prompt[0]", "greater than or equal to 0"),
    (COMPLETIONS, _good(prompt=[400]), "prompt", "400"),
    (COMPLETIONS, _good(prompt=[2**31]), "prompt[0]", "less than"),
    (COMPLETIONS, _good(prompt=[2**70]), "prompt[0]", "less than"),
    (COMPLETIONS, _good(prompt=["a"] * 129), "prompt", "at most 128"),
    (COMPLETIONS, _good(prompt=["a"] * 100, n=2), "prompt", "at most 128"),
    (COMPLETIONS, _good(prompt=[5] * 128), "prompt", "128 tokens"),
    (COMPLETIONS, _good(prompt="word " * 3000), "prompt", "128"),
    (CHAT, _chat(messages=[{"role": "user", "content": "x " * 200}]), "messages", "128"),
    (COMPLETIONS, _good(max_tokens=0), "max_tokens", "0 is only for echo"),
    (COMPLETIONS, _good(max_tokens=-5), "max_tokens", "-5"),
    (COMPLETIONS, _good(max_tokens=127), "max_tokens", "at most 126"),
    (COMPLETIONS, _good(max_tokens=10**9), "max_tokens", "at most 126"),
    (COMPLETIONS, _good(max_tokens=2**64), "max_tokens", "less than"),
    (COMPLETIONS, _good(max_tokens="5"), "max_tokens", "must be an integer, got '5'"),
    (COMPLETIONS, _good(max_tokens=1.5), "max_tokens", "must be an integer"),
    (COMPLETIONS, _good(max_tokens=True), "max_tokens", "must be an integer"),
    (COMPLETIONS, _good(min_tokens=3), "min_tokens", "at most max_tokens"),
    (COMPLETIONS, _good(min_tokens=-1), "min_tokens", "0 or more"),
    (COMPLETIONS, _good(n=0), "n", "between 1 and 128, got 0"),
    (COMPLETIONS, _good(n=129), "n", "between 1 and 128, got 129"),
    (COMPLETIONS, _good(n=10**30), "n", "less than"),
    (COMPLETIONS, _good(temperature=-1), "temperature", "between 0 and 100, got -1"),
    (COMPLETIONS, _good(temperature="hot"), "temperature", "must be a number, got 'hot'"),
    (COMPLETIONS, _good(top_p=0), "top_p", "above 0"),
    (COMPLETIONS, _good(top_p=1.01), "top_p", "1.01"),
    (COMPLETIONS, _good(top_k=-2), "top_k", "-2"),
    (COMPLETIONS, _good(top_k=2**31), "top_k", "less than"),
    (COMPLETIONS, _good(min_p=2), "min_p", "between 0 and 1"),
    (COMPLETIONS, _good(presence_penalty=2.1), "presence_penalty", "between -2 and 2, got 2.1"),
    (COMPLETIONS, _good(frequency_penalty=-3), "frequency_penalty", "between -2 and 2"),
    (COMPLETIONS, _good(repetition_penalty=0), "repetition_penalty", "0.01 and 10"),
    (COMPLETIONS, _good(repetition_penalty="1"), "repetition_penalty", "must be a number"),
    (COMPLETIONS, _good(logit_bias={"5": 101}), "logit_bias", "between -100 and 100"),
    (COMPLETIONS, _good(logit_bias={"400": 1}), "logit_bias", "400"),
    (COMPLETIONS, _good(logit_bias=[5]), "logit_bias", "must be"),
    (COMPLETIONS, _good(seed=2**63), "seed", "64-bit"),
    (COMPLETIONS, _good(seed="x"), "seed", "must be an integer"),
    (COMPLETIONS, _good(stop=5), "stop", "must be a string"),
    (COMPLETIONS, _good(stop=["a", None]), "stop[1]", "must be a string"),
    (COMPLETIONS, _good(stop=""), "stop", "1 to 256 characters"),
    (COMPLETIONS, _good(stop=["x"] * 17), "stop", "at most 16"),
    (COMPLETIONS, _good(stop="x" * 257), "stop", "1 to 256 characters"),
    (COMPLETIONS, _good(stop_token_ids=[-1]), "stop_token_ids[0]", "greater than or equal to 0"),
    (COMPLETIONS, _good(stop_token_ids=[400]), "stop_token_ids", "400"),
    (COMPLETIONS, _good(stop_token_ids=5), "stop_token_ids", "must be a list"),
    (COMPLETIONS, _good(logprobs=21), "logprobs", "0 to 20"),
    (COMPLETIONS, _good(logprobs=-1), "logprobs", "0 to 20"),
    (COMPLETIONS, _good(logprobs=True), "logprobs", "must be an integer"),
    (COMPLETIONS, _good(echo=True, logprobs=1, stream=True), "echo", "logprobs"),
    (COMPLETIONS, _good(echo="yes"), "echo", "must be true or false"),
    (COMPLETIONS, _good(stream=1), "stream", "must be true or false"),
    (COMPLETIONS, _good(stream_options={"include_usage": True}), "stream_options", "needs stream"),
    (COMPLETIONS, _good(stream=True, stream_options={"x": 1}), "stream_options.x", "not a known"),
    (COMPLETIONS, _good(user=5), "user", "must be a string"),
    (CHAT, _chat(logprobs=5), "logprobs", "must be true or false"),
    (COMPLETIONS, _good(truncate_prompt_tokens=0), "truncate_prompt_tokens", "-1 or a count"),
    (COMPLETIONS, _good(truncate_prompt_tokens=-2), "truncate_prompt_tokens", "-1 or more"),
    (CHAT, _chat(reasoning_effort="x" * 33), "reasoning_effort", "at most 32"),
    (CHAT, _chat(top_logprobs=2), "top_logprobs", "needs logprobs"),
    (CHAT, _chat(logprobs=True, top_logprobs=21), "top_logprobs", "0 to 20"),
    (CHAT, {"messages": USER, "max_completion_tokens": 0}, "max_completion_tokens", "got 0"),
    (CHAT, {"messages": USER, "max_completion_tokens": 500}, "max_completion_tokens", "at most"),
    (CHAT, _chat(max_completion_tokens=3), "max_completion_tokens", "send one"),
    (CHAT, _chat(messages=[]), "messages", "at least one"),
    (CHAT, _chat(messages="hi"), "messages", "must be a list"),
    (CHAT, _chat(messages=[5]), "messages[0]", "must be a JSON object"),
    (CHAT, _chat(messages=[{"role": "robot", "content": "x"}]), "messages[0].role", "'robot'"),
    (CHAT, _chat(messages=[TOOL]), "messages[0].tool_call_id", "required of a tool's message"),
    (CHAT, _chat(messages=[{"role": "user"}]), "messages[0].content", "must be a string"),
    (CHAT, _chat(messages=[_call("{")]), f"{CALL}.arguments", "must be a JSON object, got '{'"),
    (CHAT, _chat(messages=[_call("[1]")]), f"{CALL}.arguments", "must be a JSON object"),
    (CHAT, _chat(messages=[_call(5)]), f"{CALL}.arguments", "must be a JSON object, got 5"),
    (CHAT, _chat(messages=[{"role": "user", "content": "x", "nam": 1}]), "messages[0].nam", ""),
    (CHAT, _chat(tools=[_tool(strict=1)]), "tools[0].function.strict", "must be true or false"),
    (CHAT, _chat(tools=[_tool(name="a b")]), "tools[0].function.name", "letters, digits"),
    (CHAT, _chat(tools=[{"type": "custom"}]), "tools[0].type", "must be 'function'"),
    (CHAT, _chat(tools=[_tool()]), "tools", "template does not show them"),
    (
        CHAT,
        _chat(tools=[_tool(), _tool(parameters={"type": "objekt"})]),
        "tools[1].function.parameters",
        "is not a JSON Schema: at type: 'objekt' is not one of",
    ),
    (CHAT, _chat(tools=[_tool(parameters=5)]), "tools[0].function.parameters", "JSON Schema"),
    (CHAT, _chat(tool_choice="required"), "tool_choice", "'required' needs tools"),
    (CHAT, _chat(tool_choice="any"), "tool_choice", "must be 'none', 'auto' or 'required'"),
    (CHAT, _chat(tool_choice=5), "tool_choice", "must be an object"),
    (CHAT, _chat(tool_choice={"type": "tool"}), "tool_choice.type", "must be 'function' or"),
    (CHAT, _chat(tool_choice=NAMED), "tool_choice", "'f' is not among the tools"),
    (CHAT, _chat(tool_choice=ALLOWED), "tool_choice", "'f' is not among the tools"),
    (CHAT, _chat(tool_choice={**NAMED, "x": 1}), "tool_choice.x", "is not a known field"),
    (
        CHAT,
        _chat(chat_template_kwargs={"messages": []}),
        "chat_template_kwargs.messages",
        "by Kiln",
    ),
    (CHAT, _chat(chat_template_kwargs=5), "chat_template_kwargs", "must be an object"),
    (
        CHAT,
        _chat(add_generation_prompt=True, continue_final_message=True),
        "continue_final_message",
        "send one of them",
    ),
    (CHAT, _chat(messages=[{"role": "user", "content": None}]), "messages[0].content", "string"),
    (
        CHAT,
        _chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        "messages[0].content[0]",
        "is 'image_url', but the model reads only text",
    ),
]


@pytest.mark.parametrize(("path", "body", "param", "part"), WRONG)
def test_a_wrong_body_is_400_and_names_the_field(server, path, body, param, part):
    answer = server.post(path, json=body)
    _check(answer, 400)
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert part in error["message"]
    if param:
        assert re.split(r"[.\[]", param)[0] in error["message"]


LONG = [{"role": "user", "content": "hi " * 200}]


@pytest.mark.parametrize(
    ("path", "body", "param", "part"),
    [
        (COMPLETIONS, {"prompt": [5] * 128}, "prompt", "the prompt has 128 tokens"),
        (COMPLETIONS, {"prompt": [[5], [5] * 128]}, "prompt", "prompt 1 has 128 tokens"),
        (COMPLETIONS, {"prompt": "x" * 400_000}, "prompt", "prompt 0 has 400000 characters"),
        (COMPLETIONS, {"prompt": [5] * 100, "max_tokens": 29}, "max_tokens", "at most 28 are left"),
        (CHAT, {"messages": LONG}, "messages", "the messages have"),
        (CHAT, {"messages": LONG * 2000}, "messages", "of messages has"),
        (CHAT, {"messages": USER, "max_completion_tokens": 500}, "max_completion_tokens", "is 500"),
    ],
)
def test_what_exceeds_the_context_is_told_in_openais_phrase(server, path, body, param, part):
    answer = server.post(path, json=body)
    _check(answer, 400)
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert error["message"].startswith("This model's maximum context length is 128 tokens. ")
    assert part in error["message"]


def _check(answer, status):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert 0 < len(error["message"]) <= 600
    assert error["message"].count("\n") <= 1
    assert "Traceback" not in answer.text
    assert ".py" not in answer.text


JSON = {"Content-Type": "application/json"}
RAW = {
    "malformed": (b'{"prompt": ', 400),
    "empty": (b"", 400),
    "not UTF-8": (b'{"prompt": "\xff\xfe"}', 400),
    "half a surrogate": (b'{"prompt": "\\ud800"}', 400),
    "NaN": (b'{"prompt": [5], "temperature": NaN}', 400),
    "infinity": (b'{"prompt": [5], "temperature": 1e999}', 400),
    "a number of 5000 digits": (b'{"prompt": [5], "seed": ' + b"9" * 5000 + b"}", 400),
    "a million brackets": (b"[" * 1_000_000, 400),
    "a hundred thousand unknown fields": (
        json.dumps({f"f{i}": i for i in range(100_000)}).encode(),
        400,
    ),
    "a million wrong tokens": (b'{"prompt": [5' + b',""' * 1_000_000 + b"]}", 400),
    "two million stop tokens": (
        b'{"prompt": [5], "stop_token_ids": [5' + b",5" * 2_000_000 + b"]}",
        400,
    ),
    "a million stop strings": (b'{"prompt": [5], "stop": ["a"' + b',"a"' * 1_000_000 + b"]}", 400),
    "four hundred thousand biases": (
        json.dumps({"prompt": [5], "logit_bias": {i: 1 for i in range(300_000)}}).encode(),
        400,
    ),
    "a million prompts": (b'{"prompt": ["a"' + b',"a"' * 1_000_000 + b"]}", 400),
    "a million empty prompts": (b'{"prompt": [[]' + b",[]" * 1_000_000 + b"]}", 400),
    "a million empty objects": (b'{"prompt": [5], "zzz": [{}' + b",{}" * 1_000_000 + b"]}", 400),
    "two million tokens": (b'{"prompt": [5' + b",5" * 2_000_000 + b"]}", 400),
    "four million digits": (b'{"prompt": [5], "seed": ' + b"9" * 4_000_000 + b"}", 400),
    "a long unknown name": (b'{"' + b"x" * 100_000 + b'": 1, "prompt": [5]}', 400),
    "a long wrong value": (b'{"prompt": [5], "seed": "' + b"x" * 100_000 + b'"}', 400),
    "null": (b"null", 400),
    "NUL": (b'{"prompt": "a\\u0000b", "max_tokens": 1}', 200),
    "too large": (b" " * (4 * 2**20 + 1), 413),
}


@pytest.mark.parametrize("name", RAW)
def test_hostile_bytes_are_4xx(api, name):
    body, status = RAW[name]
    answer = api.post(COMPLETIONS, content=body, headers=JSON)
    assert answer.status_code == status, answer.text
    if status != 200:
        _check(answer, status)
        assert len(answer.content) < 4096


def test_a_body_without_length_is_cut_off_at_the_limit(api):
    def pieces():
        for _ in range(80):
            yield b" " * 65_536

    _check(api.post(COMPLETIONS, content=pieces(), headers=JSON), 413)


def test_another_content_type_is_415(api):
    for headers in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "application/jsonx"}):
        answer = api.post(COMPLETIONS, content=b"{}", headers=headers)
        _check(answer, 415)
    fine = {"Content-Type": "application/json; charset=utf-8"}
    assert api.post(COMPLETIONS, content=json.dumps(_good()), headers=fine).status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_unknown_model_is_404(api, path):
    body = (_good if path == COMPLETIONS else _chat)(model="gpt-9")
    answer = api.post(path, json=body)
    _check(answer, 404)
    assert answer.json()["error"]["code"] == "model_not_found"
    assert "'gpt-9'" in answer.json()["error"]["message"]
    _check(api.get("/v1/models/gpt-9"), 404)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/completions/", 404),
        ("GET", "//health/live", 404),
        ("GET", COMPLETIONS, 405),
        ("DELETE", CHAT, 405),
        ("POST", "/metrics", 405),
        ("BREW", "/v1/models", 405),
    ],
)
def test_unknown_routes_and_methods_are_named(api, method, path, status):
    answer = httpx.request(method, str(api.base_url).rstrip("/") + path, timeout=120)
    _check(answer, status)
    if status == 405:
        assert answer.headers["allow"]


def test_a_huge_header_is_refused(api):
    for size in (20_000, 100_000):
        _check(api.get("/version", headers={"X-Long": "x" * size}), 431)
    _check(api.get("/version", headers={f"X-{i}": "y" for i in range(80)}), 431)


def test_bytes_that_are_not_http_are_refused(api):
    with socket.create_connection((api.base_url.host, api.base_url.port), timeout=120) as raw:
        raw.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")
        assert b"400" in raw.recv(100)


def test_a_full_queue_is_503_with_retry_after(api):
    body = {"prompt": [[5]] * 100, "max_tokens": 60, "ignore_eos": True}
    answer = api.post(COMPLETIONS, json=body)
    _check(answer, 503)
    assert answer.json()["error"]["code"] == "queue_full"
    assert int(answer.headers["retry-after"]) >= 1
