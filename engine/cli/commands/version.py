"""Print Kiln's version."""

from __future__ import annotations

import argparse

import kiln

NAME = "version"
HELP = "print Kiln's version"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take no arguments."""


def run(args: argparse.Namespace) -> int:
    """Print the version."""
    print(f"kiln {kiln.__version__}")
    return 0
