"""Llama 3.1 to 3.3 and some of Llama 4: ``{"name": …, "parameters": {…}}``, several after ``;``.

No mark ends a call, and ``<|python_tag|>`` before it is optional. Models also write text before a
call, so that any object can be one, if it has no other keys than those of calls.
"""

from __future__ import annotations

from kiln.engine.grammar.grammar import literal
from kiln.engine.text.replies.calls import Calls, Offer, either
from kiln.engine.text.replies.format import ToolFormat, Tools
from kiln.engine.text.replies.json_calls import JsonCall
from kiln.engine.text.replies.lark import ANY, Lark
from kiln.engine.text.replies.message import MessageBuilder
from kiln.engine.text.replies.source import Steps, TextSource

_MARK, _PARAMETERS = "<|python_tag|>", "parameters"
# The beginning of an object that the reader takes for a call, with any order of keys.
_STRING = r'"([^"\\]|\\.)*"'
_LIKE_A_CALL = (
    rf'/\{{\s*("(id|type)"\s*:\s*({_STRING}|[-+.\w]*)\s*,\s*)*'
    rf'("(arguments|parameters)"|"[^"]*\\|"name"\s*:\s*{_STRING}\s*,\s*'
    r'"(name|id|type|arguments|parameters)")/'
)


def _parse(source: TextSource, out: MessageBuilder, tools: Tools) -> Steps[None]:
    while (yield from source.find(_MARK, out.content, "{")):
        if not (yield from JsonCall(source, out, bare=True).read()):
            continue
        source.record()
        yield from source.read_space()
        if (yield from source.read_mark(";")):
            yield from source.read_space()
            if (yield from source.next_of(_MARK, "{")):
                source.recorded()
        out.content(source.recorded())


def _write(lark: Lark, offer: Offer) -> Calls:
    begins = [f'{{"name": "{one.name}", "{_PARAMETERS}": ' for one in offer.functions]
    ends = [f'{lark.schema(one.json_schema)} "}}"' for one in offer.functions]
    heads = [f"{literal(begin)} {end}" for begin, end in zip(begins, ends, strict=True)]
    call = lark.rule(either(*heads))
    further = f'("; " {call})*' if offer.parallel else ""
    text = f"({ANY} & ~({ANY} {_LIKE_A_CALL} {ANY}))"
    found = [
        f"{lark.lazy(f'{text} {literal(begin)}')} {end}"
        for begin, end in zip(begins, ends, strict=True)
    ]
    marks = {lark.mark(_MARK)} - {literal(_MARK)}  # where it is a special token
    tail = lark.terminal(text)
    found += [f"{tail} {mark} {call}" for mark in marks]
    free = f"({either(*found)} {further}){'*' if offer.parallel else '?'} {tail}"
    return Calls(" ".join((*(f"{mark}?" for mark in marks), call, further)), free)


FORMAT = ToolFormat(
    names=("llama3_json", "llama4_json"),
    parse=_parse,
    write=_write,
    shown_by=(("<|start_header_id|>", "<|header_start|>"), ('"parameters": ',)),
    marks=(_MARK,),
)
