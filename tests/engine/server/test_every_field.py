"""Every field that the API accepts changes the answer, and every other value is refused by name."""

import pytest

from kiln.engine.server.field_table import TABLES
from kiln.engine.server.output_fields import OLDER_NAMES
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
    assert len(complete(n=20, max_tokens=1)["choices"]) == 20  # eight run at once


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


def _allowed_token_ids(complete):
    some = {5, 6, 60, 61}
    answer = complete(allowed_token_ids=list(some), return_token_ids=True, temperature=2)
    assert set(answer["choices"][0]["token_ids"]) <= some
    assert complete(allowed_token_ids=list(range(400)))["choices"] == complete()["choices"]


def _bad_words(complete):
    whole = complete(temperature=0)["choices"][0]["text"]
    for word in (whole[2:4], whole[5:9]):
        other = complete(temperature=0, bad_words=[word])["choices"][0]["text"]
        assert other != whole
    assert complete(temperature=0, bad_words=[])["choices"][0]["text"] == whole


def _prompt_logprobs(complete):
    (choice,) = complete(prompt_logprobs=1, prompt=[5, 6, 7])["choices"]
    assert [entries is None for entries in choice["prompt_logprobs"]] == [True, False, False]


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


def _return_token_ids(complete):
    assert "token_ids" not in complete()["choices"][0]
    first, second = complete(return_token_ids=True, prompt=[[5, 60], [7]], n=1)["choices"]
    assert (first["prompt_token_ids"], second["prompt_token_ids"]) == ([5, 60], [7])
    assert {len(choice["token_ids"]) for choice in (first, second)} == {12}


def _cache_salt(complete):
    prompt = list(range(100, 160))
    cached = [
        complete(prompt=prompt, cache_salt=salt)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for salt in ("mine", "mine", "other")
    ]
    assert cached == [0, 48, 0]


def _truncate_prompt_tokens(complete):
    long = list(range(5, 300))
    for most, kept in ((3, 3), (-1, 116)):
        answer = complete(prompt=long, truncate_prompt_tokens=most)
        assert answer["usage"]["prompt_tokens"] == kept
        assert answer["choices"] == complete(prompt=long[-kept:])["choices"]
    echoed = complete(prompt="Hello, world", truncate_prompt_tokens=1, echo=True)
    assert not echoed["choices"][0]["text"].startswith("Hello")
    assert complete(prompt="word " * 900, truncate_prompt_tokens=2)["usage"]["prompt_tokens"] == 2


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
    "allowed_token_ids": _allowed_token_ids,
    "bad_words": _bad_words,
    "prompt_logprobs": _prompt_logprobs,
    "return_token_ids": _return_token_ids,
    "cache_salt": _cache_salt,
    "truncate_prompt_tokens": _truncate_prompt_tokens,
    "presence_penalty": _penalty("presence_penalty", 2),
    "frequency_penalty": _penalty("frequency_penalty", 1.5),
    "repetition_penalty": _penalty("repetition_penalty", 1.5),
}
ELSEWHERE = {  # shown in the tests of streaming, chats, the log, priorities, and outputs' forms
    *OLDER_NAMES,
    "structured_outputs",
    "stream",
    "stream_options",
    "priority",
    "user",
    "messages",
    "max_completion_tokens",
    "top_logprobs",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "parallel_tool_calls",
    "reasoning_effort",
    "response_format",
    "add_special_tokens",
}
MODELS = {"ChatCompletionRequest": ChatCompletionRequest, "CompletionRequest": CompletionRequest}
ANY = ["x", {"a": "b"}, True]  # values of neutral fields that take any


@pytest.mark.parametrize("name", MODELS)
def test_the_table_has_exactly_the_fields_of_the_model(name):
    rows = TABLES[name]
    assert [row.name for row in rows] == list(dict.fromkeys(row.name for row in rows))
    assert {row.name for row in rows} == set(MODELS[name].model_fields)


def test_every_acting_field_is_shown_to_act():
    acting = {row.name for rows in TABLES.values() for row in rows if row.kind == "acting"}
    assert acting == set(ACTS) | ELSEWHERE


@pytest.mark.parametrize("name", MODELS)
def test_the_schema_says_what_each_field_does(server, name):
    shapes = server.get("/openapi.json").json()["components"]["schemas"][name]["properties"]
    order = [shape["x-kiln"] for shape in shapes.values()]
    assert order == sorted(order, key=["acting", "neutral", "refused"].index)
    for row in TABLES[name]:
        shape = shapes[row.name]
        assert (shape["x-kiln"], shape["description"]) == (row.kind, row.says)
        assert shape.get("enum", []) == list(row.values)


@pytest.mark.parametrize("field", ACTS)
def test_a_field_acts(field, complete, text):
    check = ACTS[field]
    wanted = check.__code__.co_varnames[0]
    check({"complete": complete, "text": text}[wanted])


CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PATHS = {
    "ChatCompletionRequest": ("/v1/chat/completions", CHAT),
    "CompletionRequest": ("/v1/completions", {"prompt": "hi"}),
}


@pytest.mark.parametrize("name", MODELS)
def test_fields_without_effect_change_nothing(server, name):
    """One answer with all of them, at each of their values, is the answer without them."""
    path, base = PATHS[name]
    base = {**base, "max_tokens": 5, "seed": 3}
    plain = server.post(path, json=base).json()["choices"]
    idle = {row.name: row.values or (None, *ANY) for row in TABLES[name] if row.kind != "acting"}
    for turn in range(max(map(len, idle.values()))):
        extra = {field: values[turn % len(values)] for field, values in idle.items()}
        answer = server.post(path, json={**base, **extra})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == plain


@pytest.mark.parametrize("name", MODELS)
def test_a_field_that_is_not_supported_is_refused_by_name(server, name):
    path, base = PATHS[name]
    limited = [row for row in TABLES[name] if row.values]
    assert len(limited) > 10
    for row in limited:
        answer = server.post(path, json={**base, row.name: "surely not"})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == row.name
        assert error["message"].startswith(f"{row.name}: is not supported yet: leave it out")


def test_true_is_not_the_number_one(server):
    body = {"prompt": "hi", "best_of": True}
    assert server.post("/v1/completions", json=body).status_code == 400
    assert server.post("/v1/completions", json={**body, "best_of": 1}).status_code == 200


def test_defaults_come_from_the_models_generation_config(text):
    own = {"temperature": None, "top_k": None}
    assert text(**own) == text(temperature=0.5, top_k=50) != text(temperature=0.5, top_k=0)
