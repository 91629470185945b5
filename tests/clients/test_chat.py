"""A question and its answer through real clients, whole and streamed."""

import pytest
from client_environments import NODE, PYTHON

CLIENTS = [name for name in (*PYTHON, *NODE) if name not in ("schemathesis", "sglang_router")]
FOR_FORMS = {"instructor", "pydantic_ai", "ai_sdk"}  # whose scripts ask for forms of outputs alone
LISTS_MODELS = {"openai2", "openai3", "openai_node", "anthropic"}
pytestmark = [pytest.mark.deep, pytest.mark.timeout(3000)]  # the first installs its client


@pytest.fixture(autouse=True)
def _only_those_that_chat(request):
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if params.get("client") in FOR_FORMS:
        pytest.skip("test_structured_outputs.py tries this client")


def _expected(client):
    said = {"whole": "42", "streamed": "42"}
    return {"models": ["demo"], **said} if client in LISTS_MODELS else said


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_without_an_api_key(run_client, open_url, client):
    assert run_client(client, "chat", open_url) == _expected(client)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_with_the_api_key(run_client, locked_url, api_key, client):
    assert run_client(client, "chat", locked_url, api_key) == _expected(client)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_with_a_wrong_key_raises_its_own_error(run_client, locked_url, client):
    said = run_client(client, "chat", locked_url, "wrong")
    assert said["error"].endswith("AuthenticationError")  # langchain puts a word before it
    assert "the API key is missing or wrong" in said["says"]


def test_a_conversation_that_is_too_long_is_recognised_as_such(run_client, open_url):
    said = run_client("litellm", "overflow", open_url)
    assert said["error"] == "ContextWindowExceededError", said
