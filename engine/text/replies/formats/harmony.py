"""gpt-oss: messages in channels, ``<|channel|>analysis<|message|>…<|end|>`` and so on.

A call is a message to a function. Its recipient stands in one of three places:
``<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>``, the same without
``<|constrain|>``, or before the channel: ``assistant to=functions.f<|channel|>commentary``.
The channel ``analysis`` is reasoning; other messages without a recipient are content.
"""

from __future__ import annotations

import re

from kiln.engine.grammar.grammar import literal
from kiln.engine.text.replies.calls import Calls, Function, Offer, either
from kiln.engine.text.replies.format import ToolFormat, Tools
from kiln.engine.text.replies.json_calls import read_arguments
from kiln.engine.text.replies.lark import CONTENT, Lark
from kiln.engine.text.replies.message import MessageBuilder
from kiln.engine.text.replies.source import Steps, TextSource

_START, _CHANNEL, _CONSTRAIN = "<|start|>", "<|channel|>", "<|constrain|>"
_MESSAGE, _END, _CALL, _RETURN = "<|message|>", "<|end|>", "<|call|>", "<|return|>"
_ENDS = (_END, _CALL, _RETURN)
_OPENINGS = (_START, _CHANNEL, _MESSAGE)
_FUNCTIONS = "functions."
_MAX_HEADER = 400  # characters
_HEADER = re.compile(
    r"\s*(assistant)?\s*(to=[^\s<]*)?\s*(<\|channel\|>\s*\w*)?\s*(to=[^\s<]*)?\s*"
    r"(<\|constrain\|>)?\s*\w*\s*"
)
_RECIPIENT = re.compile(r"to=(?!assistant\b|user\b|all\b)([\w.:-]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\W*(analysis|commentary|final)")
_MARKS = re.compile(r"<\|(start|channel|constrain)\|>")


def _parse(source: TextSource, out: MessageBuilder, tools: Tools) -> Steps[None]:
    source.record()
    yield from source.read_space()
    if (yield from source.next_of("to=")):  # the prompt ends after ``<|start|>assistant``
        source.recorded()
        yield from _read_message(source, out, tools)
    elif (yield from source.next_of(*_OPENINGS)):
        source.recorded()
    else:
        out.content(source.recorded())
    while (yield from source.peek()):
        if (yield from source.next_of(*_OPENINGS)):
            yield from _read_message(source, out, tools)
        elif not (yield from source.read_mark(*_ENDS)):
            yield from source.read_until((*_ENDS, *_OPENINGS), out.content)


def _read_message(source: TextSource, out: MessageBuilder, tools: Tools) -> Steps[None]:
    """Read a header and its message.

    Models also write headers that the format does not allow, with stray characters or with a part
    of it twice. What names a channel or a recipient counts there. Without a message a header is
    dropped, as when the text ends in it; anything else there is content, without its marks.
    """
    yield from source.read_mark(_START)
    header = yield from source.text_until(_MESSAGE, _START, *_ENDS)
    if len(header) > _MAX_HEADER or not (yield from source.read_mark(_MESSAGE)):
        if len(header) > _MAX_HEADER or not _HEADER.fullmatch(header):
            out.content(_MARKS.sub("", header))
        return
    recipient = "".join(_RECIPIENT.findall(header)[:1])
    channel = "".join(_CHANNEL_NAME.findall(header)[-1:])
    name = recipient.removeprefix(_FUNCTIONS)
    if tools and name and (recipient != name or name in tools):
        yield from _read_call(source, out, name)
        write = out.content
    elif (recipient and recipient == name) or channel == "analysis":
        out.reasoning("\n")
        write = out.reasoning
    else:
        out.content("\n" if out.has_content else "")
        write = out.content
    yield from source.read_until((*_ENDS, _START, _CHANNEL), write)


def _read_call(source: TextSource, out: MessageBuilder, name: str) -> Steps[None]:
    """Read a call's object; an empty message has no arguments. Anything else is content."""
    yield from source.read_space()
    char = yield from source.peek()
    if char and char != "{" and not (yield from source.next_of(*_ENDS, _START, _CHANNEL)):
        return
    out.call(name)
    if char != "{":
        out.arguments("{}")
    else:
        yield from read_arguments(source, out)


def _write(lark: Lark, offer: Offer) -> Calls:
    """Write messages up to one that ends the reply: a call, or the answer in ``final``."""
    next_one = f'{lark.mark(_START)} "assistant"'
    channel, message = lark.mark(_CHANNEL), lark.mark(_MESSAGE)

    def said(name: str) -> str:
        text = lark.until(_END, *_OPENINGS, _CALL, _RETURN)
        return f'{channel} "{name}" {message} {text} {next_one}'

    calls = [_write_call(lark, one) for one in offer.functions]
    call = lark.rule(either(*calls)) if calls else ""
    final = f'{channel} "final" {message}'
    last = offer.prompt.rpartition(_START)[2]
    is_open = _MESSAGE in last and _END not in last  # the reply goes on inside a message
    text = lark.text(*_OPENINGS, *_ENDS)
    answer, before = ("", "") if is_open else (final, f"({said('analysis')})*")
    free = either(f"({said('commentary')})? {call}", f"{answer} {text} {_ended(lark, _RETURN)}")
    content = f"{answer} @{CONTENT} {_ended(lark, _RETURN)}"
    return Calls(call, free, content, before)


def _write_call(lark: Lark, function: Function) -> str:
    """Return a message to a function, with the recipient in one of its two places."""
    to, channel = f" to={_FUNCTIONS}{function.name}", lark.mark(_CHANNEL)
    heads = either(
        f"{channel} {literal(f'commentary{to} ')}", f'{literal(to)} {channel} "commentary "'
    )
    body = f'{lark.mark(_CONSTRAIN)} "json" {lark.mark(_MESSAGE)}'
    return f"{heads} {body} {lark.schema(function.json_schema)} {_ended(lark, _CALL)}"


def _ended(lark: Lark, mark: str) -> str:
    """Return the token that ends a message, which the engine may take for the end of the reply."""
    return f"{lark.mark(mark)}?"


FORMAT = ToolFormat(
    names=("openai",),
    parse=_parse,
    write=_write,
    shown_by=((_CHANNEL,), (_MESSAGE,)),
    marks=(_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS),
    stops=(_CALL, _RETURN),
    reasons=True,
)
