"""Compile kernels with a progress bar, and print the outcome."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from kiln.jit_kernels.compile.kernel_cache import KernelCache
from kiln.jit_kernels.compile.warmup import Job, Outcome, warm_up
from kiln.jit_kernels.declare.errors import KernelError
from kiln.jit_kernels.declare.settings import settings


def build_with_progress(
    jobs: Sequence[Job], cache: KernelCache, num_threads: int | None, *, quiet: bool
) -> tuple[list[Outcome], float]:
    """Compile with a bar on stderr; return the outcomes and the seconds. Raises like warm_up."""
    columns = (
        TextColumn("compiling"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True, quiet=quiet)) as progress:
        task = progress.add_task("", total=len(jobs))
        return warm_up(
            jobs,
            cache,
            num_threads or settings().jit_jobs,
            lambda outcome: progress.update(task, advance=1, description=outcome.job.name),
        )


def summarise(
    outcomes: Sequence[Outcome],
    seconds: float,
    errors: Sequence[KernelError],
    cache: KernelCache,
    *,
    more: Mapping[str, Any],
    as_json: bool,
) -> None:
    """Print the errors on stderr, and the counts as lines or one JSON object.

    ``more``: what was built besides, such as the pieces of a model.
    """
    for error in dict.fromkeys(map(str, errors)):
        print(f"error: {error}", file=sys.stderr)
    hit = sum(one.built is not None and one.built.hit for one in outcomes)
    built = len(outcomes) - hit - len(errors)
    if as_json:
        report = {"kernels": len(outcomes), "built": built, "hit": hit, "failed": len(errors)}
        print(json.dumps({**report, "seconds": round(seconds, 3), **more}))
        return
    where = str(cache.store.root) if cache.store.root else "memory only (no usable home)"
    if cache.bundle is not None and cache.reads:
        where = f"bundle {cache.bundle.path}, {where}"
    mode = "" if cache.store.mode == "rw" else f" (KILN_KERNEL_CACHE={cache.store.mode})"
    print(
        f"{len(outcomes)} kernels: {hit} hit, {built} built, {len(errors)} failed in "
        f"{seconds:.2f} s, in {where}{mode}"
    )
    if more:
        print(
            "{pieces} pieces by {piece_compiler} for {piece_device}: "
            "{piece_artefacts_built} artefacts built in {piece_seconds:.2f} s".format(**more)
        )
