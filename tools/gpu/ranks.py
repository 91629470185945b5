"""Processes of a group, each on a GPU of its own, or all on one: they run one job together.

``run_job`` starts them. Each runs this file, connects, does the job, and writes its rows.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_PATHS = [str(ROOT / "tools" / "import_root"), str(ROOT / "tools")]
sys.path[:0] = [path for path in _PATHS if path not in sys.path]

import torch  # noqa: E402 - after the path, as all below

from gpu.pace import Row  # noqa: E402
from kiln.engine.distributed.all_reduce_plan import Plan  # noqa: E402
from kiln.engine.distributed.connect import LOOPBACK, connect, file_store  # noqa: E402
from kiln.engine.distributed.custom_all_reduce import CustomAllReduceV2  # noqa: E402
from kiln.engine.distributed.group import Group  # noqa: E402

# No peer may use multicast, so that all measure the same links.
_VARIABLES = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
ONE_GPU, CPU = "one GPU", "cpu"
_LATE = 5.0  # seconds for the others, after one has failed


@dataclass(frozen=True)
class Ranks:
    """A group, where its messages are, and whether the job should be short.

    With a GPU for each rank the group uses NCCL. Else it exchanges through gloo, on the CPU.
    """

    group: Group
    device: torch.device
    quick: bool
    folder: Path

    def kernels(
        self, *dtypes: torch.dtype, plan: Plan | None = None, watchdog_ms: int = 20_000
    ) -> CustomAllReduceV2:
        """Return sums by kernels. Raises RuntimeError if they cannot be used."""
        made = CustomAllReduceV2(
            self.group, self.device, dtypes=dtypes, plan=plan, watchdog_ms=watchdog_ms
        )
        if made.disabled:
            raise RuntimeError(f"the kernels cannot be used: {made.disabled_reason}")
        return made

    def meet(self) -> None:
        """Wait for all ranks, and for what they have queued."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.group.minimum([0])


def run_job(job: str, world: int, where: str, *, quick: bool, seconds: float) -> list[Row]:
    """Return rank 0's rows of a job "module:function", or a failed row that tells who failed how.

    ``where``: ONE_GPU, CPU, or "" for a GPU for each rank. ``seconds``: the time limit.
    """
    arguments = [job, str(world), where, str(int(quick))]
    return run_processes(Path(__file__), arguments, world, seconds)


def run_processes(
    script: Path,
    arguments: Sequence[str],
    world: int,
    seconds: float,
    *,
    variables: Callable[[int], Mapping[str, str]] = lambda rank: {},
    may_fail: Collection[int] = (),
) -> list[Row]:
    """Run a script once for each rank; return rank 0's rows, and one if a rank has failed.

    The script's further arguments are a folder of its own and its rank. It writes
    {"rows": [...]} or {"error": "..."} to rankN.json in the folder. ``variables`` returns those of
    a rank's environment. ``seconds``: the time limit. ``may_fail``: ranks whose exit codes do not
    count.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = [folder / f"rank{rank}.json" for rank in range(world)]
        own = {**os.environ, "PYTHONPATH": os.pathsep.join(_PATHS), **_VARIABLES}
        command = [sys.executable, str(script), *arguments, str(folder)]
        children = [
            subprocess.Popen([*command, str(rank)], env={**own, **variables(rank)})
            for rank in range(world)
        ]
        try:
            codes = _wait(children, seconds, may_fail)
        finally:
            for child in children:
                child.kill()
                child.wait()
        told = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    wrong = [
        f"rank {rank}: {one.get('error') or _ended(code, seconds)}"
        for rank, (code, one) in enumerate(zip(codes, told, strict=True))
        if code != 0 and rank not in may_fail
    ]
    rows: list[Row] = told[0].get("rows", [])
    failed = [{"ranks": world, "status": "; ".join(wrong), "ok": False}] if wrong else []
    return [*rows, *failed]


def _wait(
    children: Sequence[subprocess.Popen[bytes]], seconds: float, may_fail: Collection[int]
) -> list[int | None]:
    """Wait until all but those that may fail have ended, or some time after the first failure."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        codes = [child.poll() for rank, child in enumerate(children) if rank not in may_fail]
        if None not in codes:
            break
        if any(codes):
            until = min(until, time.monotonic() + _LATE)
        time.sleep(0.05)
    return [child.poll() for child in children]


def _ended(code: int | None, seconds: float) -> str:
    return f"not done, of {seconds:.0f} s" if code is None else f"its process ended with {code}"


def main(arguments: list[str]) -> int:
    """Do a job as one rank."""
    job, world, where, quick, folder, rank = arguments
    written = Path(folder) / f"rank{rank}.json"
    try:
        rows = _do(job, int(rank), int(world), where, quick == "1", Path(folder))
    except Exception as error:
        traceback.print_exc()
        written.write_text(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        sys.stderr.flush()
        os._exit(1)  # others may wait for this rank in calls that nothing ends
    written.write_text(json.dumps({"rows": rows}))
    return 0


def _do(job: str, rank: int, world: int, where: str, quick: bool, folder: Path) -> list[Row]:
    torch.set_num_threads(1)
    module, _, name = job.partition(":")
    cpu = torch.device("cpu")
    device = cpu if where == CPU else torch.device("cuda", 0 if where == ONE_GPU else rank)
    meets_on = cpu if where else device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        group = connect(file_store(folder, world), rank, world, meets_on, LOOPBACK)
        function: Any = getattr(importlib.import_module(module), name)
        rows: list[Row] = function(Ranks(group, device, quick, folder))
        group.close()
    return rows


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
