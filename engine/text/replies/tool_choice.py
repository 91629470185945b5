"""Which tool calls a request allows or demands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """OpenAI's ``tool_choice``.

    ``names`` are the functions that may be called; None: all that the request offers. A function
    that is ``forced`` is called exactly once.
    """

    mode: Literal["none", "auto", "required"] = "auto"
    names: frozenset[str] | None = None
    forced: bool = False

    def allowed(self, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return those of the tools, in OpenAI's form, that may be called."""
        if self.mode == "none":
            return []
        if self.names is None:
            return list(tools)
        return [tool for tool in tools if tool["function"]["name"] in self.names]
