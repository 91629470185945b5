"""What a flag is: a row of a table, from which its argument and its setting are made."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from kiln.engine.cli.parser import KilnParser
from kiln.engine.cli.several import Fits, Several
from kiln.engine.config import EngineConfig

Group = tuple[str, Sequence["Flag"]]  # title in ``--help``, and its flags


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag, and the setting that it fills.

    ``names``: separated by spaces. The first long one is the flag's own; the others are accepted as
    well, and most of them are vLLM's. ``setting``: "part.field" of EngineConfig, whose annotation
    says how values are read; empty if it is no setting of the engine. ``switch``: the setting's
    value if the flag is given; such a flag takes no value. ``fits``, of a flag of several words:
    whether a word can be one of its values; the last one that cannot is MODEL. A flag that is not
    given is None.
    """

    names: str
    help: str
    setting: str = ""
    type: Callable[[str], Any] | None = None
    metavar: str | None = None
    choices: Sequence[str] | None = None
    nargs: str | None = None
    switch: Any = None
    fits: Fits | None = None

    @property
    def name(self) -> str:
        """The flag's own name, such as ``--max-num-seqs``."""
        return next(name for name in self.names.split() if name.startswith("--"))

    @property
    def dest(self) -> str:
        """The name of its attribute in the parsed arguments."""
        return self.name[2:].replace("-", "_")

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        """Declare the flag."""
        options: dict[str, Any] = {"action": "store_const", "const": True}
        if self.switch is None:
            options = _options_of(self.setting) if self.setting else {}
            for name in ("type", "metavar", "choices", "nargs"):
                if getattr(self, name) is not None:
                    options[name] = getattr(self, name)
            if options.get("nargs") == "+":
                options |= {"action": Several, "fits": self.fits}
        parser.add_argument(*self.names.split(), dest=self.dest, help=self.help, **options)


@cache
def _kinds(part: str) -> dict[str, Any]:
    """Return the types of the settings in a part of EngineConfig."""
    return get_type_hints(get_type_hints(EngineConfig)[part])


def _options_of(setting: str) -> dict[str, Any]:
    """Return what argparse must know of a setting's values, by its annotation."""
    part, _, field = setting.partition(".")
    kind = _kinds(part)[field]
    if isinstance(kind, UnionType):
        kind = get_args(kind)[0]  # the other one is None
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    several = {"nargs": "+"} if get_origin(kind) is tuple else {}
    one = get_args(kind)[0] if several else kind
    return several | {"type": one} | ({"metavar": "N"} if one is int else {})


def group(title: str, *flags: Flag) -> Group:
    """Return a group of flags."""
    return title, flags


def group_of(title: str, whole: Group, *names: str) -> Group:
    """Return a group of some flags of another group, by their own names."""
    known = {flag.name: flag for flag in whole[1]}
    return title, [known[name] for name in names]


def add_groups(
    parser: argparse.ArgumentParser, groups: Iterable[Group], part: str = "server"
) -> None:
    """Declare the flags of some groups, which are folded in the help; ``part`` names them all."""
    for one in groups:
        if isinstance(parser, KilnParser):
            parser.folded[one[0]] = part
        add_group(parser, one)


def add_group(parser: argparse.ArgumentParser, group: Group) -> None:
    """Declare the flags of a group, which the help explains."""
    title, flags = group
    added = parser.add_argument_group(title)
    for flag in flags:
        flag.add_to(added)


def settings_of(args: argparse.Namespace, groups: Iterable[Group]) -> dict[str, dict[str, Any]]:
    """Return the given settings: part of EngineConfig -> field -> value."""
    found: dict[str, dict[str, Any]] = {}
    for flag, value in _given(args, groups):
        if not flag.setting:
            continue
        part, _, field = flag.setting.partition(".")
        if flag.switch is not None:
            value = flag.switch
        found.setdefault(part, {})[field] = tuple(value) if isinstance(value, list) else value
    return found


def command_line(args: argparse.Namespace, groups: Iterable[Group]) -> list[str]:
    """Return the given flags as they are written on a command line."""
    line: list[str] = []
    for flag, value in _given(args, groups):
        line.append(flag.name)
        if flag.switch is None:
            line += map(str, value) if isinstance(value, list) else [str(value)]
    return line


def _given(args: argparse.Namespace, groups: Iterable[Group]) -> Iterable[tuple[Flag, Any]]:
    for _, flags in groups:
        for flag in flags:
            value = getattr(args, flag.dest, None)
            if value is not None:
                yield flag, value
