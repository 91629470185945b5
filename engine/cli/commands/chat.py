"""Chat in the terminal, with a model loaded in its own process or with a server.

Each line is a message. /help lists the commands, such as /model, /system, /save and /retry. Ctrl-C
stops an answer; Ctrl-D ends the chat. What was typed is kept in $XDG_STATE_HOME/kiln/chat_history
(~/.local/state/…), for the arrow keys.

Input from a pipe is answered line by line: echo "What is 17 + 25?" | kiln chat
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from kiln.engine.cli.engine_flags import ENGINE, LORA
from kiln.engine.cli.flags import add_group, add_groups, command_line, group_of
from kiln.engine.cli.numbers import count
from kiln.engine.cli.options import add_engine_arguments
from kiln.engine.cli.serve_flags import CHATS
from kiln.engine.cli.urls import server_url
from kiln.engine.errors import ConfigError

if TYPE_CHECKING:
    from kiln.engine.cli.chat.backend import Backend

HELP = "chat in the terminal"
_ADAPTERS = group_of(
    LORA[0],
    LORA,
    *("--lora-modules", "--max-loras", "--max-lora-rank"),
    *("--lora-memory-gib", "--lora-host-memory-gib"),
)
_TEXT = group_of("replies", CHATS, "--chat-template", "--reasoning-parser")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the chat and of the engine."""
    add_engine_arguments(parser)
    add_groups(parser, (_ADAPTERS,), "engine")
    chat = parser.add_argument_group("chat")
    chat.add_argument(
        "--url",
        help="talk to this server, such as localhost:8000, instead of loading MODEL; MODEL is then "
        "one of its models or adapters",
    )
    chat.add_argument("--api-key", metavar="KEY", help="API key of the server")
    chat.add_argument("--system", metavar="TEXT", help="a system message")
    chat.add_argument("--temperature", type=float, help="default: the model's own")
    chat.add_argument(
        "--max-tokens", type=count, metavar="N", help="per answer; default: up to the context"
    )
    chat.add_argument("--no-history", action="store_true", help="keep nothing that is typed")
    add_group(parser, _TEXT)


def run(args: argparse.Namespace) -> int:
    """Chat until the input ends."""
    import asyncio

    from kiln.engine.cli.chat.session import Session

    with asyncio.Runner() as runner:
        chat = _make(args)
        try:
            runner.run(chat.open())
            Session(runner, chat, args.system, keep_history=not args.no_history).talk()
        finally:
            runner.run(chat.close())
    return 0


def _make(args: argparse.Namespace) -> Backend:
    """Return what answers. Raises KilnError."""
    given = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if args.url is not None:
        from kiln.engine.cli.chat.server_chat import ServerChat

        return ServerChat(_address(args), args.api_key, options, args.model or args.model_flag)
    from kiln.engine.cli.chat.engine_chat import EngineChat
    from kiln.engine.cli.options import find_model

    if args.api_key is not None:
        raise ConfigError("--api-key: is that of the server at --url, which is not given")
    config, files = find_model(args)
    return EngineChat(config, files, options, args.chat_template, args.reasoning_parser)


def _address(args: argparse.Namespace) -> str:
    """Return the address of the server. Raises ConfigError."""
    url = server_url(args.url)
    for flag in command_line(args, [*ENGINE, _ADAPTERS, _TEXT])[:1]:
        raise ConfigError(f"{flag}: the server at --url has its own engine: leave it out")
    return url
