#!/usr/bin/env python3
"""Report which kernels' machine code a change affects. Needs no GPU.

    python tools/same_code.py HEAD                                  # against the last commit
    python tools/same_code.py v0.1.0 --kernels rms_norm --archs sm_90a

Measurements remain valid for programs with unchanged code. Builds the programs of both checkouts,
each with its own sources, and prints those that differ: instructions, registers, spills. Exits
with 1 if any does.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools" / "import_root"))

from rich.console import Console  # noqa: E402
from rich.markup import escape  # noqa: E402
from rich.table import Table  # noqa: E402

from kiln.jit_kernels.declare.arch import ALL_ARCHS  # noqa: E402
from kiln.jit_kernels.registry import all_specs  # noqa: E402
from kiln.jit_kernels.toolchains.cubin import code_of, resources_of  # noqa: E402

Cubins = dict[str, bytes]  # program -> cubin
# Each checkout runs its own _BUILD, because its modules may have other names.
_RUN = "import runpy, sys; exec(runpy.run_path(sys.argv.pop(1))['_BUILD'])"
_BUILD = """
import sys
from pathlib import Path
from kiln.cache.disk.store import Store
from kiln.jit_kernels.compile.build import build
from kiln.jit_kernels.compile.kernel_cache import KernelCache
from kiln.jit_kernels.compile.warmup import jobs_for
from kiln.jit_kernels.registry import all_specs

folder, archs, kernels = Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:]
specs = [spec for name, spec in all_specs().items() if name in kernels or not kernels]
cache = KernelCache(Store(None, mode="off"))
for job in jobs_for(specs, archs):
    built = build(job.spec, job.variant, job.arch, cache)
    (folder / job.name).write_bytes(built.cubin)
"""


def main() -> int:
    """Build, compare and print; return 1 if any code differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision", help="git revision to compare with")
    parser.add_argument("--kernels", nargs="+", default=[], metavar="NAME", help="default: all")
    parser.add_argument("--archs", nargs="+", default=list(ALL_ARCHS), metavar="ARCH")
    args = parser.parse_args()
    if unknown := sorted({*args.kernels} - {*all_specs()} | {*args.archs} - {*ALL_ARCHS}):
        parser.error(f"no kernel or target is named {', '.join(unknown)}: see kiln kernels list")
    with tempfile.TemporaryDirectory(prefix="kiln-same-code-") as folder:
        old = Path(folder)
        command = ["git", "archive", "--format=tar", args.revision]
        done = subprocess.run(command, cwd=ROOT, capture_output=True)
        if done.returncode:
            parser.error(f"git has no revision {args.revision!r}: {done.stderr.decode().strip()}")
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(old, filter="data")
        rows = compare(old, ROOT, args.kernels, args.archs)
    table = Table("program", "instructions", "registers", "spills", title=args.revision)
    for row in rows:
        if row[1]:
            table.add_row(escape(row[0]), *row[1:])
    differ = table.row_count
    if differ:
        Console().print(table)
    print(f"{len(rows) - differ} of {len(rows)} programs have the same code")
    return int(differ > 0)


def compare(
    old: Path, new: Path, kernels: Sequence[str], archs: Sequence[str]
) -> list[tuple[str, ...]]:
    """Return a row for each program of either checkout: its name, and the difference or ""."""
    with ThreadPoolExecutor() as pool:
        before, after = pool.map(lambda tree: cubins_of(tree, kernels, archs), (old, new))
    return [
        (name, *_difference(before.get(name), after.get(name)))
        for name in [*before, *(name for name in after if name not in before)]
    ]


def _difference(old: bytes | None, new: bytes | None) -> tuple[str, str, str]:
    if old is None or new is None:
        return ("not there before" if old is None else "not there now", "", "")
    if code_of(old) == code_of(new):
        return ("", "", "")
    counts = [[len(code) // 16 for code in code_of(one).values()] for one in (old, new)]
    (was,), (now,) = (resources_of(one).values() for one in (old, new))
    return (
        f"{counts[0][0]} → {counts[1][0]}",
        f"{was.registers} → {now.registers}",
        f"{was.spills} → {now.spills}",
    )


def cubins_of(tree: Path, kernels: Sequence[str], archs: Sequence[str]) -> Cubins:
    """Build the programs of a checkout in a new process, by the checkout's own ``_BUILD``.

    Raises CalledProcessError if that fails, or if the checkout does not have this tool yet.
    """
    with tempfile.TemporaryDirectory(prefix="kiln-cubins-") as folder:
        environ = {**os.environ, "PYTHONPATH": str(tree / "tools" / "import_root")}
        tool = str(tree / "tools" / "same_code.py")
        command = [sys.executable, "-c", _RUN, tool, folder, ",".join(archs), *kernels]
        subprocess.run(command, cwd=folder, env=environ, check=True)
        files = sorted(Path(folder).iterdir())
        return {path.name: path.read_bytes() for path in files}


if __name__ == "__main__":
    sys.exit(main())
