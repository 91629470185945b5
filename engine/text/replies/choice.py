"""Which formats a model's replies have: by flags, else by the model's chat template."""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

from kiln.engine.errors import ConfigError
from kiln.engine.grammar.grammar import Grammar
from kiln.engine.text.replies import formats
from kiln.engine.text.replies.format import ToolFormat, Tools
from kiln.engine.text.replies.lark import Special
from kiln.engine.text.replies.message import MessageBuilder, random_call_id
from kiln.engine.text.replies.reader import ReplyReader
from kiln.engine.text.replies.reasoning import REASONING_FORMATS, ReasoningFormat, read_reasoning
from kiln.engine.text.replies.reply_grammar import Demands, reply_grammar
from kiln.engine.text.replies.source import Steps, TextSource

NONE = "none"  # the value of both flags that switches a parser off
Form = TypeVar("Form")
_GPT_OSS = "openai_gptoss"  # reasoning that is part of the format of tool calls


@dataclass(frozen=True, slots=True)
class ReplyFormats:
    """How a model writes reasoning and tool calls. None: all of it is content."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    def marks(self, with_tools: bool) -> tuple[str, ...]:
        """Return the texts that a reader must see even where they are special tokens."""
        shown = self.tools.marks if self.tools and (with_tools or self.tools.reasons) else ()
        thought = (self.reasoning.begin, self.reasoning.end) if self.reasoning else ()
        return (*shown, *thought)

    @property
    def stops(self) -> tuple[str, ...]:
        """The special tokens that end a reply."""
        return self.tools.stops if self.tools else ()

    def reader(
        self, tools: Sequence[Mapping[str, Any]] = (), *, prompt: str = "", parallel: bool = True
    ) -> ReplyReader:
        """Return a reader for one output.

        ``tools`` are those of the request, in OpenAI's form; without any nothing is a call.
        ``prompt`` is the rendered prompt, whose end may begin the reasoning. With ``parallel``
        false only the first call is kept.
        """
        offered, form, thought = Tools(tools), self.tools, self.reasoning

        def read(source: TextSource, out: MessageBuilder) -> Steps[None]:
            if thought is not None:
                yield from read_reasoning(thought, source, out, thought.begins_after(prompt))
            if form is not None and (offered or form.reasons):
                yield from form.parse(source, out, offered)
            yield from source.read_rest(out.content)

        new_id = form.new_id if form else random_call_id
        message = MessageBuilder(may_call=bool(offered), parallel=parallel, new_id=new_id)
        reads = thought is not None or bool(offered) or (form is not None and form.reasons)
        return ReplyReader(read if reads else None, message)

    def grammar(self, demands: Demands, prompt: str, special: Special) -> Grammar | None:
        """Return the grammar of a reply to a rendered prompt; None if it may be anything.

        ``special`` returns the id of the special token with a text. Raises RequestError for what
        the model's format of calls cannot write.
        """
        return reply_grammar(self.tools, self.reasoning, demands, prompt, special)


@cache
def tool_formats() -> tuple[ToolFormat, ...]:
    """Return the formats of all modules of ``formats``, in the order of their file names."""
    names = sorted(found.name for found in pkgutil.iter_modules(formats.__path__))
    modules = [import_module(f"{formats.__name__}.{name}") for name in names]
    return tuple(module.FORMAT for module in modules)


def tool_parsers() -> dict[str, ToolFormat | None]:
    """Return what each value of ``--tool-call-parser`` stands for."""
    return {NONE: None, **{name: form for form in tool_formats() for name in form.names}}


def reasoning_parsers() -> dict[str, ReasoningFormat | None]:
    """Return what each value of ``--reasoning-parser`` stands for.

    None: content is not split here, as the format of tool calls separates it or nothing does.
    """
    named = {name: form for form in REASONING_FORMATS for name in form.names}
    return {NONE: None, _GPT_OSS: None, **named}


def choose_formats(
    templates: Iterable[str], tool_parser: str | None = None, reasoning_parser: str | None = None
) -> ReplyFormats:
    """Return the formats by the values of the two flags, else by the model's chat templates.

    A template that has ``</think>`` shows reasoning. Raises ConfigError for an unknown name, and
    for two names that do not go together.
    """
    text = "\n".join(templates)
    if tool_parser is not None:
        tools = _by_name("--tool-call-parser", tool_parser, tool_parsers())
    elif reasoning_parser == _GPT_OSS:
        tools = next(form for form in tool_formats() if form.reasons)
    else:
        tools = next((form for form in tool_formats() if form.is_shown_by(text)), None)
    by_tools = tools is not None and tools.reasons
    if reasoning_parser is None:
        shown = (form for form in REASONING_FORMATS if form.end in text and not form.always)
        return ReplyFormats(tools, None if by_tools else next(shown, None))
    reasoning = _by_name("--reasoning-parser", reasoning_parser, reasoning_parsers())
    if by_tools != (reasoning_parser == _GPT_OSS):
        raise ConfigError(
            f"--reasoning-parser {reasoning_parser}: the tool format "
            f"{tools.names[0] if tools else NONE} "
            + ("separates reasoning itself" if by_tools else "does not separate reasoning")
            + f"; only the format openai and --reasoning-parser {_GPT_OSS} go together"
        )
    return ReplyFormats(tools, reasoning)


def _by_name(flag: str, name: str, known: dict[str, Form | None]) -> Form | None:
    """Return the format of a flag's value. Raises ConfigError."""
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f": did you mean {close[0]}?" if close else "."
    raise ConfigError(f"{flag} {name[:80]!r} is unknown{hint} Known are {', '.join(sorted(known))}")
