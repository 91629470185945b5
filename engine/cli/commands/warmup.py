"""``kiln warmup``: build every kernel ahead of serving, for any GPU, on any machine."""

from __future__ import annotations

import argparse
import json

NAME = "warmup"
HELP = "compile every kernel into the kernel cache; needs no GPU"
EXIT_COMPILE_FAILED = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "--arch",
        help="targets, comma-separated, such as sm_80,sm_90a; or all. Default: KILN_KERNEL_ARCH, "
        "else this machine's GPU, else all",
    )
    parser.add_argument("--jobs", type=int, default=0, help="compilers at once (default: cores)")
    parser.add_argument("--dry-run", action="store_true", help="list the programs, build nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object, no progress")


def run(args: argparse.Namespace) -> int:
    """Build; return 0, or 5 when a kernel did not compile."""
    from kiln.jit_kernels.compile.warmup import jobs_for
    from kiln.jit_kernels.registry import all_specs

    jobs = jobs_for(all_specs().values(), _archs(args.arch))
    if args.dry_run:
        names = [job.name for job in jobs]
        print(
            json.dumps({"kernels": len(names), "names": names}) if args.json else "\n".join(names)
        )
        return 0
    return _build(jobs, args)


def _archs(text: str | None) -> list[str]:
    import torch

    from kiln.jit_kernels.arch import ALL_ARCHS, device_arch
    from kiln.jit_kernels.settings import settings

    text = text or settings().kernel_arch
    if text is None and torch.cuda.is_available():
        count = torch.cuda.device_count()
        return sorted({device_arch(torch.device("cuda", index)) for index in range(count)})
    if text is None or text == "all":
        return list(ALL_ARCHS)
    return [arch.strip() for arch in text.split(",")]


def _build(jobs: list, args: argparse.Namespace) -> int:  # type: ignore[type-arg]
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from kiln.cache.root import cache_root
    from kiln.cache.store import Store
    from kiln.jit_kernels.compile.warmup import warm_up
    from kiln.jit_kernels.settings import settings

    root = cache_root(settings())
    console = Console(stderr=True, quiet=args.json)
    columns = (
        TextColumn("compiling"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(jobs))
        outcomes, seconds = warm_up(
            jobs,
            Store(root),
            args.jobs or settings().jit_jobs,
            lambda outcome: progress.update(task, advance=1, description=outcome.job.name),
        )
    hit = sum(o.built is not None and o.built.hit for o in outcomes)
    failed = [o for o in outcomes if o.built is None]
    report = {
        "kernels": len(outcomes),
        "built": len(outcomes) - hit - len(failed),
        "hit": hit,
        "failed": len(failed),
        "seconds": round(seconds, 3),
    }
    for outcome in failed:
        console.print(f"error: {outcome.error}", markup=False, highlight=False)
    if args.json:
        print(json.dumps(report))
    else:
        print(
            f"{report['kernels']} kernels: {hit} hit, {report['built']} built, "
            f"{len(failed)} failed in {seconds:.2f} s, in {root or 'memory only (no usable home)'}"
        )
    return EXIT_COMPILE_FAILED if failed else 0
