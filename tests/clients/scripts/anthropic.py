"""anthropic for Python: MODE URL KEY; prints what a program sees, as JSON."""

import json
import sys

# This file has the package's name. It runs with ``python -I``, so that its own folder is not on
# the import path, and this imports the package.
import anthropic

MODE, URL, KEY = sys.argv[1:]
TOOLS = {
    "get_weather": lambda city: f"Rain in {city}",
    "add": lambda a, b: str(a + b),
}
PROPERTIES = {
    "get_weather": {"city": {"type": "string"}},
    "add": {"a": {"type": "integer"}, "b": {"type": "integer"}},
}


def schema(name):
    parameters = {"type": "object", "properties": PROPERTIES[name], "required": [*PROPERTIES[name]]}
    return {"name": name, "description": f"Calls {name}.", "input_schema": parameters}


def both(client):
    """Return two ways to ask, whole and streamed."""

    def streamed(**asked):
        with client.messages.stream(**asked) as stream:
            return stream.get_final_message()

    return {"whole": client.messages.create, "streamed": streamed}


def chat(client):
    asked = {"model": "demo", "messages": [{"role": "user", "content": "What is 17 + 25?"}]}
    said = {}
    for way, ask in both(client).items():
        message = ask(max_tokens=20, **asked)
        assert message.stop_reason == "end_turn"
        assert message.usage.output_tokens > 0
        (block,) = message.content
        said[way] = block.text
    counted = client.messages.count_tokens(**asked)
    assert counted.input_tokens == message.usage.input_tokens
    return {"models": [model.id for model in client.models.list()], **said}


def tools(client, question):
    """Run the tools that are called until there is an answer."""

    def run(ask):
        messages, calls = [{"role": "user", "content": question}], []
        for _ in range(5):
            answer = ask(
                model="agent",
                max_tokens=500,
                messages=messages,
                tools=[schema(name) for name in TOOLS],
            )
            messages.append({"role": "assistant", "content": answer.content})
            used = [block for block in answer.content if block.type == "tool_use"]
            if not used:
                assert answer.stop_reason == "end_turn"
                return {"calls": calls, "answer": answer.content[-1].text}
            assert answer.stop_reason == "tool_use"
            calls += [[block.name, block.input] for block in used]
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": block.id,
                    "content": TOOLS[block.name](**block.input),
                }
                for block in used
            ]
            messages.append({"role": "user", "content": results})
        raise AssertionError("no end of calls")

    return {way: run(ask) for way, ask in both(client).items()}


def thinking(client, question):
    """What was thought and said."""
    said = {}
    for way, ask in both(client).items():
        answer = ask(
            model="agent",
            max_tokens=2000,
            messages=[{"role": "user", "content": question}],
            thinking={"type": "enabled", "budget_tokens": 1024},
        )
        thought, text = answer.content
        said[way] = {"thinking": thought.thinking, "answer": text.text}
    return said


def main():
    client = anthropic.Anthropic(base_url=URL, api_key=KEY or "unused", max_retries=0, timeout=60)
    try:
        if MODE == "chat":
            return chat(client)
        return {"tools": tools, "thinking": thinking}[MODE](client, sys.stdin.read())
    except anthropic.APIStatusError as error:
        return {"error": type(error).__name__, "says": str(error)}


print(json.dumps(main()))
