"""Separate the reasoning at the beginning of a reply, between ``<think>`` and ``</think>``."""

from __future__ import annotations

from dataclasses import dataclass

from kiln.engine.text.replies.message import MessageBuilder
from kiln.engine.text.replies.source import Steps, TextSource


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How some models mark reasoning. ``names`` are values of ``--reasoning-parser``.

    A reply begins as reasoning if the prompt ends with ``begin``, or if it begins with it itself.
    With ``always`` it does so too if the prompt says nothing, but not after ``end``.
    """

    names: tuple[str, ...]
    begin: str = "<think>"
    end: str = "</think>"
    always: bool = False

    def begins_after(self, prompt: str) -> bool:
        """Whether the reply to a prompt begins inside the reasoning."""
        last = prompt.rstrip()
        return last.endswith(self.begin) or (self.always and not last.endswith(self.end))


_PROMPT_DECIDES = (
    *("qwen3", "deepseek_v3", "glm45", "glm47", "holo2", "kimi_k2", "mimo", "nemotron_v3"),
)
_ALWAYS = ("deepseek_r1", "minimax_m2", "olmo3", "step3", "step3p5")
REASONING_FORMATS = (
    ReasoningFormat(_PROMPT_DECIDES),
    ReasoningFormat(_ALWAYS, always=True),
    ReasoningFormat(("mistral",), "[THINK]", "[/THINK]"),
    ReasoningFormat(("seed_oss",), "<seed:think>", "</seed:think>"),
)


def read_reasoning(
    form: ReasoningFormat, source: TextSource, out: MessageBuilder, begun: bool
) -> Steps[None]:
    """Read the reasoning, if there is any, with the white space around it.

    ``begun``: the prompt has begun it. Some models then write the first mark again.
    """
    source.record()
    yield from source.read_space()
    if not (yield from source.read_mark(form.begin)) and not begun:
        out.content(source.recorded())
        return
    source.recorded()
    yield from source.read_until((form.end,), out.reasoning)
    if (yield from source.read_mark(form.end)):
        yield from source.read_space()
