"""The grammar of a whole reply: reasoning, then tool calls or content, as a request demands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kiln.engine.errors import field_error
from kiln.engine.grammar.grammar import Grammar
from kiln.engine.text.replies.calls import Calls, Function, Offer
from kiln.engine.text.replies.format import ToolFormat
from kiln.engine.text.replies.lark import CONTENT, Lark, Special
from kiln.engine.text.replies.reasoning import ReasoningFormat
from kiln.engine.text.replies.tool_choice import ToolChoice

_SPACE = r"/[ \n\r\t]{1,8}/"  # readers drop it around reasoning


@dataclass(frozen=True, slots=True)
class Demands:
    """What a request demands of its replies: ``content`` is the grammar of their content.

    ``tools`` are those of the request, in OpenAI's form.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    choice: ToolChoice = ToolChoice()
    parallel: bool = True
    content: Grammar | None = None

    @property
    def functions(self) -> list[Function]:
        """The functions that may be called. Raises RequestError for a schema of no object."""
        if self.choice.mode == "none":
            return []
        named, strict = self.choice.names, self.choice.mode == "required"
        return [
            Function.of(tool, index, all_strict=strict)
            for index, tool in enumerate(self.tools)
            if named is None or tool["function"]["name"] in named
        ]

    @property
    def of_calls(self) -> bool:
        """Whether something is demanded of calls."""
        strict = any(tool["function"].get("strict") for tool in self.tools)
        return self.choice != ToolChoice("none") and (strict or self.choice != ToolChoice())


def reply_grammar(
    form: ToolFormat | None,
    reasoning: ReasoningFormat | None,
    demands: Demands,
    prompt: str,
    special: Special,
) -> Grammar | None:
    """Return the grammar of a reply; None if it may be anything.

    ``prompt`` is the rendered prompt. Raises RequestError if calls are demanded of a model whose
    format of calls is not known, and for a schema that the format cannot write.
    """
    required, content = demands.choice.mode == "required", demands.content
    if form is None and required:
        says = "needs a model whose format of calls is known: see --tool-call-parser"
        raise field_error("tool_choice", says)
    if content is None and not (form is not None and demands.of_calls):
        return None
    lark = Lark(special)
    functions = demands.functions if form is not None else []
    written = Calls("", "")
    if form is not None and (functions or form.reasons):
        parallel = demands.parallel and not demands.choice.forced
        written = form.write(lark, Offer(functions, parallel, prompt))
    if required:
        body = written.calls
    elif content is not None:
        body = f"{written.calls} | {written.content}" if functions else written.content
    else:
        body = written.free
    before = f"{written.before}{_thought(lark, reasoning, prompt)}"
    if not before and body == f"@{CONTENT}":
        return content
    return lark.grammar(f"{before} ({body})", content if f"@{CONTENT}" in body else None)


def _thought(lark: Lark, form: ReasoningFormat | None, prompt: str) -> str:
    """Return the reasoning that comes first, or may come, with the white space behind it."""
    space = f"{lark.terminal(_SPACE)}?"
    if form is None or prompt.rstrip().endswith(form.end):
        return ""
    if form.begins_after(prompt):
        return f"{lark.until(form.end)} {space}"
    return f"({space} {lark.mark(form.begin)} {lark.until(form.end)} {space})?"
