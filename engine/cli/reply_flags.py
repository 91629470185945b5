"""How a model writes tool calls and reasoning: by two flags, else by its chat template."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kiln.engine.text.replies.choice import ReplyFormats

logger = logging.getLogger(__name__)


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
