"""The argument parser of ``kiln``: whole flag names, and errors that say what to write instead."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import ModuleType
from typing import Any, NoReturn

from kiln.engine.cli.vllm_flags import ABSENT


def commands_of(package: ModuleType) -> dict[str, ModuleType]:
    """Return the commands of a package by name: each module is one, and has its name.

    An underscore at the end is left out: no module can have a keyword, such as import, as its name.
    """
    found = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return {
        name.rstrip("_"): importlib.import_module(f"{package.__name__}.{name}") for name in found
    }


def add_commands(subparsers: Any, package: ModuleType, **options: Any) -> list[KilnParser]:
    """Add each module of a package as a command; return their parsers, made with ``options``.

    A module has HELP, ``run(args) -> int`` and, if it takes any, ``add_arguments(parser)``. Instead
    of ``run`` a package has commands of its own, and in SUBCOMMANDS what argparse calls them.
    """
    made = []
    for name, module in commands_of(package).items():
        about = {"help": module.HELP, "description": module.__doc__}
        own = subparsers.add_parser(name, **about, **options)
        if hasattr(module, "SUBCOMMANDS"):
            add_commands(own.add_subparsers(required=True, **module.SUBCOMMANDS), module)
        else:
            own.set_defaults(run=module.run)
        if hasattr(module, "add_arguments"):
            module.add_arguments(own)
        made.append(own)
    return made


class KilnParser(argparse.ArgumentParser):
    """A parser that reads ``--max_model_len`` as ``--max-model-len``, as vLLM's does.

    Flags cannot be abbreviated: a shortened name could be another flag of vLLM's.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})  # type: ignore[arg-type]

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse; the parser of a command refuses the words that it does not know."""
        words = None if args is None else [_with_hyphens(word) for word in args]
        found, rest = super().parse_known_args(words, namespace)
        if rest:
            self._refuse(rest)
        return found, rest

    def error(self, message: str) -> NoReturn:
        """End with code 2 and two lines; the usage of some commands fills a screen."""
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog} --help lists the flags\n")

    def _refuse(self, rest: Iterable[str]) -> NoReturn:
        """End with an error for the first word that no flag takes."""
        words = list(rest)
        flags = [word for word in words if word.startswith("-")]
        if not flags:
            self.error(f"{words[0][:80]!r}: unexpected; {self.prog} takes no further word here")
        name = flags[0].partition("=")[0][:80]
        self.error(explain(name, self._option_string_actions))


def explain(name: str, known: Mapping[str, object]) -> str:
    """Return why a flag is not accepted, and what to do."""
    reason = ABSENT.get(name.replace("--no-", "--"))  # which are not listed
    if reason is not None:
        return f"Kiln has no {name}: {reason}"
    near = get_close_matches(name, [flag for flag in known if flag.startswith("--")], 1)
    return f"unknown flag {name}" + (f"; did you mean {near[0]}?" if near else "")


def _with_hyphens(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value
