"""Calls in Python's syntax, as Llama 3.2 and 4 write them: ``[f(a=1), g(b="x")]``.

The list is the beginning of the reply, or stands between ``<|python_start|>`` and
``<|python_end|>``. Arguments are literals; they are parsed, never evaluated.
"""

from __future__ import annotations

import ast
import keyword
import re
from typing import Any

from kiln.engine.grammar.grammar import literal
from kiln.engine.text.replies.calls import Calls, Function, Offer, either
from kiln.engine.text.replies.format import ToolFormat, Tools
from kiln.engine.text.replies.lark import ANY, Lark
from kiln.engine.text.replies.message import MessageBuilder
from kiln.engine.text.replies.parameters import parameters_of
from kiln.engine.text.replies.source import Steps, TextSource
from kiln.engine.text.replies.typed_values import finite, parse_expression, to_json

_BEGIN, _END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[\w.-]*")
_PLAIN = re.compile(r"""[^"'\\()\[\]{}]*""")
_IN_STRING = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_PAIRS = {"(": ")", "[": "]", "{": "}"}
_WORDS = {"true": True, "false": False, "null": None}  # JSON's, which models mix in
_MAX_DEPTH = 64
_PLAIN_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")  # Python changes some other letters
_KEYWORDS = f"/{'|'.join(keyword.kwlist)}/"


class _NoCallError(ValueError):
    """The text is no call with literal keyword arguments."""


def _parse(source: TextSource, out: MessageBuilder, tools: Tools) -> Steps[None]:
    source.record()
    yield from source.read_space()
    if (yield from source.peek()) == "[":
        yield from _read_list(source, out)
    else:
        out.content(source.recorded())
    while (yield from source.find(_BEGIN, out.content)):
        yield from _read_list(source, out)
        yield from source.read_end(_END, out.content)


def _read_list(source: TextSource, out: MessageBuilder) -> Steps[None]:
    """Read a list of calls; each counts when it is complete. The source must be recording."""
    between = yield from source.read_mark("[")
    while between in ("[", ","):
        yield from source.read_space()
        try:
            name, arguments = yield from _read_call(source)
        except _NoCallError:
            break
        source.recorded()
        out.call(name)
        out.arguments(arguments)
        source.record()
        yield from source.read_space()
        between = yield from source.read_mark(",", "]")
    if between == "]":
        source.recorded()
    out.content(source.recorded())


def _read_call(source: TextSource) -> Steps[tuple[str, str]]:
    """Read a call: its name, and its arguments as JSON. Raises _NoCallError."""
    name, text = (yield from source.text_while(_NAME)), list[str]()
    if not name or (yield from source.peek()) != "(":
        raise _NoCallError
    closers: list[str] = []
    while True:
        yield from source.read_while(_PLAIN, text.append)
        char = yield from source.peek()
        if char in ("'", '"'):
            yield from _read_string(source, text)
            continue
        text.append(source.read(1))
        if char in _PAIRS and len(closers) < _MAX_DEPTH:
            closers.append(_PAIRS[char])
        elif not char or char != closers.pop():
            raise _NoCallError
        if not closers:
            return name, _arguments("".join(text))


def _read_string(source: TextSource, text: list[str]) -> Steps[None]:
    """Read a string with one or three quotes at each end. Raises _NoCallError."""
    quote = yield from source.peek()
    end = (yield from source.next_of(quote * 3)) or quote
    text.append(source.read(len(end)))
    while True:
        yield from source.read_while(_IN_STRING[quote], text.append)
        if (yield from source.next_of(end)):
            text.append(source.read(len(end)))
            return
        char = yield from source.peek()
        if not char:
            raise _NoCallError
        text.append(source.read(1))
        if char == "\\" and (yield from source.peek()):
            text.append(source.read(1))


def _arguments(text: str) -> str:
    """Return the arguments ``(a=1, …)`` as a JSON object. Raises _NoCallError."""
    try:
        call = parse_expression(f"f{text}")
        if not isinstance(call, ast.Call) or call.args:
            raise _NoCallError
        return to_json({_key(part): _value(part.value) for part in call.keywords})
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise _NoCallError from error


def _key(part: ast.keyword) -> str:
    if part.arg is None:  # **mapping
        raise _NoCallError
    return part.arg


def _value(node: ast.expr) -> Any:
    """Return the value of a literal. Raises ValueError for anything else."""
    match node:
        case ast.Constant(value=float() as value):
            return finite(value)
        case ast.Constant(value=str() | int() | None as value):
            return value
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -(finite(value) if isinstance(value, float) else value)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_string(key): _value(value) for key, value in zip(keys, values, strict=True)}
    raise _NoCallError


def _string(key: ast.expr | None) -> str:
    if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
        raise _NoCallError
    return key.value


def _write(lark: Lark, offer: Offer) -> Calls:
    """Write a list; in a free reply, one that begins like a list of calls is one."""
    calls = [(one.name, _write_arguments(lark, one)) for one in offer.functions]
    call = lark.rule(either(*(f"{literal(f'{name}(')} {rest}" for name, rest in calls)))
    further = f'(", " {call})* "]"' if offer.parallel else '"]"'
    first = lark.rule(either(*(f"{literal(f'[{name}(')} {rest}" for name, rest in calls)))
    whole = f"{first} {further}"
    marks = {_BEGIN: lark.mark(_BEGIN), _END: lark.mark(_END)}
    if marks[_BEGIN] != literal(_BEGIN):  # special tokens, which the model may have learned
        whole = either(whole, f"{marks[_BEGIN]} {whole} {marks[_END]}")
    banned = f"~({ANY} {literal(_BEGIN)} {ANY})"
    text = lark.terminal(rf"{ANY} & ~/\s*\[\s*[\w.-]+\((?s:.*)/ & {banned}")
    return Calls(whole, either(text, f"{whole} {lark.text(_BEGIN)}"))


def _write_arguments(lark: Lark, function: Function) -> str:
    """Return keyword arguments with the closing bracket, in the order of the schema."""
    parameters = parameters_of(function)
    if parameters is None:
        name = lark.terminal(f"/{_PLAIN_NAME.pattern}/ & ~{_KEYWORDS}")
        one = f'{name} "=" {lark.schema(True)}'
        return f'({one} (", " {one})*)? ")"'
    first, later = '")"', '")"'  # what follows no argument, and what follows one
    for parameter in reversed(parameters):
        name = parameter.name
        if not _PLAIN_NAME.fullmatch(name) or keyword.iskeyword(name):
            raise function.refused(f"has the parameter {name[:80]!r}")
        value = f"{literal(f'{name}=')} {lark.schema(parameter.alone(parameter.schema))}"
        begun, other = f"{value} {later}", f'", " {value}'
        if parameter.required:
            first, later = begun, f"{other} {later}"
        else:
            first, later = either(begun, first), f"({other})? {later}"
        first, later = lark.rule(first), lark.rule(later)
    return first


FORMAT = ToolFormat(
    names=("pythonic", "llama4_pythonic"),
    parse=_parse,
    write=_write,
    shown_by=(("[func_name1(", "[func1(", "<|python_start|>"),),
    marks=(_BEGIN, _END),
)
