"""Agents call two tools through real clients, one after the other and both at once."""

import agent_model
import pytest

CALLS = [["get_weather", {"city": "Oslo"}], ["add", {"a": 17, "b": 25}]]
NAMED = 'get_weather({"city": "Oslo"}) and add({"a": 17, "b": 25})'
QUESTIONS = {"in turn": f"Call {NAMED}.", "at once": f"Call at once {NAMED}."}
ENDED = {"calls": CALLS, "answer": "The tools said: Rain in Oslo; 42."}
CHAT = ("openai2", "openai3", "openai_node", "litellm", "langchain", "llama_index", "anthropic")
RESPONSES = ("openai2", "openai3", "openai_node", "langchain")
pytestmark = [pytest.mark.deep, pytest.mark.timeout(3000)]  # the first installs its client


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("client", CHAT)
def test_a_client_calls_tools_until_it_has_an_answer(run_client, agent_url, client, question):
    said = run_client(client, "tools", agent_url, text=QUESTIONS[question])
    assert said == {"whole": ENDED, "streamed": ENDED}


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("client", RESPONSES)
def test_the_same_through_the_responses_route(run_client, agent_url, client, question):
    said = run_client(client, "responses", agent_url, text=QUESTIONS[question])
    assert said == {"whole": ENDED, "streamed": ENDED}


def test_thoughts_are_blocks_of_their_own_for_anthropic(run_client, agent_url):
    said = run_client("anthropic", "thinking", agent_url, text="Think about it.")
    once = {"thinking": agent_model.REASONING, "answer": "You said: Think about it."}
    assert said == {"whole": once, "streamed": once}
