"""Chat in the terminal, with a model loaded in its own process or with a server.

Each line is a message. /help lists the commands, such as /reset, which clears the conversation,
and /quit; Ctrl-D ends too, Ctrl-C stops an answer. Input from a pipe is answered line by line:
echo "What is 17 + 25?" | kiln chat
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from kiln.engine.cli.options import add_engine_arguments
from kiln.engine.cli.urls import server_url

if TYPE_CHECKING:
    import asyncio

    from kiln.engine.cli.chatting import Chat, Message

HELP = "chat in the terminal"
_COMMAND = re.compile("/[a-z?]+")  # a path has more slashes
_COMMANDS = {
    "/help": "show this",
    "/reset": "clear the conversation",
    "/quit": "end; Ctrl-D too. Ctrl-C stops an answer, or ends at the prompt",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the chat and of the engine."""
    add_engine_arguments(parser)
    chat = parser.add_argument_group("chat")
    chat.add_argument("--url", help="talk to this server instead of loading MODEL")
    chat.add_argument("--api-key", metavar="KEY", help="API key of the server")
    chat.add_argument("--system", metavar="TEXT", help="a system message")
    chat.add_argument("--temperature", type=float, help="default: the model's own")
    chat.add_argument("--max-tokens", type=int, help="per answer; default: up to the context")


def run(args: argparse.Namespace) -> int:
    """Chat until the input ends."""
    import asyncio

    with asyncio.Runner() as runner:
        chat = _make(args)
        try:
            runner.run(chat.open())
            _talk(runner, chat, args.system)
        finally:
            runner.run(chat.close())
    return 0


def _make(args: argparse.Namespace) -> Chat:
    from kiln.engine.cli.chatting import EngineChat, ServerChat
    from kiln.engine.cli.options import find_model

    given = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if args.url is not None:
        return ServerChat(server_url(args.url), args.api_key, options)
    return EngineChat(*find_model(args), options)


def _talk(runner: asyncio.Runner, chat: Chat, system: str | None) -> None:
    """Read messages and print answers until the input ends."""
    from kiln.engine.errors import KilnError

    start: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    history = list(start)
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):  # some builds of Python lack it
            import readline  # noqa: F401  # its import gives input() editing and a history
        print(f"{chat.name}. A line is a message; /help lists the commands.")
    while (line := _read(terminal)) is not None:
        if _COMMAND.fullmatch(line):
            if line == "/quit":
                return
            if line == "/reset":
                history = list(start)
            else:
                print(_help(line))
        elif line:
            history.append({"role": "user", "content": line})
            said: list[str] = []
            try:
                runner.run(_answer(chat, history, said))
            except KeyboardInterrupt:
                print(" …")
            except KilnError as error:
                if not terminal:
                    raise
                print(f"error: {error}", file=sys.stderr)
            if said:
                history.append({"role": "assistant", "content": "".join(said)})
            else:
                history.pop()  # an unanswered question would confuse the next answer


def _read(terminal: bool) -> str | None:
    """Return the next message, or None at the end of the input."""
    try:
        return input("\n> " if terminal else "").strip()
    except (EOFError, KeyboardInterrupt):
        if terminal:
            print()  # else the shell's prompt follows ours
        return None


def _help(line: str) -> str:
    """Return the answer to ``/help``, and to a word with a slash that is no command."""
    commands = "\n".join(f"  {name:<8}{meaning}" for name, meaning in _COMMANDS.items())
    if line == "/help":
        return commands
    near = get_close_matches(line, _COMMANDS, 1)
    hint = f"; did you mean {near[0]}?" if near else f". There are:\n{commands}"
    return f"{line[:80]} is no command{hint}"


async def _answer(chat: Chat, history: list[Message], said: list[str]) -> None:
    """Print an answer as it streams; ``said`` collects it, so that a part survives Ctrl-C."""
    async for text in chat.reply(history):
        said.append(text)
        print(text, end="", flush=True)
    print(flush=True)
