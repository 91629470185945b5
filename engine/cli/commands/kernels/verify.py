"""Verify every entry of the kernel cache and of the bundle, and report the corrupt ones.

--rebuild compiles every declared kernel in the cache again and compares the bytes. NVRTC output
is the same on every machine, so a difference is a wrong entry. Exit code 4 if one is found.
"""

from __future__ import annotations

import argparse
import json

from kiln.engine.cli import exit_codes
from kiln.engine.cli.targets import declared_jobs

HELP = "check every entry of the kernel cache; --rebuild compiles again and compares"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--rebuild", action="store_true", help="compile again and compare bytes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Verify; return 4 if an entry is wrong."""
    from kiln.jit_kernels.compile.audit import Flaw, audit, rebuild
    from kiln.jit_kernels.compile.open_cache import kernel_cache
    from kiln.jit_kernels.declare.settings import settings

    cache = kernel_cache()
    checked, flaws = audit(cache)
    rebuilt = 0
    different: list[Flaw] = []
    if args.rebuild:
        rebuilt, different = rebuild(declared_jobs("all"), cache, settings().jit_jobs)
    if args.json:
        report = {
            "entries": checked,
            "corrupt": [[flaw.where, flaw.reason] for flaw in flaws],
            "rebuilt": rebuilt,
            "different": [[flaw.where, flaw.reason] for flaw in different],
        }
        print(json.dumps(report))
    else:
        for flaw in (*flaws, *different):
            print(f"{flaw.where}: {flaw.reason}")
        again = f"; {rebuilt} built again, {len(different)} differ" if args.rebuild else ""
        print(f"{checked} entries, {len(flaws)} corrupt{again}")
    return exit_codes.CORRUPT if flaws or different else exit_codes.OK
