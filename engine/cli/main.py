"""The ``kiln`` command: find the subcommands, run one, and print an error as one line.

A subcommand is a module in ``commands/``; see ``add_commands`` for what it has. ``kiln --help``
imports all of them, so slow imports belong inside ``run``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import kiln
from kiln.cache.env import EnvError, read
from kiln.engine.cli import commands
from kiln.engine.cli.exit_codes import FAILED, INTERRUPTED, OK, WRONG_USE, code_of
from kiln.engine.cli.parser import KilnParser, add_commands
from kiln.engine.errors import KilnError, explain_import
from kiln.jit_kernels.declare.errors import KernelError
from kiln.jit_kernels.declare.families import families


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``kiln`` and return its exit code: see exit_codes."""
    debug = False
    try:
        read(families())
        parser = build_parser()
        words = list(sys.argv[1:] if argv is None else argv)
        if not words:
            parser.print_help()
            return OK
        if words[0] == "help":
            words = [*words[1:], "--help"]
        args = parser.parse_args(words)
        debug = args.debug
        return int(args.run(args))
    except EnvError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_USE
    except (KilnError, KernelError) as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return code_of(error)
    except ModuleNotFoundError as error:
        told = explain_import(error)
        if debug or told is None:
            raise
        print(f"error: {told}", file=sys.stderr)
        return FAILED
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # behind the terminal's ^C
        return INTERRUPTED


def build_parser() -> KilnParser:
    """Return the parser of the whole command."""
    parser = KilnParser(
        prog="kiln",
        description="Serve language models on kernels compiled at start-up.",
        epilog="kiln COMMAND --help shows the flags of a command.",
    )
    shown = f"kiln {kiln.__version__}"
    parser.add_argument("-v", "--version", action="version", version=shown, help="print it")
    parser.set_defaults(debug=False)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for own in add_commands(subparsers, commands):
        told = "show tracebacks of errors"
        own.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=told)
    return parser


if __name__ == "__main__":
    sys.exit(main())
