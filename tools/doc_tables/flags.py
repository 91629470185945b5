"""The tables of flags, from the parser of the ``kiln`` command."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, get_type_hints

from doc_tables.markdown import code, sentence, table
from kiln.engine.cli.engine_flags import ENGINE, LORA
from kiln.engine.cli.flags import Flag
from kiln.engine.cli.main import build_parser
from kiln.engine.cli.serve_flags import CHATS, LOGS, SERVER, TLS
from kiln.engine.config import EngineConfig

_GROUPS = (*ENGINE, LORA, CHATS, SERVER, TLS, LOGS)
_TITLES = ("flag", "default", "meaning")
_DEFAULT = re.compile(r"(?:^|[;.,] )[Dd]efault:? ")
EVERYWHERE = {"--help", "--debug"}


def serve_flags() -> str:
    """Return a table for each group of the flags of ``kiln serve``."""
    actions = {name: one for one in _parser_of("serve")._actions for name in one.option_strings}
    parts = []
    for title, flags in _GROUPS:
        rows = [_row(actions[flag.name], flag) for flag in flags]
        parts.append(f"### {title[0].upper()}{title[1:]}\n\n{table(_TITLES, rows)}")
    return "\n\n".join(parts)


def verb_flags() -> str:
    """Return the flags of every other verb that are not those of ``kiln serve``."""
    parts = []
    for name, parser in verbs():
        if name == "serve":
            continue
        taken = {one for action in parser._actions for one in action.option_strings}
        whole = [(title, flags) for title, flags in _GROUPS if {one.name for one in flags} <= taken]
        shared = {name for _, flags in whole for one in flags for name in one.names.split()}
        rows = [
            _row(action)
            for action in parser._actions
            if action.help != argparse.SUPPRESS
            and not set(action.option_strings) & (EVERYWHERE | shared)
        ]
        parts.append(f"### kiln {name}\n\n{sentence(_about(parser))}")
        if rows:
            parts.append(table(_TITLES, rows))
        if whole:
            titles = ", ".join(title for title, _ in whole)
            parts.append(f"It also takes these groups of flags of `kiln serve`: {titles}.")
    return "\n\n".join(parts)


def other_names() -> str:
    """Return the names beside its own that a flag of ``kiln serve`` has."""
    rows = [
        (code(*others), code(flag.name))
        for _, flags in _GROUPS
        for flag in flags
        if (others := [name for name in flag.names.split() if name != flag.name])
    ]
    return table(("also accepted", "Kiln's flag"), rows)


def verbs() -> list[tuple[str, argparse.ArgumentParser]]:
    """Return the name and the parser of every command."""
    return list(_verbs(build_parser(), ""))


def _verbs(parser: argparse.ArgumentParser, path: str) -> Iterator[tuple[str, Any]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, own in action.choices.items():
                full = f"{path} {name}".strip()
                below = list(_verbs(own, full))
                yield from below or [(full, own)]


def _parser_of(verb: str) -> argparse.ArgumentParser:
    return dict(verbs())[verb]


def _about(parser: argparse.ArgumentParser) -> str:
    return " ".join((parser.description or "").split("\n\n")[0].split())


def _row(action: argparse.Action, flag: Flag | None = None) -> tuple[str, str, str]:
    meaning, default = _split(action.help or "")
    if not default:
        default = _shown(action.default if flag is None else _setting(flag, action.default))
    names = action.option_strings or [action.dest]
    own = flag.name if flag else max(names, key=len)
    values = _values(action)
    others = [name for name in names if name != own and name.startswith("--")]
    parts = [sentence(meaning)] if meaning else []
    if action.choices and not isinstance(action, argparse._SubParsersAction):
        parts.append(f"One of {code(*map(str, action.choices))}.")
    if others:
        parts.append(f"Also {code(*others)}.")
    shown = own if action.option_strings else str(action.metavar or own)
    return code(f"{shown} {values}".strip()), default, " ".join(parts)


def _split(text: str) -> tuple[str, str]:
    """Split a help text into the meaning and what it says of the default."""
    found = _DEFAULT.search(text)
    if found is None:
        return text, ""
    return text[: found.start()], text[found.end() :].rstrip(".")


def _setting(flag: Flag, default: Any) -> Any:
    """Return the default of the setting that a flag fills, or of the argument."""
    if default is not None or not flag.setting or flag.switch is not None:
        return default
    part, _, field = flag.setting.partition(".")
    kind = get_type_hints(EngineConfig)[part]
    return next(one.default for one in fields(kind) if one.name == field)


def _values(action: argparse.Action) -> str:
    if action.nargs == 0 or not action.option_strings:
        return ""
    metavar = action.metavar or ("" if action.choices else action.dest.upper())
    return f"{metavar} …" if action.nargs == "+" and metavar else str(metavar)


def _shown(default: Any) -> str:
    if default is None or default is argparse.SUPPRESS or isinstance(default, bool):
        return ""
    if isinstance(default, list | tuple):
        return code(",".join(map(str, default))) if default else ""
    text = f"{default:g}" if isinstance(default, float) else str(default)
    return code(text) if text and "<" not in text else ""
