"""What DeepSeek's formats of tool calls have in common: lists of calls between special tokens."""

from __future__ import annotations

from collections.abc import Callable

from kiln.engine.grammar.grammar import literal
from kiln.engine.text.replies.calls import Calls, Function, Offer, either, marked, repeated
from kiln.engine.text.replies.json_calls import read_arguments
from kiln.engine.text.replies.lark import Lark
from kiln.engine.text.replies.message import MessageBuilder
from kiln.engine.text.replies.source import Steps, TextSource

LIST, LIST_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
NAME = "{name}"
MARKS = (LIST, LIST_END, CALL, CALL_END, SEPARATOR)


def read_calls(
    source: TextSource,
    out: MessageBuilder,
    read_name: Callable[[TextSource], Steps[str]],
    closing: str = CALL_END,
) -> Steps[None]:
    """Read a reply. ``read_name`` reads what is between the mark of a call and its arguments.

    ``closing`` is the text between the arguments and the mark of a call's end.
    """
    while (yield from source.find(LIST, out.content, CALL)):
        while (yield from source.read_mark(CALL)):
            if not (yield from _read_call(source, out, read_name, closing)):
                break
            source.record()
            yield from source.read_space()
            if (yield from source.read_mark(LIST_END)):
                source.recorded()
        out.content(source.recorded())


def _read_call(
    source: TextSource,
    out: MessageBuilder,
    read_name: Callable[[TextSource], Steps[str]],
    closing: str,
) -> Steps[bool]:
    """Read a call after its mark. False if there is none, or if its arguments are broken."""
    name = (yield from read_name(source)).strip()
    yield from source.read_space()
    empty = bool((yield from source.next_of(closing, CALL_END)))
    if not name or not (empty or (yield from source.peek()) == "{"):
        return False
    source.recorded()
    out.call(name)
    if empty:
        out.arguments("{}")
    elif not (yield from read_arguments(source, out)):
        return False
    if closing == CALL_END or (yield from source.read_end(closing, out.content)):
        yield from source.read_end(CALL_END, out.content)
    return True


def write_calls(lark: Lark, offer: Offer, before: str, behind: str) -> Calls:
    """Return the syntax of calls.

    ``before`` is the text before the arguments, with NAME for the function's name, and ``behind``
    is what follows them.
    """

    def call(function: Function) -> str:
        head, separator, tail = before.replace(NAME, function.name).partition(SEPARATOR)
        begin = lark.sequence(CALL, head, separator, tail)
        return f"{begin} {lark.schema(function.json_schema)} {lark.sequence(behind, CALL_END)}"

    one = lark.rule(either(*map(call, offer.functions)))
    calls = repeated(one, literal("\n"), offer.parallel)
    rest = f"{calls} {lark.mark(LIST_END)}"
    return marked(lark, LIST, rest, offer.parallel, CALL)
