"""A model whose answers are decided by rules, for tests that need it to call tools.

The answer depends on the prompt as a model's does, so a tool or a result that the server loses on
the way to the prompt changes it:

    the last question names calls, f({...})    one of them a turn, or all in one with "at once"
    no more calls are left                     "The tools said: " and every result, in order
    no calls were named                        "You said: " and the question
    the question begins with "Think"           some reasoning stands before the answer
"""

from __future__ import annotations

import json
import re
from pathlib import Path

# Hermes' form of tool calls, which Qwen's templates use too.
TEMPLATE = """\
{%- set first = messages[0] if messages[0]['role'] == 'system' else none %}
{%- if tools or first %}
    {{- '<|im_start|>system\\n' + (first['content'] if first else 'Help the user.') }}
    {%- if tools %}
        {{- '\\n\\nFunctions, one a line:\\n<tools>' }}
        {%- for tool in tools %}
            {{- '\\n' + (tool | tojson) }}
        {%- endfor %}
        {{- '\\n</tools>\\nTo call one, write:\\n<tool_call>\\n' }}
        {{- '{"name": <its name>, "arguments": <an object>}\\n</tool_call>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message['content'] }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message['role'] != 'system' or not loop.first %}
        {{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}
        {%- for call in message['tool_calls'] or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' }}
            {{- (call['function']['arguments'] | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
CONTEXT = 16384
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 256 + len(SPECIAL)
EOS = "<|im_end|>"
REASONING = "The user wants me to think."

_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|$)", re.DOTALL)
_TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_NAMED = re.compile(r"(\w+)\((\{.*?\})\)", re.DOTALL)
_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "vocab_size": VOCABULARY,
}


def write_folder(folder: Path) -> None:
    """Write the model's files: a token is a byte, so calls arrive in many small parts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*letters, *SPECIAL]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"eos_token": EOS, "pad_token": SPECIAL[0], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    config = {**_CONFIG, "eos_token_id": pieces.index(EOS)}
    (folder / "config.json").write_text(json.dumps(config))


def answer(prompt: str) -> str:
    """Return what the model says to a rendered chat; plain text is answered with itself."""
    turns = _TURN.findall(prompt)
    asked = [i for i, (role, text) in enumerate(turns) if role == "user" and not _is_result(text)]
    if not asked:
        return f"You said: {prompt[-200:]}"
    question = turns[asked[-1]][1]
    since = turns[asked[-1] + 1 :]
    made = sum(text.count("<tool_call>") for role, text in since if role == "assistant")
    results = [found for role, text in since if role != "assistant" for found in _results(text)]
    thought = f"<think>\n{REASONING}\n</think>\n\n" if question.startswith("Think") else ""
    return thought + _reply(question, _known(turns), made, results)


def _reply(question: str, known: set[str], made: int, results: list[str]) -> str:
    wanted = _NAMED.findall(question)
    if not wanted:
        return f"You said: {question}"
    if not known:
        return "I have no tools."
    left = wanted[made:]
    if not left:
        return f"The tools said: {'; '.join(results)}."
    now = left if "at once" in question else left[:1]
    missing = [name for name, _ in now if name not in known]
    if missing:
        return f"I have no tool {missing[0]}."
    before = "Let me see.\n" if made == 0 and len(now) == 1 else ""
    return before + "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in now
    )


def _known(turns: list[tuple[str, str]]) -> set[str]:
    """Return the names of the tools that the prompt offers."""
    lists = [found for role, text in turns if role == "system" for found in _TOOLS.findall(text)]
    return {_name(line) for lines in lists for line in lines.splitlines()} - {""}


def _name(line: str) -> str:
    """Return the name of the tool in a line; "" if it is none, for clients may write anything."""
    try:
        return str(json.loads(line)["function"]["name"])
    except (ValueError, KeyError, TypeError):
        return ""


def _is_result(text: str) -> bool:
    return text.startswith("<tool_response>")


def _results(text: str) -> list[str]:
    return _RESULT.findall(text) if _is_result(text) else []
