"""Which tool calls a request allows or demands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """OpenAI's ``tool_choice``.

    ``names`` are the functions that may be called; None: all that the request offers. A function
    that is ``forced`` is called exactly once.
    """

    mode: Literal["none", "auto", "required"] = "auto"
    names: frozenset[str] | None = None
    forced: bool = False
