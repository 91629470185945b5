"""Messages reach a chat template in the form that it expects, whatever the client sent."""

from __future__ import annotations

import json

import pytest

from kiln.engine.errors import RequestError
from kiln.engine.text.chat_template import ChatTemplate

CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
GUARD = (  # loops over the parts, as Llama-Guard's does
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text | trim }};{% endif %}{% endfor %}{% endfor %}"
)
MIXED = (  # the system message is printed, other content may have either form
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content | trim }}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{{ part.text }};{% endfor %}{% endif %}{% endfor %}"
)
MACRO = (  # no loop over the parts in sight of the loop over messages
    "{% macro show(parts) %}{% for part in parts %}{{ part['text'] }};{% endfor %}{% endmacro %}"
    "{% for m in messages %}<{{ m.role }}>{{ show(m.content) }}{% endfor %}"
)
STRICT = (  # no developer, a single system message, at the start
    "{% for m in messages %}{% if m.role == 'system' %}{% if not loop.first %}"
    "{{ raise_exception('a system message must come first') }}{% endif %}"
    "{% elif m.role not in ('user', 'assistant') %}{{ raise_exception('unknown role') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
SILENT = STRICT.replace("{{ raise_exception('unknown role') }}", "{% continue %}")
TEXT, PARTS = "two\nlines", [{"type": "text", "text": "two"}, {"type": "text", "text": "lines"}]
USER = {"role": "user", "content": "hi"}


def render(source, messages, **options):
    template = ChatTemplate(source, {"bos_token": "<s>"})
    return template.render(messages, add_generation_prompt=False, **options)


def say(role, content, **fields):
    return {"role": role, "content": content, **fields}


@pytest.mark.parametrize(
    ("source", "of_text", "of_parts"),
    [
        (CHATML, TEXT, TEXT),
        ("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}", TEXT, TEXT),
        ("{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}", TEXT, TEXT),
        (GUARD, TEXT + ";", "two;lines;"),
        (MACRO, TEXT + ";", "two;lines;"),
        (MIXED, TEXT, "two;lines;"),
    ],
)
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_content_has_the_form_that_the_template_reads(source, of_text, of_parts, role):
    before = [USER] if role == "assistant" else []
    start = render(source, before) if before else ""
    for content, expected in ((TEXT, of_text), (PARTS, of_parts), (["two", "lines"], of_parts)):
        assert render(source, [*before, say(role, content)]) == f"{start}<{role}>{expected}"


def test_the_form_may_depend_on_the_role():
    assert render(MIXED, [say("system", PARTS), USER]) == f"<system>{TEXT}<user>hi"


@pytest.mark.parametrize(
    ("form", "expected"), [("string", TEXT), ("openai", "two;lines;"), ("auto", TEXT)]
)
def test_the_form_of_content_may_be_set(form, expected):
    prompt = render(MIXED, [say("user", TEXT if form == "auto" else PARTS)], content_format=form)
    assert prompt == f"<user>{expected}"
    with pytest.raises(RequestError, match="must be auto, string, openai"):
        render(MIXED, [USER], content_format="json")


def test_the_callers_messages_stay_as_they_are():
    messages = [say("developer", PARTS), say("user", PARTS, cache_control={}, name=None)]
    before = json.dumps(messages)
    render(GUARD, messages)
    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (CHATML, "<developer>a<user>hi<assistant>yes<developer>b<user>hi"),
        (STRICT, "<system>a\n\nb<user>hi<assistant>yes<user>hi"),
        (SILENT, "<system>a\n\nb<user>hi<assistant>yes<user>hi"),
        (
            STRICT.replace("not loop.first", "false"),
            "<system>a<user>hi<assistant>yes<system>b<user>hi",
        ),
    ],
)
def test_a_developer_is_the_system_where_the_template_knows_no_developer(source, expected):
    later = [USER, say("assistant", "yes"), say("developer", [{"type": "text", "text": "b"}]), USER]
    assert render(source, [say("developer", "a"), *later]) == expected
    assert render(source, [say("system", "a"), *later]).endswith(expected.partition(">")[2])


def test_system_messages_at_the_start_become_one_with_the_developers():
    both = [say("system", PARTS), say("developer", "b"), USER]
    assert render(STRICT, both) == f"<system>{TEXT}\n\nb<user>hi"


@pytest.mark.parametrize("role", ["tool", "developer"])
def test_a_role_that_no_template_shows_is_refused(role):
    nobody = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(RequestError, match=f"{role}.*shows no such messages") as caught:
        render(nobody, [USER, say(role, "x", tool_call_id="1")])
    assert caught.value.param == "messages[1].role"


