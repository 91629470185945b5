"""Copy the kernels of a bundle to the user's cache and verify each."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "copy the kernels of a bundle to the kernel cache"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the file and its digest."""
    parser.add_argument("file", type=Path, metavar="FILE", help="the bundle")
    parser.add_argument("--sha256", metavar="HEX", help="require this digest of the bundle")


def run(args: argparse.Namespace) -> int:
    """Import. Raises BundleRefused, and KernelError if the cache cannot be written."""
    from kiln.jit_kernels.compile.bundling import import_bundle
    from kiln.jit_kernels.compile.open_cache import kernel_cache
    from kiln.jit_kernels.declare.errors import KernelError
    from kiln.jit_kernels.declare.settings import settings

    cache = kernel_cache()
    kept, refused = import_bundle(args.file, args.sha256, cache, settings())
    if refused:
        raise KernelError(
            f"{refused} of {kept + refused} kernels cannot be kept in {cache.store.root} "
            f"(KILN_KERNEL_CACHE={cache.store.mode}): see the warning above"
        )
    print(f"{kept} kernels of {args.file} are in {cache.store.root}")
    return 0
