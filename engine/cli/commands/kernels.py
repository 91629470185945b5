"""Show the kernels, their implementations and why each was chosen; maintain the kernel cache.

Exit codes: 0 success, 3 a kernel is not in a sealed cache, 4 corrupt entries, 5 a compile failed.
"""

from __future__ import annotations

import argparse

from kiln.engine.cli import kernel_verbs
from kiln.engine.cli.parser import add_commands

HELP = "list, check, verify, ship the kernels; see which implementation runs and why"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verbs: the modules in kernel_verbs/, structured like the commands."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    add_commands(verbs, kernel_verbs)
