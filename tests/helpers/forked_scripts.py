"""What ``gpu.ranks.run_processes`` does, by forks, which need no time to import torch.

The jobs of ``gpu.rank_checks`` take one dtype only: each has kernels of its own to build.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu import rank_checks
from rank_processes import Ranks

from kiln.jit_kernels.declare.settings import settings

DTYPES = (torch.float32,)


def run_forked(
    script: Path,
    arguments: Sequence[str],
    world: int,
    seconds: float,
    *,
    variables: Callable[[int], Mapping[str, str]] = lambda rank: {},
    may_fail: Collection[int] = (),
) -> list[Any]:
    """Run the ``main`` of a script of tools/gpu in each rank; return rank 0's rows.

    Raises RankFailed if any rank fails, also one of ``may_fail``. There is no time limit:
    ``seconds`` is ignored.
    """
    with tempfile.TemporaryDirectory() as folder, Ranks(world) as ranks:
        ranks.call(
            _main,
            [
                (script.stem, [*arguments, folder, str(rank)], dict(variables(rank)))
                for rank in range(world)
            ],
        )
        rows: list[Any] = json.loads((Path(folder) / "rank0.json").read_text())["rows"]
        return rows


def _main(
    rank: int, world: int, exchange: object, module: str, arguments: list[str], own: dict[str, str]
) -> None:
    rank_checks.DTYPES = DTYPES
    os.environ.update(own)
    settings.cache_clear()
    code = importlib.import_module(f"gpu.{module}").main(arguments)
    assert code == 0, code
