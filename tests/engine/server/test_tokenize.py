"""/tokenize counts what a generation would compute, and /detokenize returns the text."""

import pytest

USER = [{"role": "user", "content": "hello world"}]


@pytest.mark.parametrize("added", [None, True, False])
def test_a_prompt_has_the_tokens_of_a_completion(api, tokenizer, added):
    body = {"prompt": "hello world", "add_special_tokens": added}
    answer = api.post("/tokenize", json=body).json()
    ids = tokenizer.encode("hello world", add_special_tokens=added is not False)
    assert answer == {
        "count": len(ids),
        "max_model_len": 128,
        "tokens": ids,
        "token_strs": None,
    }


def test_a_conversation_has_the_tokens_of_a_chat(api, tokenizer):
    answer = api.post("/tokenize", json={"messages": USER}).json()
    assert answer["tokens"] == tokenizer.apply_chat_template(USER)
    chat = api.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 1}).json()
    assert answer["count"] == chat["usage"]["prompt_tokens"]


def test_token_strs_are_the_forms_of_the_vocabulary(api, tokenizer):
    answer = api.post("/tokenize", json={"prompt": "a b", "return_token_strs": True}).json()
    vocabulary = tokenizer.backend.get_vocab()
    assert [vocabulary[form] for form in answer["token_strs"]] == answer["tokens"]
    assert "Ġ" in "".join(answer["token_strs"])


def test_a_text_beyond_the_context_is_counted(api):
    answer = api.post("/tokenize", json={"prompt": "word " * 3000}).json()
    assert answer["count"] > answer["max_model_len"]


@pytest.mark.parametrize("text", ["", "hello", "Grüße 😀\n<|im_end|>"])
def test_detokenize_returns_the_text_with_special_tokens(api, tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    answer = api.post("/detokenize", json={"tokens": ids})
    assert answer.json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param", "part"),
    [
        ("/tokenize", {}, "prompt", "either"),
        ("/tokenize", {"prompt": "a", "messages": USER}, "prompt", "either"),
        ("/tokenize", {"prompt": [5]}, "prompt", "must be a string"),
        ("/tokenize", {"prompt": "a", "zzz": 1}, "zzz", "not a known field"),
        ("/tokenize", {"messages": []}, "messages", "at least one"),
        ("/detokenize", {}, "tokens", "required"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]", "greater than or equal to 0"),
        ("/detokenize", {"tokens": [400]}, "tokens", "0 to 399"),
        ("/detokenize", {"tokens": "5"}, "tokens", "must be a list"),
    ],
)
def test_a_wrong_body_is_400_and_names_the_field(api, path, body, param, part):
    answer = api.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert part in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_another_model_is_404(api, path):
    body = {"prompt": "a"} if path == "/tokenize" else {"tokens": [5]}
    answer = api.post(path, json={**body, "model": "gpt-9"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
