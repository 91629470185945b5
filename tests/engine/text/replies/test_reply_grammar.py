"""What the grammar of a reply allows, its reader reads as what the request demands.

Random walks over the masks are what a model with random weights would write.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from depth import at_depth
from grammar_walks import Walker
from jsonschema import Draft202012Validator
from random_schemas import object_schema, random_schema, tool_schema

import kiln.engine
from kiln.engine.errors import RequestError
from kiln.engine.grammar.grammar import Grammar, grammar_of
from kiln.engine.requests.structured_outputs import StructuredOutputsParams
from kiln.engine.text.replies.choice import ReplyFormats, tool_formats
from kiln.engine.text.replies.reasoning import REASONING_FORMATS
from kiln.engine.text.replies.reply_grammar import Demands
from kiln.engine.text.replies.tool_choice import ToolChoice
from kiln.engine.text.tokenizer import Tokenizer

CASES = at_depth(50, 500)
DEMO = Path(kiln.engine.__file__).parent / "demo"
THINK = REASONING_FORMATS[0]
NAMES = ["get_weather", "now", "f-1.x"]
FORMS = {form.names[0]: form for form in tool_formats()}
START = "<|start|>assistant"  # how prompts of harmony end
OPENERS = {  # of calls, behind some text where the format has it
    "deepseek_v3": "Well, <｜tool▁calls▁begin｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>",
    "glm45": "Well:\n<tool_call>",
    "hermes": "Well, <tool_call>",
    "llama3_json": 'Well, {"name": "get_weather", "par',
    "mistral": "Well [TOOL_CALLS]",
    "openai": "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary to",
    "pythonic": "[get_weather(",
    "qwen3_coder": "Well, <tool_call>\n",
}
CLOSED = "<think>\n\n</think>\n\n"
# What is chosen, whether several calls are allowed, the end of the prompt, and of what the reply
# begins with.
CHOICES = [
    (ToolChoice("required"), True, CLOSED, ""),
    (ToolChoice("required"), False, "<think>\n", "I think.</think>"),
    (ToolChoice("required", frozenset(["get_weather"]), forced=True), True, CLOSED, ""),
    (ToolChoice("required", frozenset(["get_weather"])), True, "", "<think>So.</think>\n\n"),
    (ToolChoice(), True, CLOSED, "opener"),
    (ToolChoice(), False, CLOSED, "opener"),
    (ToolChoice(), False, "<think>", "So.</think>"),
    (ToolChoice(), True, CLOSED, ""),
]


@pytest.fixture(scope="module")
def walkers():
    """Tokenizers without special tokens for marks, and with them."""
    plain, marked = Tokenizer.load(DEMO), Tokenizer.load(DEMO)
    marks = {mark for form in tool_formats() for mark in (*form.marks, *form.stops)}
    marked.backend.add_special_tokens(sorted(marks | {THINK.begin, THINK.end}))
    return [Walker(plain), Walker(Tokenizer(marked.backend, eos_ids=plain.eos_token_ids))]


def tool(name, parameters, strict=None):
    function = {"name": name, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": function}


def check_calls(reply, tools):
    schemas = {one["function"]["name"]: one["function"]["parameters"] for one in tools}
    for call in reply.tool_calls:
        Draft202012Validator(schemas[call.name]).validate(json.loads(call.arguments))


def grammar_or_none(formats, demands, prompt, walker):
    """The grammar; None for a schema that the format has no syntax for."""
    try:
        return formats.grammar(demands, prompt, walker.tokenizer.special_id)
    except RequestError as error:
        if "format of calls cannot write" not in str(error):
            raise
        return None


@pytest.mark.parametrize("name", FORMS)
def test_calls_are_valid_whatever_a_model_draws(name, walkers):
    form, counts = FORMS[name], {"refused": 0, "ended": 0, "called": 0}
    for case in range(CASES):
        rng = random.Random(case)
        choice, parallel, prompt, begun = CHOICES[case % len(CHOICES)]
        prompt, begun = (START, "") if form.reasons and begun != "opener" else (prompt, begun)
        begun = OPENERS[name] if begun == "opener" else begun
        walker = walkers[case // len(CHOICES) % 2]
        tools = [tool(one, tool_schema(rng), strict=True) for one in NAMES[: rng.randrange(1, 4)]]
        formats = ReplyFormats(form, None if form.reasons else THINK)
        grammar = grammar_or_none(formats, Demands(tools, choice, parallel), prompt, walker)
        if grammar is None:
            counts["refused"] += 1
            continue
        text = walker.walk(grammar, rng, begun)
        if text is None:
            continue
        reply = formats.reader(tools, prompt=prompt).push(text, last=True)
        counts["ended"] += 1
        counts["called"] += bool(reply.tool_calls)
        check_calls(reply, tools)
        if choice.mode == "required":
            assert reply.tool_calls, (case, text)
            assert not reply.content.strip(), (case, text)
            assert len(reply.tool_calls) == 1 or (parallel and not choice.forced), (case, text)
    assert counts["refused"] <= CASES * 0.1, counts
    assert counts["ended"] >= CASES * 0.75, counts
    assert counts["called"] >= CASES * 0.4, counts


@pytest.mark.parametrize("name", [None, *FORMS])
def test_content_has_its_form_if_there_is_no_call(name, walkers):
    form = FORMS.get(name)
    formats = ReplyFormats(form, None if form and form.reasons else THINK)
    kinds = {"called": 0, "told": 0}
    for case in range(at_depth(12, 200)):
        rng = random.Random(case)
        schema = {**object_schema(rng, 0), "$defs": {"Shared": {"type": "boolean"}}}
        tools = [tool("now", {"type": "object", "properties": {}})] if form and case % 2 else []
        content = grammar_of(StructuredOutputsParams(json=schema))
        walker, prompt = walkers[case // 2 % 2], START if form and form.reasons else CLOSED
        grammar = formats.grammar(
            Demands(tools, content=content), prompt, walker.tokenizer.special_id
        )
        text = walker.walk(grammar, rng)
        if text is None:
            continue
        reply = formats.reader(tools, prompt=prompt).push(text, last=True)
        kinds["called" if reply.tool_calls else "told"] += 1
        if not reply.tool_calls:
            Draft202012Validator(schema).validate(json.loads(reply.content))
        else:
            assert not reply.content.strip(), (case, text)
    assert kinds["told"] >= at_depth(3, 60), kinds
    assert kinds["called"] >= (at_depth(1, 10) if form else 0), kinds


def _regex(rng):
    pattern = rng.choice(
        [r"[a-c]{2,5}", r"(yes|no)!?", r"\d{3}-\d{4}", r"^[^/]/x?$", r"\w{1,4}\.py"]
    )
    return {"regex": pattern}, lambda text: re.fullmatch(pattern, text)


def _choice(rng):
    texts = [
        rng.choice(["a", "ab", "ü\n", '"', "\\", "</x>"]) * rng.randrange(1, 4) for _ in range(4)
    ]
    return {"choice": texts}, texts.__contains__


def _grammar(rng):
    numbers = rng.randrange(1, 4)
    forms = [
        f'root ::= "<" item+ ">"\nitem ::= [0-9]{{{numbers}}} ";"',
        f'start: "<" item+ ">"\nitem: /[0-9]{{{numbers}}}/ ";"',
    ]
    wanted = re.compile(f"<([0-9]{{{numbers}}};)+>")
    return {"grammar": rng.choice(forms)}, wanted.fullmatch


def _json(rng):
    schema = {**random_schema(rng, 2), "$defs": {"Shared": random_schema(rng, 0)}}
    if rng.random() < 0.5:
        schema = tool_schema(rng)
    while schema.get("$ref") or '"$ref": "#/$defs/Shared"' in json.dumps(schema["$defs"]):
        schema = tool_schema(rng)
    options = rng.choice([{}, {"disable_any_whitespace": True}, {"whitespace_pattern": " "}])

    def is_valid(text):
        Draft202012Validator(schema).validate(json.loads(text))
        return True

    return {"json": schema, **options}, is_valid


@pytest.mark.parametrize("kind", [_json, _regex, _choice, _grammar], ids=lambda kind: kind.__name__)
def test_every_kind_of_structured_output_holds(kind, walkers):
    ended = 0
    for case in range(CASES):
        rng = random.Random(case)
        params, is_valid = kind(rng)
        text = walkers[case % 2].walk(grammar_of(StructuredOutputsParams(**params)), rng)
        if text is not None:
            ended += 1
            assert is_valid(text), (case, params, text)
    assert ended >= CASES * 0.8


WEATHER = tool("get_weather", {"type": "object"}, strict=False)
HERMES = ReplyFormats(FORMS["hermes"], THINK)


def special(text):
    return None


@pytest.mark.parametrize("choice", [ToolChoice(), ToolChoice("none")])
def test_without_demands_a_reply_may_be_anything(choice):
    assert HERMES.grammar(Demands([WEATHER], choice), "", special) is None
    assert ReplyFormats().grammar(Demands([WEATHER], choice), "", special) is None
    strict = tool("f", {"type": "object"}, strict=True)
    assert HERMES.grammar(Demands([strict], ToolChoice("none")), "", special) is None
    assert HERMES.grammar(Demands([strict]), "", special) is not None


def test_content_alone_is_its_own_grammar():
    content = Grammar.of_schema({"type": "integer"})
    assert ReplyFormats().grammar(Demands(content=content), "", special) is content
    assert HERMES.grammar(Demands(content=content), CLOSED, special) is content


def test_functions_that_are_not_strict_take_any_object(walkers):
    tools = [tool("f", {"type": "object"}, strict=True), tool("g", {"properties": {"a": False}})]
    grammar = HERMES.grammar(Demands(tools), CLOSED, special)
    begun = '<tool_call>\n{"name": "g", "arguments": {"a": [1]}}\n</tool_call> Done.'
    assert walkers[0].walk(grammar, random.Random(0), begun).startswith(begun)
    with pytest.raises(AssertionError):
        walkers[0].walk(grammar, random.Random(0), '<tool_call>\n{"name": "h"')


def test_marks_may_straddle_tokens():
    """The end of the reasoning and the opener begin inside of tokens, and end inside of others."""
    loaded = Tokenizer.load(DEMO)
    pieces = ["So.</th", "ink>\n\nWell, <tool", '_call>\n{"name": "f", "arg', 'uments": {"a": t']
    wrong = '_call>\n{"name": "h", "arg'
    loaded.backend.add_tokens([*pieces, wrong])
    walker = Walker(Tokenizer(loaded.backend, eos_ids=loaded.eos_token_ids))
    assert len(loaded.backend.encode("".join(pieces), add_special_tokens=False).ids) == len(pieces)
    schema = {"properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    tools = [tool("f", {**schema, "additionalProperties": False}, strict=True)]
    grammar = HERMES.grammar(Demands(tools), "<think>", special)
    text = walker.walk(grammar, random.Random(0), "".join(pieces))
    reply = HERMES.reader(tools, prompt="<think>").push(text, last=True)
    assert (reply.reasoning, reply.content[:5]) == ("So.", "Well,")
    assert json.loads(reply.tool_calls[0].arguments) == {"a": True}
    with pytest.raises(AssertionError, match="satisfy the grammar"):
        walker.walk(grammar, random.Random(0), "".join((*pieces[:2], wrong)))


def test_some_tools_are_allowed_though_all_are_shown(walkers):
    tools = [tool("f", {"type": "object"}), tool("g", {"type": "object"})]
    grammar = HERMES.grammar(Demands(tools, ToolChoice("auto", frozenset("g"))), CLOSED, special)
    walkers[0].walk(grammar, random.Random(0), 'x <tool_call>\n{"name": "g", "arguments": {}}')
    with pytest.raises(AssertionError):
        walkers[0].walk(grammar, random.Random(0), '<tool_call>\n{"name": "f"')


SHORT = {"type": "string", "maxLength": 2}


@pytest.mark.parametrize(
    ("name", "parameters", "says"),
    [
        ("hermes", {"type": "string"}, "must be the schema of an object, has type 'string'"),
        ("pythonic", {"properties": {"a-b": {}}}, "has the parameter 'a-b'"),
        ("pythonic", {"properties": {"class": {}}}, "has the parameter 'class'"),
        ("pythonic", {"anyOf": [{"properties": {"a": {}}}]}, "has 'anyOf' beside its properties"),
        ("qwen3_coder", {"properties": {"a>b": {}}}, "has the parameter 'a>b'"),
        ("glm45", {"properties": {"a b": {}}}, "has the parameter 'a b'"),
        ("glm45", {"properties": {"a": {"type": "string", "not": {}}}}, "has 'not' in 'a'"),
        ("glm45", {"properties": {"a": {"type": "string", "pattern": "^a|b$"}}}, "an anchor"),
        ("glm45", {"properties": {"a": {"enum": ["1", 2]}}}, "has the enum ['1'] in 'a'"),
        ("qwen3_coder", {"required": ["a"], "additionalProperties": {}}, "requires 'a'"),
        ("pythonic", {"properties": {"ﬁ": {}}}, "has the parameter 'ﬁ'"),
        ("glm45", {"properties": {"a": {"$ref": "http://x/y"}}}, "has '$ref' in 'a'"),
        ("glm45", {"$ref": "#/$defs/none"}, "has '$ref' beside its properties"),
        (
            "glm45",
            {"properties": {"a": {"$ref": "#/$defs/b", "maxLength": 3}}, "$defs": {"b": SHORT}},
            "has '$ref' in 'a'",
        ),
    ],
)
def test_a_schema_without_a_syntax_is_refused_by_its_name(name, parameters, says):
    tools = [WEATHER, tool("f", parameters)]
    with pytest.raises(RequestError, match=re.escape(says)) as caught:
        ReplyFormats(FORMS[name]).grammar(Demands(tools, ToolChoice("required")), "", special)
    assert caught.value.param == "tools[1].function.parameters"


@pytest.mark.parametrize("name", FORMS)
def test_a_schema_that_refers_to_itself_is_written_once(name, walkers):
    union = [{"$ref": "#/properties/a"}] * 50 + [{"enum": ["x"]}]
    tools = [tool("f", {"properties": {"a": {"anyOf": union}}, "required": ["a"]})]
    demands, prompt = Demands(tools, ToolChoice("required")), START if name == "openai" else CLOSED
    formats = ReplyFormats(FORMS[name], None if name == "openai" else THINK)
    grammar = grammar_or_none(formats, demands, prompt, walkers[0])
    assert len(grammar.lark["start"]) < 5000


def test_calls_cannot_be_demanded_of_a_model_without_a_format():
    with pytest.raises(RequestError, match="see --tool-call-parser") as caught:
        ReplyFormats().grammar(Demands([WEATHER], ToolChoice("required")), "", special)
    assert caught.value.param == "tool_choice"
