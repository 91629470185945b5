"""litellm: MODE URL KEY; prints what a program sees, as JSON."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the network otherwise

import litellm

MODE, URL, KEY = sys.argv[1:]
TOOLS = {
    "get_weather": lambda city: f"Rain in {city}",
    "add": lambda a, b: str(a + b),
}
PROPERTIES = {
    "get_weather": {"city": {"type": "string"}},
    "add": {"a": {"type": "integer"}, "b": {"type": "integer"}},
}


def ask(model, stream, **asked):
    """Return the first choice of an answer; a stream's chunks are joined by litellm."""
    answer = litellm.completion(
        model=f"openai/{model}",
        api_base=f"{URL}/v1",
        api_key=KEY or "unused",
        timeout=60,
        num_retries=0,
        stream=stream,
        **asked,
    )
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=asked["messages"])
    return answer.choices[0]


def chat():
    messages = [{"role": "user", "content": "What is 17 + 25?"}]
    return {
        way: ask("demo", way == "streamed", messages=messages).message.content
        for way in ("whole", "streamed")
    }


def tools(question):
    def function(name):
        required = [*PROPERTIES[name]]
        parameters = {"type": "object", "properties": PROPERTIES[name], "required": required}
        description = f"Calls {name}."
        return {"name": name, "description": description, "parameters": parameters}

    def run(stream):
        messages, calls = [{"role": "user", "content": question}], []
        known = [{"type": "function", "function": function(name)} for name in TOOLS]
        for _ in range(5):
            choice = ask("agent", stream, messages=messages, tools=known)
            messages.append(choice.message)
            if not choice.message.tool_calls:
                assert choice.finish_reason == "stop"
                return {"calls": calls, "answer": choice.message.content}
            assert choice.finish_reason == "tool_calls"
            for call in choice.message.tool_calls:
                arguments = json.loads(call.function.arguments)
                calls.append([call.function.name, arguments])
                result = TOOLS[call.function.name](**arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        raise AssertionError("no end of calls")

    return {"whole": run(False), "streamed": run(True)}


def main():
    try:
        if MODE == "chat":
            return chat()
        if MODE == "overflow":
            ask("demo", False, messages=[{"role": "user", "content": "word " * 20000}])
            return {"error": None}
        return tools(sys.stdin.read())
    except litellm.exceptions.APIError:
        raise
    except Exception as error:
        return {"error": type(error).__name__, "says": str(error)}


print(json.dumps(main()))
