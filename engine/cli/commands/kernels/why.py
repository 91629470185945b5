"""Print where a kernel is loaded from, or which part of its key causes the cache miss."""

from __future__ import annotations

import argparse

from kiln.engine.cli.targets import add_arch_argument, specs_named, wanted_archs

HELP = "where a kernel is loaded from, or how its key differs from the nearest cache entry"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the kernel and the targets."""
    parser.add_argument("spec", help="a kernel's name, or all")
    add_arch_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Print a line for each variant and target."""
    from kiln.jit_kernels.compile.build import explain
    from kiln.jit_kernels.compile.open_cache import kernel_cache
    from kiln.jit_kernels.compile.warmup import jobs_for

    cache = kernel_cache()
    for job in jobs_for(specs_named(args.spec), wanted_archs(args.arch)):
        print(f"{job.name}: {explain(job.spec, job.variant, job.arch, cache)}")
    return 0
