"""Write the cubin of a cache entry to a file, for nvdisasm and cuobjdump."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "write one kernel's cubin to a file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the key and the file."""
    parser.add_argument("key", help="a key or its prefix; see `kiln kernels list --json`")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="file to write; default: KEY.cubin"
    )


def run(args: argparse.Namespace) -> int:
    """Write the file. Raises KernelError unless exactly one entry matches the key."""
    from kiln.jit_kernels.compile.bundling import find_entry
    from kiln.jit_kernels.compile.open_cache import kernel_cache
    from kiln.jit_kernels.declare.errors import KernelError

    key, entry = find_entry(args.key, kernel_cache())
    path = args.output or Path(f"{key[:16]}.cubin")
    try:
        path.write_bytes(entry.payload)
    except OSError as error:
        raise KernelError(f"{path} cannot be written: {error.strerror}") from None
    header = entry.header
    print(f"{path}: {header.get('kernel')} {header.get('variant')} for {header.get('arch')}")
    return 0
