"""Print Kiln's version."""

from __future__ import annotations

import argparse

import kiln

HELP = "print Kiln's version"


def run(args: argparse.Namespace) -> int:
    """Print the version."""
    print(f"kiln {kiln.__version__}")
    return 0
