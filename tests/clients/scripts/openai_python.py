"""openai for Python: MODE URL KEY; prints what a program sees, as JSON."""

import json
import sys

import openai

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
    return {"name": name, "description": f"Calls {name}.", "parameters": parameters}


def chat(client):
    asked = {"model": "demo", "messages": [{"role": "user", "content": "What is 17 + 25?"}]}
    whole = client.chat.completions.create(**asked)
    stream = client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    with client.chat.completions.stream(**asked) as helper:
        final = helper.get_final_completion()
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert chunks[-1].usage == whole.usage
    assert final.choices[0].message.content == streamed
    return {
        "models": [model.id for model in client.models.list()],
        "whole": whole.choices[0].message.content,
        "streamed": streamed,
    }


def tools(client, question):
    """Run the tools that are called until there is an answer, whole and streamed."""

    def run(ask):
        messages, calls = [{"role": "user", "content": question}], []
        for _ in range(5):
            message, reason = ask(messages)
            messages.append(message)
            if not message.tool_calls:
                assert reason == "stop"
                return {"calls": calls, "answer": message.content}
            assert reason == "tool_calls"
            for call in message.tool_calls:
                arguments = json.loads(call.function.arguments)
                calls.append([call.function.name, arguments])
                result = TOOLS[call.function.name](**arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        raise AssertionError("no end of calls")

    common = {
        "model": "agent",
        "tools": [{"type": "function", "function": schema(name)} for name in TOOLS],
    }

    def whole(messages):
        choice = client.chat.completions.create(messages=messages, **common).choices[0]
        return choice.message, choice.finish_reason

    def streamed(messages):
        with client.chat.completions.stream(messages=messages, **common) as stream:
            choice = stream.get_final_completion().choices[0]
        return choice.message, choice.finish_reason

    return {"whole": run(whole), "streamed": run(streamed)}


def responses(client, question):
    """The same through /v1/responses."""

    def run(ask):
        items, calls = [{"role": "user", "content": question}], []
        for _ in range(5):
            answer = ask(items)
            assert answer.status == "completed"
            items += answer.output
            called = [item for item in answer.output if item.type == "function_call"]
            if not called:
                return {"calls": calls, "answer": answer.output_text}
            for call in called:
                arguments = json.loads(call.arguments)
                calls.append([call.name, arguments])
                result = TOOLS[call.name](**arguments)
                items.append(
                    {"type": "function_call_output", "call_id": call.call_id, "output": result}
                )
        raise AssertionError("no end of calls")

    common = {
        "model": "agent",
        "tools": [{"type": "function", **schema(name)} for name in TOOLS],
        "store": False,
    }

    def whole(items):
        return client.responses.create(input=items, **common)

    def streamed(items):
        with client.responses.stream(input=items, **common) as stream:
            return stream.get_final_response()

    return {"whole": run(whole), "streamed": run(streamed)}


def main():
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY or "unused", max_retries=0, timeout=60)
    try:
        if MODE == "chat":
            return chat(client)
        if MODE == "responses":
            return responses(client, sys.stdin.read())
        return tools(client, sys.stdin.read())
    except openai.APIStatusError as error:
        return {"error": type(error).__name__, "says": str(error)}


print(json.dumps(main()))
