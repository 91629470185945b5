"""``kiln kernels``: list the kernels, see which implementation runs and why, check one."""

from __future__ import annotations

import argparse

NAME = "kernels"
HELP = "list kernels and what runs them, or check one on the CPU"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verbs and their flags."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    verbs.add_parser("list", help="every kernel: variants, template, source of the algorithm")
    verbs.add_parser("choices", help="which implementation runs for each family, and why")
    check = verbs.add_parser(
        "check", help="run a kernel's own source on the CPU under the race and bounds checker"
    )
    check.add_argument("spec", help="a kernel's name, or all")
    check.add_argument("--seeds", type=int, default=3, help="interleavings to try (default 3)")


def run(args: argparse.Namespace) -> int:
    """Run the verb; return 0, or 1 when a check found something."""
    if args.verb == "list":
        return _list()
    if args.verb == "choices":
        return _choices()
    return _check(args.spec, args.seeds)


def _list() -> int:
    from rich.console import Console
    from rich.table import Table

    from kiln.jit_kernels.registry import all_specs

    table = Table(title="templates stand in kernel_sources/", title_justify="left")
    table.add_column("kernel", no_wrap=True)
    table.add_column("variants", justify="right")
    table.add_column("template", no_wrap=True)
    table.add_column("source")
    for spec in all_specs().values():
        count = str(len(list(spec.variants())))
        table.add_row(spec.name, count, spec.source, spec.paper.removeprefix("https://"))
    Console().print(table)
    return 0


def _choices() -> int:
    import torch
    from rich.console import Console
    from rich.table import Table

    from kiln.jit_kernels.choose import prepare
    from kiln.jit_kernels.settings import settings

    table = Table("family", "toggle", "runs", "because")
    for choice in prepare():
        toggle = settings().kernel_choice(choice.family)
        table.add_row(choice.family, toggle, choice.implementation, choice.reason)
    console = Console()
    console.print(table)
    if not torch.cuda.is_available():
        mode = settings().cpu_kernels
        console.print(f"No GPU here: on the CPU, KILN_CPU_KERNELS={mode} decides.")
    return 0


def _check(name: str, seeds: int) -> int:
    from rich.console import Console

    from kiln.jit_kernels.check import check_kernel
    from kiln.jit_kernels.errors import KernelError
    from kiln.jit_kernels.registry import all_specs
    from kiln.jit_kernels.settings import settings

    specs = all_specs()
    if name != "all" and name not in specs:
        raise KernelError(f"no kernel is named {name!r}; there are {', '.join(sorted(specs))}")
    if seeds < 1:
        raise KernelError(f"--seeds {seeds}: want 1 or more")
    console = Console()
    found = 0
    for spec in specs.values() if name == "all" else [specs[name]]:
        with console.status(f"checking {spec.name}"):
            findings = check_kernel(spec, seeds=seeds, env=settings())
        found += len(findings)
        cases = len(list(spec.variants())) * len(spec.sizes) * seeds
        console.print(f"{spec.name}: {cases} runs, {len(findings)} findings")
        for finding in findings:
            console.print(f"  {finding}", markup=False, highlight=False)
    return 1 if found else 0
