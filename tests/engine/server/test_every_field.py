"""Every field that the API accepts changes the answer, and every other value is refused by name."""

import pytest

from kiln.engine.server.protocol import ChatCompletionRequest, CompletionRequest

PROMPT = [5, 60, 7]
BASE = {"prompt": PROMPT, "max_tokens": 12, "seed": 1, "temperature": 1.0, "ignore_eos": True}


@pytest.fixture
def complete(api):
    """POST a completion with some fields changed; None leaves one out."""

    def post(**fields):
        body = {k: v for k, v in {**BASE, **fields}.items() if v is not None}
        answer = api.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    return post


@pytest.fixture
def text(complete):
    return lambda **fields: complete(**fields)["choices"][0]["text"]


def _temperature_and_seed(text):
    assert text(temperature=0, seed=1) == text(temperature=0, seed=2)
    assert text(seed=1) == text(seed=1) != text(seed=2)
    assert text(seed=1, temperature=0.001) != text(seed=1)


def _narrow(field, value):
    def check(text):
        assert text(**{field: value}) == text(temperature=0) != text()

    return check


def _model(text):
    assert text(model="tiny") == text()


def _max_tokens(complete):
    assert complete(max_tokens=3)["usage"]["completion_tokens"] == 3
    assert complete(max_tokens=None)["usage"]["completion_tokens"] == 16


def _prompt(complete):
    assert complete(prompt="hello")["usage"]["prompt_tokens"] > 1
    assert complete(prompt=[5, 6])["usage"]["prompt_tokens"] == 2
    assert len(complete(prompt=["a", "b"])["choices"]) == 2
    assert len(complete(prompt=[[5], [6], [7]])["choices"]) == 3


def _n(complete):
    choices = complete(n=3)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({choice["text"] for choice in choices}) == 3


def _ignore_eos(complete):
    ended = complete(ignore_eos=False, max_tokens=60)["choices"][0]
    assert ended["finish_reason"] == "stop"
    assert complete(max_tokens=60)["choices"][0]["finish_reason"] == "length"


def _stop_token_ids(complete):
    answer = complete(stop_token_ids=list(range(400)))
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["text"] == ""
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert isinstance(answer["choices"][0]["stop_reason"], int)


def _min_tokens(complete):
    stops = list(range(3, 400))
    assert complete(stop_token_ids=stops)["usage"]["completion_tokens"] == 1
    assert complete(stop_token_ids=stops, min_tokens=5)["usage"]["completion_tokens"] == 6


def _stop(complete):
    whole = complete()["choices"][0]["text"]
    cut = complete(stop=whole[4:6])["choices"][0]
    assert cut["text"] == whole[: whole.index(whole[4:6])]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", whole[4:6])
    assert complete(stop=["never in it", whole[4:6]])["choices"][0]["text"] == cut["text"]


def _include_stop_str_in_output(complete):
    whole = complete()["choices"][0]["text"]
    kept = complete(stop=whole[4:6], include_stop_str_in_output=True)["choices"][0]["text"]
    assert kept == whole[: whole.index(whole[4:6]) + 2]


def _skip_special_tokens(complete):
    flat = {"n": 8, "max_tokens": 100, "temperature": 100, "top_k": 0}
    shown = complete(**flat, skip_special_tokens=False)["choices"]
    assert "<|im_" in "".join(choice["text"] for choice in shown)
    hidden = complete(**flat)["choices"]
    assert "<|im_" not in "".join(choice["text"] for choice in hidden)


def _logprobs(complete):
    assert complete()["choices"][0]["logprobs"] is None
    logprobs = complete(logprobs=3)["choices"][0]["logprobs"]
    assert {len(values) for values in logprobs.values()} == {12}
    assert all(3 <= len(top) <= 4 for top in logprobs["top_logprobs"])
    alone = complete(logprobs=0)["choices"][0]["logprobs"]
    assert all(len(top) == 1 for top in alone["top_logprobs"])
    assert all(value <= 0 for value in alone["token_logprobs"])


def _echo(complete):
    plain = complete(prompt="hello")["choices"][0]["text"]
    assert complete(prompt="hello", echo=True)["choices"][0]["text"] == "hello" + plain


def _logit_bias(complete):
    answer = complete(logit_bias={"5": 100}, temperature=0, logprobs=0, max_tokens=3)
    assert len(set(answer["choices"][0]["logprobs"]["tokens"])) == 1
    banned = complete(logit_bias={"5": 100, "6": 99}, temperature=0, max_tokens=3)
    assert banned["choices"][0]["text"] == answer["choices"][0]["text"]
    assert complete(logit_bias={})["choices"] == complete()["choices"]


