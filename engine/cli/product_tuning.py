"""``kiln warmup --tune``: measure the products of few rows, and show what was found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from kiln.engine.models.family import Family
    from kiln.engine.models.hf_config import HFConfig
    from kiln.engine.runner.tune_products import TunedProduct


def gpu_to_measure() -> torch.device:
    """Return this machine's first GPU. Raises ConfigError if there is none."""
    import torch

    from kiln.engine.errors import ConfigError

    if not torch.cuda.is_available():
        raise ConfigError(
            f"--tune measures on a GPU, and torch {torch.__version__} sees none: run it on the "
            "machine that will serve, or install a driver and a CUDA build of torch"
        )
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return device


def tune_products(
    model: tuple[Family, HFConfig],
    dtype: torch.dtype,
    device: torch.device,
    world: int,
    *,
    as_json: bool,
) -> None:
    """Measure the products of one of ``world`` ranks, keep the limits, and print them.

    Raises ConfigError and KernelError if the kernel cannot run, ConfigError if there is no folder.
    """
    from rich.console import Console

    from kiln.engine.bench.products import microseconds
    from kiln.engine.cli.progress import LoadingDisplay
    from kiln.engine.runner import tune_products as tuner

    with closing(LoadingDisplay(quiet=as_json)) as display:
        found = tuner.tune_products(model, dtype, device, world, microseconds, display)
    path = tuner.store(device, found)
    if as_json:
        print(json.dumps({"products": [one.fields() for one in found], "file": str(path)}))
        return
    Console().print(times_table(found))
    print(*map(summary, found), sep="\n")
    print(f"{path}: used by engines on this hardware from now on")


def summary(one: TunedProduct) -> str:
    """Return who multiplies."""
    name = _name(one)
    if not one.most_rows:
        return f"{name}: never skinny_gemm"
    return f"{name}: skinny_gemm up to {one.most_rows} rows"


def times_table(found: Sequence[TunedProduct]) -> Table:
    """Return the microseconds of each product and number of rows."""
    from rich import box
    from rich.table import Table

    title = "microseconds of a product by skinny_gemm and without it; * is what engines will use"
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    table.add_column("product", overflow="fold")
    for name in ("MB", "rows", "skinny_gemm", "without"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found:
        label, size = _name(one), f"{one.num_bytes / 1e6:.1f}"
        for times in one.times:
            by_kernel = times.rows <= one.most_rows
            table.add_row(
                label,
                size,
                str(times.rows),
                f"{'* ' if by_kernel else ''}{times.kernel_us:.1f}",
                f"{'' if by_kernel else '* '}{times.torch_us:.1f}",
            )
            label = size = ""
    return table


def _name(one: TunedProduct) -> str:
    product = one.product
    size = f"{product.outputs} x {one.inputs}"
    stored = "" if product.stored == product.dtype else f" of {product.stored}"
    return f"{', '.join(one.roles)} {size} {product.form}{stored} {product.dtype}"
