"""Write the declared kernels in the cache to one sealed bundle, for other machines."""

from __future__ import annotations

import argparse
from pathlib import Path

from kiln.engine.cli.targets import add_arch_argument, declared_jobs

HELP = "write the kernels of the cache to a sealed bundle"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the file and the targets."""
    parser.add_argument("file", type=Path, metavar="FILE", help="the bundle to write")
    add_arch_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Write the bundle; print its SHA-256. Raises KernelError if there is nothing to write."""
    from kiln.jit_kernels.compile.bundling import export_bundle
    from kiln.jit_kernels.compile.open_cache import kernel_cache
    from kiln.jit_kernels.declare.errors import KernelError

    done = export_bundle(args.file, declared_jobs(args.arch), kernel_cache())
    if not done.written:
        raise KernelError("the cache holds none of these kernels: run kiln warmup first")
    print(f"{args.file}: {done.written} kernels, sha256 {done.sha256}")
    if done.missing:
        print(f"not in the cache, so not in the bundle: {', '.join(done.missing)}")
    return 0