CALLS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}{% endfor %}"
)
NEEDS_NONE = CALLS.replace(
    "{{ m.content }}", "{% if m.content is not none %}{{ m.content }}{% endif %}"
)
ONLY_NONE = (  # DeepSeek's: calls are shown only if the content is none, and arguments are text
    "{% for m in messages %}<{{ m.role }}>{% if m.content is none %}{% for c in m.tool_calls %}"
    "[{{ c.function.name + ' ' + c.function.arguments }}]{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def call(arguments, **fields):
    function = {"name": "f", "arguments": arguments}
    return {"id": "c1", "type": "function", "function": function, **fields}


@pytest.mark.parametrize("source", [CALLS, NEEDS_NONE, ONLY_NONE])
@pytest.mark.parametrize("content", [{}, {"content": None}])
@pytest.mark.parametrize("arguments", ['{"a": "é"}', {"a": "é"}])
def test_calls_without_content_are_shown_with_their_arguments_once(source, content, arguments):
    called = {"role": "assistant", **content, "tool_calls": [call(arguments, index=0)]}
    answer = {"role": "tool", "content": PARTS, "tool_call_id": "c1"}
    assert render(source, [USER, called, answer]) == (
        f'<user>hi<assistant>[f {{"a": "é"}}]<tool>{TEXT}'
    )


@pytest.mark.parametrize("arguments", ["", None, "{}", {}])
def test_no_arguments_are_an_empty_object(arguments):
    called = {"role": "assistant", "content": "", "tool_calls": [call(arguments)]}
    assert render(CALLS, [USER, called]) == "<user>hi<assistant>[f {}]"


@pytest.mark.parametrize(
    ("message", "param", "part"),
    [
        (say("tool", "x"), "messages[1].tool_call_id", "is required of a tool's message"),
        (say("assistant", None, tool_calls=[call("{")]), "arguments", "JSON object, got '{'"),
        (say("assistant", None, tool_calls=[call("[1]")]), "arguments", "JSON object"),
        (say("assistant", None, tool_calls=[call("0")]), "arguments", "JSON object"),
        (say("assistant", None, tool_calls=[call("[" * 9999)]), "arguments", "JSON object"),
        (say("assistant", None, tool_calls=[5]), "messages[1].tool_calls[0].function", "object"),
        (say("user", None), "messages[1].content", "string or a list of parts, got None"),
        (say("user", 5), "messages[1].content", "string or a list of parts, got 5"),
        (say("user", [{"type": "image_url"}]), "messages[1].content[0].type", "only text"),
        (say("user", [{"type": "text"}]), "messages[1].content[0].text", "must be a string"),
        (say("user", [5]), "messages[1].content[0]", "must be an object"),
        ({"content": "x"}, "messages[1].role", "must be a string, got None"),
        (5, "messages[1]", "must be objects"),
    ],
)
def test_a_malformed_message_is_refused_by_its_place(message, param, part):
    with pytest.raises(RequestError, match=r"messages\[") as caught:
        render(CALLS, [USER, message])
    assert part in str(caught.value)
    assert param in caught.value.param
    assert caught.value.param in str(caught.value)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_in_the_history_reaches_every_template(name):
    source = "{{ messages[1].reasoning_content }} {{ messages[1].thinking }}"
    messages = [USER, say("assistant", "4", **{name: "sum"})]
    assert render(source, messages) == "sum sum"


def test_fields_without_meaning_are_dropped_and_names_are_kept():
    source = "{{ messages | tojson }}"
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    sent = say("user", [part], name="ann", cache_control={}, refusal=None, annotations=[])
    function = {"name": "f", "arguments": {}}
    call = {"function": {**function, "parsed_arguments": {"a": 1}}, "index": 0}
    called = say("assistant", "4", parsed={"a": 1}, tool_calls=[call])
    kept = say("assistant", "4", tool_calls=[{"function": function}])
    assert json.loads(render(source, [sent, called])) == [say("user", "hi", name="ann"), kept]


@pytest.mark.parametrize("name", ["messages", "tools", "raise_exception", "range", "bos_token"])
def test_variables_of_kiln_cannot_be_replaced(name):
    with pytest.raises(RequestError, match="is set by Kiln") as caught:
        render(CHATML, [USER], variables={name: "x"})
    assert caught.value.param == f"chat_template_kwargs.{name}"
    assert (
        render("{{ flag }}{{ documents }}", [USER], variables={"flag": 1, "documents": 2}) == "12"
    )


def test_tools_that_the_template_does_not_show_are_refused():
    with pytest.raises(RequestError, match="does not show them") as caught:
        render(CHATML, [USER], tools=[{}])
    assert caught.value.param == "tools"


CONTINUED = [say("user", "2+2?"), say("assistant", "It is ")]


@pytest.mark.parametrize(
    "source",
    [
        CHATML + "</s>",
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}",
        GUARD,
        MIXED + "!",
    ],
)
@pytest.mark.parametrize("content", ["It is ", "It is", [{"type": "text", "text": "It is "}]])
def test_a_continued_chat_ends_with_its_last_message_as_in_transformers(source, content):
    from transformers.utils.chat_template_utils import render_jinja_template

    in_parts = source == GUARD
    sent = content if in_parts or isinstance(content, str) else "It is "
    if in_parts and isinstance(content, str):
        sent = [{"type": "text", "text": content}]
    first = [{"type": "text", "text": "2+2?"}] if in_parts else "2+2?"
    theirs = [say("user", first), say("assistant", sent)]
    ((expected,), _) = render_jinja_template(
        [theirs], chat_template=source, continue_final_message=True
    )
    template = ChatTemplate(source, {})
    messages = [say("user", "2+2?"), say("assistant", content)]
    assert template.render(messages, continue_final_message=True) == expected


@pytest.mark.parametrize(
    ("messages", "options", "part"),
    [
        ([USER, {"role": "assistant"}], {}, "is empty"),
        ([USER, say("assistant", " ")], {}, "is empty"),
        (CONTINUED, {"add_generation_prompt": True}, "send one of them"),
        ([USER, say("assistant", "secret")], {}, "does not show the last message"),
    ],
)
def test_what_cannot_be_continued_is_refused(messages, options, part):
    source = "{% for m in messages if 'secret' not in m.content %}{{ m.content }}{% endfor %}"
    with pytest.raises(RequestError, match=part):
        ChatTemplate(source, {}).render(messages, continue_final_message=True, **options)
