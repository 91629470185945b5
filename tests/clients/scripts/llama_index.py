"""llama-index's OpenAILike and its agent: MODE URL KEY; prints what a program sees, as JSON."""

import asyncio
import json
import sys

import openai
from llama_index.core.agent.workflow import FunctionAgent, ToolCall
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

MODE, URL, KEY = sys.argv[1:]


def model(name):
    return OpenAILike(
        model=name,
        api_base=f"{URL}/v1",
        api_key=KEY or "unused",
        context_window=4096,
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=0,
        timeout=60,
    )


def get_weather(city: str) -> str:
    """Return the weather in a city."""
    return f"Rain in {city}"


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def chat():
    question = [ChatMessage(role="user", content="What is 17 + 25?")]
    streamed = "".join(chunk.delta or "" for chunk in model("demo").stream_chat(question))
    return {"whole": model("demo").chat(question).message.content, "streamed": streamed}


def tools(question):
    async def run(streaming):
        agent = FunctionAgent(
            tools=[get_weather, add], llm=model("agent"), streaming=streaming, timeout=120
        )
        handler, calls = agent.run(question), []
        async for event in handler.stream_events():
            if type(event) is ToolCall:
                calls.append([event.tool_name, event.tool_kwargs])
        answer = await handler
        return {"calls": calls, "answer": answer.response.content}

    return {"whole": asyncio.run(run(False)), "streamed": asyncio.run(run(True))}


def main():
    try:
        return chat() if MODE == "chat" else tools(sys.stdin.read())
    except openai.APIStatusError as error:
        return {"error": type(error).__name__, "says": str(error)}


print(json.dumps(main()))