def _penalty(field, value):
    """Two tokens lie far above all others and nearly level: the penalty makes them take turns."""

    def check(complete):
        level = {"logit_bias": {"9": 60, "10": 60}, "temperature": 0, "logprobs": 0}
        plain, changed = (
            complete(**level, **more)["choices"][0]["logprobs"]["tokens"]
            for more in ({}, {field: value})
        )
        assert len(set(plain)) == 1
        assert len(set(changed)) == 2

    return check


# What shows that a field acts; a check named by its argument takes ``complete`` or ``text``.
ACTS = {
    "model": _model,
    "prompt": _prompt,
    "max_tokens": _max_tokens,
    "min_tokens": _min_tokens,
    "temperature": _temperature_and_seed,
    "seed": _temperature_and_seed,
    "top_p": _narrow("top_p", 1e-6),
    "top_k": _narrow("top_k", 1),
    "min_p": _narrow("min_p", 1.0),
    "n": _n,
    "stop": _stop,
    "stop_token_ids": _stop_token_ids,
    "ignore_eos": _ignore_eos,
    "skip_special_tokens": _skip_special_tokens,
    "include_stop_str_in_output": _include_stop_str_in_output,
    "logprobs": _logprobs,
    "echo": _echo,
    "logit_bias": _logit_bias,
    "presence_penalty": _penalty("presence_penalty", 2),
    "frequency_penalty": _penalty("frequency_penalty", 1.5),
    "repetition_penalty": _penalty("repetition_penalty", 1.5),
}
ELSEWHERE = {  # shown in the tests of streaming, of chat, and of the log
    "stream",
    "stream_options",
    "user",
    "messages",
    "max_completion_tokens",
    "top_logprobs",
}
# Fields of OpenAI's that do nothing yet: (values that change nothing, one that would).
REFUSED = {
    "response_format": ([None, {"type": "text"}], {"type": "json_object"}),
    "best_of": ([None, 1], 2),
    "suffix": ([None, ""], "end"),
}
REFUSED_CHAT = {
    "tools": ([None, []], [{"type": "function"}]),
    "tool_choice": ([None, "none", "auto"], "required"),
    "modalities": ([None, ["text"]], ["audio"]),
    "store": ([None, False], True),
    **dict.fromkeys(
        (
            *("functions", "function_call", "parallel_tool_calls", "reasoning_effort"),
            *("audio", "prediction", "service_tier", "metadata"),
        ),
        ([None], "x"),
    ),
}


def test_no_field_is_left_out_of_the_tables():
    completion = set(CompletionRequest.model_fields)
    chat = set(ChatCompletionRequest.model_fields)
    assert completion <= set(ACTS) | ELSEWHERE | set(REFUSED)
    assert chat <= set(ACTS) | ELSEWHERE | set(REFUSED) | set(REFUSED_CHAT)
    assert set(ACTS) | ELSEWHERE | set(REFUSED) | set(REFUSED_CHAT) <= completion | chat


@pytest.mark.parametrize(
    ("model", "table"),
    [("CompletionRequest", REFUSED), ("ChatCompletionRequest", REFUSED_CHAT)],
)
def test_the_schema_lists_what_is_refused_as_refused(server, model, table):
    shapes = server.get("/openapi.json").json()["components"]["schemas"][model]["properties"]
    for field, (neutral, active) in table.items():
        if field == "response_format":  # an object with a type of its own
            continue
        shape = shapes[field]
        allowed = [None] if shape.get("type") == "null" else shape["enum"]
        assert active not in allowed
        assert [value for value in neutral if value in allowed] == neutral


@pytest.mark.parametrize("field", ACTS)
def test_a_field_acts(field, complete, text):
    check = ACTS[field]
    wanted = check.__code__.co_varnames[0]
    check({"complete": complete, "text": text}[wanted])


def _refused(path, base, table):
    return [(path, base, field, *table[field]) for field in table]


CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "base", "field", "neutral", "active"),
    [
        *_refused("/v1/completions", {"prompt": "a", "max_tokens": 2}, REFUSED),
        *_refused("/v1/chat/completions", CHAT, REFUSED_CHAT),
    ],
)
def test_a_field_that_does_nothing_yet_is_refused_unless_neutral(
    server, path, base, field, neutral, active
):
    for value in neutral:
        answer = server.post(path, json={**base, field: value})
        assert answer.status_code == 200, answer.text
    answer = server.post(path, json={**base, field: active})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(field)
    assert field in answer.json()["error"]["message"]


def test_defaults_come_from_the_models_generation_config(text):
    own = {"temperature": None, "top_k": None}
    assert text(**own) == text(temperature=0.5, top_k=50) != text(temperature=0.5, top_k=0)
