"""The table of fields has those of the other routes too, and their schemas say what each does."""

import pytest

from kiln.engine.server.anthropic.body import CountTokensRequest, MessagesRequest
from kiln.engine.server.embeddings import EmbeddingsRequest
from kiln.engine.server.responses_api.body import ResponsesRequest
from kiln.engine.server.route_fields import ROUTE_TABLES
from kiln.engine.server.tokenize import DetokenizeRequest, TokenizeRequest

OWN = (
    *(CountTokensRequest, MessagesRequest, ResponsesRequest, TokenizeRequest, DetokenizeRequest),
    EmbeddingsRequest,
)
MODELS = {model.__name__: model for model in OWN}
PATHS = {
    "CountTokensRequest": "/v1/messages/count_tokens",
    "MessagesRequest": "/v1/messages",
    "ResponsesRequest": "/v1/responses",
    "EmbeddingsRequest": "/v1/embeddings",
    "TokenizeRequest": "/tokenize",
    "DetokenizeRequest": "/detokenize",
}
BODIES = {
    "CountTokensRequest": {"messages": [{"role": "user", "content": "hi"}]},
    "MessagesRequest": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
    "ResponsesRequest": {"input": "hi", "max_output_tokens": 5},
    "EmbeddingsRequest": {"input": "hi"},
    "TokenizeRequest": {"prompt": "hi"},
    "DetokenizeRequest": {"tokens": [5]},
}


def test_every_body_has_a_table():
    assert set(ROUTE_TABLES) == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_the_table_has_exactly_the_fields_of_the_body(name):
    rows = [row.name for row in ROUTE_TABLES[name]]
    assert sorted(rows) == sorted(MODELS[name].model_fields)


@pytest.mark.parametrize("name", MODELS)
def test_values_of_the_table_are_accepted_and_others_refused(server, embedding_server, name):
    if name == "EmbeddingsRequest":
        server, _ = embedding_server
    for row in ROUTE_TABLES[name]:
        for value in row.values:
            answer = server.post(PATHS[name], json={**BODIES[name], row.name: value})
            assert answer.status_code == 200, answer.text
        if row.values:
            answer = server.post(PATHS[name], json={**BODIES[name], row.name: "surely not"})
            assert answer.status_code == 400
            assert row.name in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", MODELS)
def test_the_schema_says_what_each_field_does(server, name):
    shapes = server.get("/openapi.json").json()["components"]["schemas"][name]["properties"]
    for row in ROUTE_TABLES[name]:
        shape = shapes[row.name]
        assert (shape["x-kiln"], shape["description"]) == (row.kind, row.says)
