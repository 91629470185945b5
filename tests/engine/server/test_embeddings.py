"""/v1/embeddings: what the openai client gets, every field, and what is refused by name."""

from __future__ import annotations

import base64

import numpy as np
import openai
import pytest
import torch
from embedding_folders import expected

from kiln.engine.text.tokenizer import Tokenizer

TEXTS = ["hello world", "Größe 😀", "x" * 40]
STEM = list(range(100, 150))


@pytest.fixture
def embedding(embedding_server, until_idle):
    yield embedding_server[0]
    until_idle(embedding_server[0])


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folders):
    return Tokenizer.load(tokenizer_folders["llama"])


@pytest.fixture
def embed(embedding):
    def post(**body):
        answer = embedding.post("/v1/embeddings", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    return post


@pytest.fixture
def wanted(embedding_server):
    def make(ids, **settings):
        return expected(embedding_server[1], ids, "mean_tokens", **settings)

    return make


@pytest.fixture
def client(embedding):
    return openai.OpenAI(base_url=f"{embedding.base_url}/v1", api_key="-", max_retries=0)


def vectors(answer):
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    return torch.tensor([item["embedding"] for item in answer["data"]], dtype=torch.float64)


def close(found, *rows):
    torch.testing.assert_close(found, torch.stack(rows), rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", ["float", "base64", None])
def test_the_openai_client_gets_those_of_sentence_transformers(client, wanted, tokenizer, form):
    """Without a format it asks for base64, and decodes it."""
    more = {} if form is None else {"encoding_format": form}
    answer = client.embeddings.create(model="tiny-embedding", input=TEXTS, **more)
    ids = [tokenizer.encode(text) for text in TEXTS]
    assert answer.model == "tiny-embedding"
    assert (answer.object, [one.object for one in answer.data]) == ("list", ["embedding"] * 3)
    total = sum(map(len, ids))
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (total, total)
    found = [one.embedding for one in answer.data]
    if form == "base64":
        found = [np.frombuffer(base64.b64decode(one), "<f4").tolist() for one in found]
    close(torch.tensor(found, dtype=torch.float64), *map(wanted, ids))


def test_an_input_has_four_forms(embed, wanted, tokenizer):
    ids = tokenizer.encode("hello")
    close(vectors(embed(input="hello")), wanted(ids))
    close(vectors(embed(input=ids)), wanted(ids))
    close(vectors(embed(input=["hello", "hello"])), wanted(ids), wanted(ids))
    close(vectors(embed(input=[[5, 6], ids])), wanted([5, 6]), wanted(ids))


def test_each_field_acts(embed, wanted):
    close(vectors(embed(input=STEM, dimensions=5)), wanted(STEM, dimensions=5))
    plain = wanted(STEM, normalize=False)
    close(vectors(embed(input=STEM, use_activation=False)), plain)
    close(vectors(embed(input=STEM, use_activation=False, dimensions=3)), plain[:3])
    cut = embed(input=STEM, truncate_prompt_tokens=7)
    close(vectors(cut), wanted(STEM[-7:]))
    assert cut["usage"]["prompt_tokens"] == 7
    fits = embed(input=[*STEM, *STEM, *STEM], truncate_prompt_tokens=-1)
    assert fits["usage"]["prompt_tokens"] == 128
    close(vectors(embed(input=STEM, cache_salt="mine", user="ann", priority=0)), wanted(STEM))
    assert embed(input="hi", model="tiny-embedding")["model"] == "tiny-embedding"


def test_special_tokens_are_added_unless_they_are_not_wanted(embed, wanted, tokenizer):
    ids = tokenizer.encode("hello", add_special_tokens=False)
    for added in (None, True, False):
        own = ids if added is False else [1, *ids]
        close(vectors(embed(input="hello", add_special_tokens=added)), wanted(own))


def test_many_inputs_wait_for_room_in_the_queue(embed, wanted):
    """The queue of this server holds 140."""
    inputs = [[5 + number % 200, 5 + number % 7] for number in range(300)]
    found = vectors(embed(input=inputs))
    for index in (0, 1, 63, 64, 127, 128, 299):
        close(found[index : index + 1], wanted(inputs[index]))


def test_metrics_count_the_prompt_tokens(embed, embedding, metric):
    before = metric(embedding, "prompt_tokens_total")
    embed(input=[[5, 6], [7]])
    assert metric(embedding, "prompt_tokens_total") == before + 3
    assert metric(embedding, "generation_tokens_total") == 0


@pytest.mark.parametrize(
    ("body", "param", "part"),
    [
        ({}, "input", "is required"),
        ({"input": []}, "input", "the list is empty"),
        ({"input": "", "add_special_tokens": False}, "input", "input 0: the input is empty"),
        ({"input": [[5], []]}, "input", "input 1: the input is empty"),
        ({"input": [[5], [600]]}, "input", "input 1: input has token id 600"),
        ({"input": [[5], [7] * 129]}, "input", "input 1: This model's maximum context length"),
        ({"input": ["a", "word " * 900]}, "input", "length is 128 tokens"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": ["a", 5]}, "input[1]", "must be a string"),
        ({"input": {}}, "input", "must be a string"),
        ({"input": "a", "dimensions": 0}, "dimensions", "1 or more"),
        ({"input": "a", "dimensions": 65}, "dimensions", "1 to 64"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1 or a count"),
        ({"input": "a", "priority": 1}, "priority", "priority scheduling is not enabled"),
        ({"input": "a", "n": 2}, "n", "is not a known field"),
        ({"input": "a", "temperature": 1}, "temperature", "is not a known field"),
        ({"input": "a", "max_tokens": 1}, "max_tokens", "is not a known field"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype", "not supported"),
    ],
)
def test_a_wrong_body_is_400_and_names_the_field(embedding, body, param, part):
    answer = embedding.post("/v1/embeddings", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], part in error["message"]) == (param, True), error


def test_a_text_beyond_the_context_has_openais_code(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="tiny-embedding", input=[[5], [7] * 129])
    assert caught.value.code == "context_length_exceeded"


def test_a_text_at_which_the_engine_fails_is_500_and_named(embedding, embed, wanted):
    answer = embedding.post("/v1/embeddings", json={"input": [[5], [2, 6], [7]]})
    assert answer.status_code == 500
    message = answer.json()["error"]["message"]
    assert message.startswith("input 1: the model's hidden states contain NaN")
    assert answer.headers["X-Request-Id"] in message
    close(vectors(embed(input=[[5], [7]])), wanted([5]), wanted([7]))


def test_another_model_is_404(embedding):
    answer = embedding.post("/v1/embeddings", json={"input": "a", "model": "gpt-9"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "stream": True}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {**CHAT, "max_tokens": 5}),
    ],
)
def test_a_server_of_embeddings_refuses_to_generate_by_name(embedding, path, body):
    answer = embedding.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert "use /v1/embeddings" in answer.json()["error"]["message"]


def test_a_language_model_refuses_embeddings_by_name(server):
    answer = server.post("/v1/embeddings", json={"input": "hi"})
    assert answer.status_code == 400
    assert "--task embed" in answer.json()["error"]["message"]


def test_its_other_routes_work(embedding):
    (model,) = embedding.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny-embedding", 128)
    assert model["task"] == "embed"
    assert embedding.post("/tokenize", json={"prompt": "hi"}).status_code == 200
    assert "/v1/embeddings" in embedding.get("/openapi.json").json()["paths"]
