"""Log-probabilities of prompts over HTTP: vLLM's field, and OpenAI's echo."""

from __future__ import annotations

import pytest

PROMPT = [5, 60, 7, 8]


@pytest.fixture
def complete(server):
    def post(**body):
        answer = server.post("/v1/completions", json={"prompt": PROMPT, "temperature": 0, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    return post


def test_completions_have_them_in_each_choice(complete):
    body = complete(prompt=[PROMPT, [9, 10]], prompt_logprobs=2, max_tokens=2, n=2)
    assert [len(choice["prompt_logprobs"]) for choice in body["choices"]] == [4, 4, 2, 2]
    first, *others = body["choices"][0]["prompt_logprobs"]
    assert first is None
    for token, entries in zip(PROMPT[1:], others, strict=True):
        assert 2 <= len(entries) <= 3
        assert {"logprob", "rank", "decoded_token"} == set(entries[str(token)])
    assert body["choices"][1]["prompt_logprobs"] == body["choices"][0]["prompt_logprobs"]
    assert "prompt_logprobs" not in complete(max_tokens=2)["choices"][0]


def test_a_chat_has_them_once(server):
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "prompt_logprobs": 0}
    body = server.post("/v1/chat/completions", json=chat).json()
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
    assert all(len(entries) == 1 for entries in body["prompt_logprobs"][1:])


def test_an_echo_begins_with_those_of_the_prompt(complete):
    plain = complete(max_tokens=3, logprobs=1, prompt_logprobs=1)["choices"][0]
    echo = complete(max_tokens=3, logprobs=1, echo=True)["choices"][0]
    length = len(echo["text"]) - len(plain["text"])
    assert echo["text"][length:] == plain["text"]
    values = [None]
    for token, entries in zip(PROMPT[1:], plain["prompt_logprobs"][1:], strict=True):
        values.append(entries[str(token)]["logprob"])
    found, own = echo["logprobs"], plain["logprobs"]
    assert found["token_logprobs"] == values + own["token_logprobs"]
    assert found["tokens"][len(PROMPT) :] == own["tokens"]
    assert found["top_logprobs"][0] is None
    assert found["top_logprobs"][len(PROMPT) :] == own["top_logprobs"]
    assert found["text_offset"][0] == 0
    assert found["text_offset"][len(PROMPT) :] == [length + one for one in own["text_offset"]]
    assert sorted(found["text_offset"]) == found["text_offset"]


def test_max_tokens_0_echoes_the_prompt_alone(complete):
    body = complete(max_tokens=0, logprobs=1, echo=True)
    (choice,) = body["choices"]
    assert len(choice["logprobs"]["tokens"]) == len(PROMPT)
    assert (choice["finish_reason"], body["usage"]["completion_tokens"]) == ("length", 0)
    longer = complete(max_tokens=3, logprobs=1, echo=True, ignore_eos=True)["choices"][0]
    assert longer["text"].startswith(choice["text"])
    assert len(longer["logprobs"]["tokens"]) == len(PROMPT) + 3


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "stream": True}, "max_tokens"),
    ],
)
def test_what_is_not_available_is_refused_by_name(server, body, param):
    answer = server.post("/v1/completions", json={"prompt": PROMPT, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
