"""Remove entries that are unused for too long, then the least recently used until the rest fits.

Kernels and compiled pieces of models each have the whole size to themselves.
"""

from __future__ import annotations

import argparse

HELP = "remove entries unused for long, and keep the kernel cache below a size"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the limits."""
    parser.add_argument(
        "--max-mb",
        type=float,
        metavar="MB",
        help="size of the rest; default: KILN_KERNEL_CACHE_MAX_MB",
    )
    parser.add_argument(
        "--max-days",
        type=float,
        metavar="DAYS",
        help="days without use; default: KILN_KERNEL_CACHE_MAX_DAYS",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be removed")


def run(args: argparse.Namespace) -> int:
    """Prune, and print what was removed."""
    from kiln.cache.disk.prune import prune_all
    from kiln.jit_kernels.declare.errors import KernelError
    from kiln.jit_kernels.declare.settings import settings

    env = settings()
    megabytes = env.kernel_cache_max_mb if args.max_mb is None else args.max_mb
    days = env.kernel_cache_max_days if args.max_days is None else args.max_days
    if not megabytes >= 0 or not days >= 0:
        raise KernelError(f"--max-mb {megabytes} --max-days {days}: want 0 or more")
    done = prune_all(env, megabytes, days, dry_run=args.dry_run)
    removed = [one for part in done for one in part.removed]
    if args.dry_run:
        for one in removed:
            print(one.path)
    print(
        f"{'would remove' if args.dry_run else 'removed'} {len(removed)} entries "
        f"({sum(part.removed_bytes for part in done) / 1e6:.1f} MB) and "
        f"{sum(part.leftovers for part in done)} leftovers; {sum(part.kept for part in done)} stay "
        f"({sum(part.kept_bytes for part in done) / 1e6:.1f} MB)"
    )
    return 0
