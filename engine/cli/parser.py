"""The argument parser of ``kiln``: whole flag names, and errors that say what to write instead."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import pydoc
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import ModuleType
from typing import Any, NoReturn

from kiln.engine.cli.help_pages import Manual, Section
from kiln.engine.cli.several import Several, name_model
from kiln.engine.cli.verbs import explain_verb
from kiln.engine.cli.vllm_flags import ABSENT


def commands_of(package: ModuleType) -> dict[str, ModuleType]:
    """Return the commands of a package by name: each module is one, and has its name.

    An underscore at the end is left out: no module can have a keyword, such as import, as its name.
    """
    found = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return {
        name.rstrip("_"): importlib.import_module(f"{package.__name__}.{name}") for name in found
    }


def add_commands(subparsers: Any, package: ModuleType) -> list[KilnParser]:
    """Add each module of a package as a command; return their parsers.

    A module has HELP, ``run(args) -> int`` and, if it takes any, ``add_arguments(parser)``. Instead
    of ``run`` a package has commands of its own, and in SUBCOMMANDS what argparse calls them.
    """
    made = []
    for name, module in commands_of(package).items():
        own = subparsers.add_parser(name, help=module.HELP, description=module.__doc__)
        if hasattr(module, "SUBCOMMANDS"):
            made += add_commands(own.add_subparsers(required=True, **module.SUBCOMMANDS), module)
        else:
            own.set_defaults(run=module.run)
        if hasattr(module, "add_arguments"):
            module.add_arguments(own)
        made.append(own)
    return made


class KilnParser(argparse.ArgumentParser):
    """A parser that reads ``--max_model_len`` as ``--max-model-len``, as vLLM's does.

    Flags cannot be abbreviated: a shortened name could be another flag of vLLM's. ``folded`` has
    the groups whose flags the short help names without a word, each with the part that it belongs
    to; ``often`` flags of them that it explains all the same; ``small_print`` what only the whole
    help tells.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        options = {"allow_abbrev": False, **kwargs, "add_help": False}
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.folded: dict[str, str] = {}
        self.often: Sequence[str] = ()
        self.small_print: list[str] = []
        told = "show this; TOPIC: a group, a flag, a word, all or page"
        self.add_argument("-h", "--help", action=_Help, metavar="[=TOPIC]", help=told)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse; the parser of a command refuses the words that it does not know."""
        words = self._read_words(sys.argv[1:] if args is None else args)
        if self._verbs():
            self._check_first(words)
        found, rest = super().parse_known_args(words, namespace)
        if rest:
            self._refuse(rest)
        return found, rest

    def error(self, message: str) -> NoReturn:
        """End with code 2 and two lines; the usage of some commands fills a screen."""
        what = "commands" if self._verbs() else "flags"
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog} --help lists the {what}\n")

    def format_help(self) -> str:
        """Return the short help."""
        return self.manual().short()

    def manual(self) -> Manual:
        """Return what the pages of the help are made of."""
        sections = [self._section(one) for one in self._action_groups if one._group_actions]
        return Manual(
            self.prog,
            " ".join([self.prog, *self._words(), "[flags]"]),
            self.description or "",
            sorted(sections, key=lambda one: one.is_last),
            [self.epilog] if self.epilog else [],
            self.small_print,
            self.often,
        )

    def _section(self, group: argparse._ArgumentGroup) -> Section:
        """Return a group for the help; argparse has two of its own, for words and flags."""
        actions = group._group_actions
        if group is self._positionals:
            return Section("arguments", actions)
        if group is self._optionals:
            return Section("flags", actions, is_last=bool(self.folded))
        title = group.title or ""
        return Section(title, actions, title in self.folded, self.folded.get(title, ""))

    def _read_words(self, words: Sequence[str]) -> list[str]:
        """Return the words with flags as they are declared, and MODEL apart from lists."""
        end = words.index("--") if "--" in words else len(words)
        read = [*map(_with_hyphens, words[:end]), *words[end:]]
        lists = [one for one in self._actions if isinstance(one, Several)]
        if not lists:
            return read
        return name_model(read, {name: one.fits for one in lists for name in one.option_strings})

    def _verbs(self) -> Mapping[str, KilnParser]:
        """Return the parsers of this one's verbs, by name; none if it has no verbs."""
        kinds = [one for one in self._actions if isinstance(one, argparse._SubParsersAction)]
        return kinds[0].choices if kinds else {}

    def _check_first(self, words: Sequence[str]) -> None:
        """End with an error if no verb comes first."""
        verbs = self._verbs()
        if not words:
            self.error(f"say what to do: one of {', '.join(verbs)}")
        name = words[0].partition("=")[0]
        if not name.startswith("-") or name in (*self._option_string_actions, "--"):
            return
        verb = next((word for word in words if word in verbs), None)
        if verb is None:
            self.error(f"{name[:80]}: a command comes first: one of {', '.join(verbs)}")
        self.error(f"{name[:80]}: write it behind the command: {self.prog} {verb} {name[:80]} …")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """End with an error for a verb that does not exist."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            inner = [
                f"{outer} {verb}" for outer, one in self._verbs().items() for verb in one._verbs()
            ]
            self.error(explain_verb(self.prog, str(value), action.choices, inner))
        super()._check_value(action, value)

    def _words(self) -> list[str]:
        """Return how the words that are no flags are written."""
        shown = []
        for action in self._actions:
            if not action.option_strings:
                name = str(action.metavar or action.dest.upper())
                shown.append(f"[{name}]" if action.nargs == "?" else name)
        return shown

    def _refuse(self, rest: Iterable[str]) -> NoReturn:
        """End with an error for the first word that no flag takes."""
        words = [word for word in rest if word != "--"] or ["--"]
        flags = [word for word in words if word.startswith("-")]
        if flags:
            name = flags[0].partition("=")[0][:80]
            self.error(explain(name, self._option_string_actions))
        name, equals, value = words[0].partition("=")
        flag = _with_hyphens(f"--{name}")
        if equals and flag in self._option_string_actions:
            self.error(f"{words[0][:80]!r}: write {flag}={value[:80]}")
        self.error(f"{words[0][:80]!r}: unexpected; {self.prog} takes no further word here")


class _Help(argparse.Action):
    """``--help``, or ``--help=TOPIC``; the words were read so that there is always a topic."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Print a page and end. The topics are those of vLLM's help."""
        assert isinstance(parser, KilnParser)
        manual = parser.manual()
        if not values:
            page = manual.short()
        elif values.lower() == "page" and sys.stdout.isatty():
            pydoc.pager(manual.whole())
            parser.exit()
        elif values.lower() in ("all", "page"):
            page = manual.whole()
        elif values.lower() == "listgroup":
            page = f"{manual.topics()}\n"
        else:
            page = manual.about(values)
        if not page:
            parser.error(
                f"--help={values[:80]}: no group, flag or word of the help; groups are "
                f"{manual.topics()}"
            )
        sys.stdout.write(page)
        parser.exit()


def explain(name: str, known: Mapping[str, object]) -> str:
    """Return why a flag is not accepted, and what to do."""
    reason = ABSENT.get(name.replace("--no-", "--"))  # which are not listed
    if reason is not None:
        return f"Kiln has no {name}: {reason}"
    whole, dot, key = name.partition(".")
    if dot and whole in known:
        return f"unknown flag {name}; write {whole} '{{\"{key}\": …}}'"
    near = get_close_matches(name, [flag for flag in known if flag.startswith("--")], 1)
    return f"unknown flag {name}" + (f"; did you mean {near[0]}?" if near else "")


def _with_hyphens(word: str) -> str:
    if word in ("-h", "--help"):
        return "--help="  # so that it never takes the next word as its topic
    if word == "--help-all":
        return "--help=all"
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    flag, dot, key = name.partition(".")
    return flag.replace("_", "-") + dot + key + equals + value
