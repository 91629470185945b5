"""What formats of tool calls have in common when their syntax is written as a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kiln.engine.errors import RequestError, field_error
from kiln.engine.grammar.grammar import literal
from kiln.engine.text.replies.lark import CONTENT, Lark

_NO_PARAMETERS = {"properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Function:
    """A function that a reply may call. ``schema`` is that of its arguments, an object's.

    ``where`` is the field of the schema, for errors. Without ``strict`` any object will do.
    """

    name: str
    schema: Mapping[str, Any]
    where: str
    strict: bool

    @classmethod
    def of(cls, tool: Mapping[str, Any], index: int, *, all_strict: bool) -> Function:
        """Return the function of a tool in OpenAI's form. Raises RequestError."""
        function, where = tool["function"], f"tools[{index}].function.parameters"
        strict = all_strict or bool(function.get("strict"))
        given = function.get("parameters")
        schema: Mapping[str, Any] = _NO_PARAMETERS if given is None else given
        kind = schema.get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise field_error(where, f"must be the schema of an object, has type {kind!r:.80}")
        return cls(function["name"], {**schema, "type": "object"}, where, strict)

    @property
    def json_schema(self) -> Mapping[str, Any]:
        """The schema of arguments that are written in JSON."""
        return self.schema if self.strict else {"type": "object"}

    def refused(self, says: str) -> RequestError:
        """Return the error of a schema that a format has no syntax for."""
        return field_error(self.where, f"{says}, which the model's format of calls cannot write")


@dataclass(frozen=True, slots=True)
class Offer:
    """What a reply may consist of: the functions, and whether several calls are allowed.

    ``prompt`` is the rendered prompt, which may have begun the reply.
    """

    functions: Sequence[Function]
    parallel: bool
    prompt: str


@dataclass(frozen=True, slots=True)
class Calls:
    """A format's syntax, as expressions of Lark.

    ``calls``: a reply of calls alone. ``free``: any text, in which calls are right. ``content``: a
    reply of content that has a form. ``before``: what may come before each of them.
    """

    calls: str
    free: str
    content: str = f"@{CONTENT}"
    before: str = ""


def either(*expressions: str) -> str:
    """Return one of some expressions."""
    return f"({' | '.join(expressions)})"


def repeated(one: str, between: str, parallel: bool) -> str:
    """Return an expression, with ``parallel`` as often as the model likes."""
    return f"{one} ({between} {one})*" if parallel else one


def marked(lark: Lark, opener: str, rest: str, parallel: bool, *banned: str) -> Calls:
    """Return the syntax of calls that begin with a mark.

    ``rest`` is what follows the mark. Text has none of the ``banned`` marks, which the reader
    takes for the beginning of a call too.
    """
    text, count = lark.text(opener, *banned), "*" if parallel else "?"
    free = f"({lark.until(opener, *banned)} {rest}){count} {text}"
    return Calls(f"{lark.mark(opener)} {rest}", free)


def json_call(lark: Lark, function: Function, key: str = "arguments") -> str:
    """Return a call that is a JSON object."""
    head = f'{{"name": {json.dumps(function.name)}, "{key}": '
    return f'{literal(head)} {lark.schema(function.json_schema)} "}}"'


def json_calls(lark: Lark, offer: Offer) -> str:
    """Return a call of one of the functions that is a JSON object."""
    return lark.rule(either(*(json_call(lark, one) for one in offer.functions)))
