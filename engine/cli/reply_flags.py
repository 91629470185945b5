"""The flags that say how a model writes tool calls and reasoning."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kiln.engine.text.replies.choice import ReplyFormats

logger = logging.getLogger(__name__)


def add_reply_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the two flags. Their values have vLLM's names."""
    replies = parser.add_argument_group("replies")
    replies.add_argument(
        "--tool-call-parser",
        metavar="NAME",
        help="format of tool calls, such as hermes or qwen3_coder; none: calls stay text. "
        "Default: the one that the chat template shows",
    )
    replies.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        help="format of reasoning, such as qwen3 or deepseek_r1; none: it stays in the content. "
        "Default: <think>…</think> if the chat template has it",
    )


def reply_formats(args: argparse.Namespace, templates: Sequence[str] = ()) -> ReplyFormats:
    """Return the formats by the flags, else by the texts of the chat templates.

    Warns about templates that have tools in no known format. Raises ConfigError.
    """
    from kiln.engine.text.replies.choice import choose_formats

    formats = choose_formats(templates, args.tool_call_parser, args.reasoning_parser)
    logger.info(
        "tool calls: %s, reasoning: %s",
        formats.tools.names[0] if formats.tools else "none",
        formats.reasoning.names[0] if formats.reasoning else "none",
    )
    has_tools = any("tools" in template for template in templates)
    if has_tools and formats.tools is None and args.tool_call_parser is None:
        logger.warning(
            "the model's chat template shows tool calls in no format that Kiln knows: they stay in "
            "the content; --tool-call-parser names a format"
        )
    return formats
