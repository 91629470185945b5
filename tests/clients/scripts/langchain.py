"""langchain-openai and an agent of langchain: MODE URL KEY; prints what a program sees, as JSON."""

import json
import sys

import openai
from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI

MODE, URL, KEY = sys.argv[1:]


def model(name, **more):
    return ChatOpenAI(
        model=name,
        base_url=f"{URL}/v1",
        api_key=KEY or "unused",
        max_retries=0,
        timeout=60,
        **more,
    )


def get_weather(city: str) -> str:
    """Return the weather in a city."""
    return f"Rain in {city}"


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def chat():
    question = "What is 17 + 25?"
    streamed = "".join(chunk.content for chunk in model("demo").stream(question))
    return {"whole": model("demo").invoke(question).content, "streamed": streamed}


def tools(question):
    def run(streaming, **more):
        llm = model("agent", streaming=streaming, **more)
        agent = create_agent(llm, tools=[get_weather, add])
        state = agent.invoke({"messages": [{"role": "user", "content": question}]})
        said = [message for message in state["messages"] if isinstance(message, AIMessage)]
        calls = [[call["name"], call["args"]] for one in said for call in one.tool_calls]
        return {"calls": calls, "answer": said[-1].text}

    more = {"use_responses_api": True} if MODE == "responses" else {}
    return {"whole": run(False, **more), "streamed": run(True, **more)}


def main():
    try:
        return chat() if MODE == "chat" else tools(sys.stdin.read())
    except openai.APIStatusError as error:
        return {"error": type(error).__name__, "says": str(error)}


print(json.dumps(main()))
