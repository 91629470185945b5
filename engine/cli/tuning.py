"""``kiln warmup --tune-comm``: measure the sums over ranks, and show what was found."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from kiln.engine.distributed.tuner import Tuned


def tune_sums(world: int | None, *, as_json: bool) -> None:
    """Measure on all devices, keep the plan, and print it.

    Raises ConfigError if the ranks cannot use Kiln's kernels, and DeviceError.
    """
    import torch
    from rich.console import Console

    from kiln.engine.errors import ConfigError
    from kiln.engine.runner.tune_ranks import tune_ranks

    if world is None or world < 2:
        raise ConfigError("--tune-comm needs --tp N, the number of ranks, with N of at least 2")
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    with Console(stderr=True, quiet=as_json).status(f"measuring the sums over {world} ranks …"):
        tuned, path = tune_ranks(world, "auto", dtype)
    if as_json:
        fields = tuned.plan.fields()
        print(json.dumps({"plan": fields, "rows": tuned.rows, "file": str(path)}))
        return
    Console().print(times_table(tuned))
    print(summary(tuned))
    print(f"{path}: used by engines with --tp {world} on this hardware from now on")


def summary(tuned: Tuned) -> str:
    """Return who sums which messages."""
    if not tuned.plan.max_bytes:
        return "torch sums messages of every size: it is faster at all of these"
    fused, most = _size(tuned.plan.fused_threshold), _size(tuned.plan.max_bytes)
    return (
        f"one kernel sums, adds and normalises messages of up to {fused}\n"
        f"torch sums messages of more than {most}"
    )


def times_table(tuned: Tuned) -> Table:
    """Return the microseconds of each message size, with the blocks that the plan takes."""
    from rich import box
    from rich.table import Table

    blocks = tuned.plan.max_blocks
    times: dict[int, dict[str, float]] = {}
    for row in tuned.rows:
        if row["blocks"] in (0, blocks) and row["algorithm"] not in ("fused", "apart"):
            times.setdefault(row["bytes"], {})[row["algorithm"]] = row["us"]
    names = list(dict.fromkeys(name for own in times.values() for name in own))
    names.sort(key=lambda name: name == "torch")
    title = f"microseconds of a sum, {blocks} thread blocks; * is what engines will use"
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for name in ("message", *names):
        table.add_column(name, justify="right", no_wrap=True)
    for num_bytes, own in sorted(times.items()):
        chosen = tuned.plan.algorithm_for(num_bytes) or "torch"
        table.add_row(_size(num_bytes), *(_cell(own, name, chosen) for name in names))
    return table


def _cell(own: dict[str, Any], name: str, chosen: str) -> str:
    if name not in own:
        return "-"
    return f"{'* ' if name == chosen else ''}{own[name]:.1f}"


def _size(num_bytes: int) -> str:
    for unit, one in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= one:
            return f"{num_bytes / one:g} {unit}"
    return f"{num_bytes} bytes"
