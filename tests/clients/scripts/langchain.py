"""langchain-openai and an agent of langchain: MODE URL KEY; prints what a program sees, as JSON."""

import json
import sys
from typing import Literal

import openai
from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict

MODE, URL, KEY = sys.argv[1:]
CLOSING_BRACE = 95  # the token of the demo model


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


class Weather(BaseModel):
    """The weather in a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Oslo", "Rome"]
    warm: bool
    season: Literal["summer", "winter"] | None


def structured():
    """Return what each of the three ways to a structured answer gives."""
    llm, question = model("demo", max_tokens=600, temperature=0), "How is the weather in Oslo?"
    answers = {
        method: llm.with_structured_output(Weather, method=method).invoke(question).model_dump()
        for method in ("json_schema", "function_calling")
    }
    strict = llm.with_structured_output(Weather, method="function_calling", strict=True)
    # A tiny model would not come to an end in an object of any form.
    closing = model("demo", max_tokens=600, temperature=0, logit_bias={CLOSING_BRACE: 100})
    free = closing.with_structured_output({"type": "object", "title": "any"}, method="json_mode")
    return {
        **answers,
        "strict": strict.invoke(question).model_dump(),
        "json_mode": free.invoke(f"Answer in JSON. {question}"),
    }


def main():
    try:
        if MODE == "structured":
            return structured()
        return chat() if MODE == "chat" else tools(sys.stdin.read())
    except openai.APIStatusError as error:
        return {"error": type(error).__name__, "says": str(error)}


print(json.dumps(main()))
