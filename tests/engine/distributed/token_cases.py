"""Engines of several ranks that sum by kernels: a program that prints tokens and counts as JSON.

Arguments: the folder of a model, and as JSON the prompts, the worlds and the algorithms.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import torch
from forked_ranks import ForkedChild, set_environment

from kiln import LLM, SamplingParams
from kiln.engine.distributed import followers
from kiln.engine.distributed.custom_all_reduce import CustomAllReduceV2
from kiln.engine.errors import DeviceError
from kiln.engine.runner import sums


class Forks:
    """In place of the module subprocess: a follower is a fork of this process."""

    DEVNULL = subprocess.DEVNULL
    TimeoutExpired = subprocess.TimeoutExpired
    Popen = ForkedChild


def engine(folder: str, world: int) -> LLM:
    return LLM(
        folder, device="cpu", dtype="float32", tensor_parallel_size=world, max_model_len=64,
        num_kv_blocks=64, max_num_seqs=4, cuda_graph_bs=[4], max_num_batched_tokens=16,
    )  # fmt: skip


def answers(folder: str, prompts: list[list[int]], world: int, algorithm: str) -> Any:
    graphs = "emulate" if world == 2 and algorithm in ("auto", "two_shot") else "off"
    set_environment(
        KILN_CPU_KERNELS="host", KILN_CPU_GRAPHS=graphs, KILN_ALL_REDUCE="jit",
        KILN_ALL_REDUCE_ALGORITHM=algorithm,
    )  # fmt: skip
    llm = engine(folder, world)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=5))
    stats = llm.core.stats()
    found = {
        "tokens": [list(one.outputs[0].token_ids) for one in outputs],
        "sums": dict(stats.all_reduces),
        "replays": sum(stats.graph_replays.values()),
        "kernels": llm.core.runner.loaded.kernels["all_reduce"],
    }
    graphs = llm.core.runner.executor.graphs
    llm.close()
    return found | {"graphs_left": 0 if graphs is None else len(graphs._captured)}


def skipped(folder: str, prompts: list[list[int]]) -> Any:
    """Rank 1 leaves out one sum while it serves: the engine says so, and gives no token."""
    set_environment(KILN_CPU_KERNELS="host", KILN_CPU_GRAPHS="off")
    kept, sums._SERVING_MS = sums._SERVING_MS, {"cpu": 700}
    summed = CustomAllReduceV2.fused_all_reduce_add_rms_norm
    calls = 0

    def sum_but_one(self: CustomAllReduceV2, *arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if self._group.rank == 0 or calls != 12:
            summed(self, *arguments)

    CustomAllReduceV2.fused_all_reduce_add_rms_norm = sum_but_one
    llm = engine(folder, 2)
    begun, error = time.monotonic(), ""
    try:
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=5))
    except DeviceError as raised:
        error = f"{type(raised).__name__}: {raised}"
    seconds = time.monotonic() - begun
    llm.close()
    sums._SERVING_MS = kept
    CustomAllReduceV2.fused_all_reduce_add_rms_norm = summed
    return {"error": error, "seconds": seconds, "closed": time.monotonic() - begun - seconds}


if __name__ == "__main__":
    torch.set_num_threads(1)
    followers.subprocess = Forks
    folder, (prompts, worlds, algorithms) = sys.argv[1], map(json.loads, sys.argv[2:])
    results = {
        f"{world} {algorithm}": answers(folder, prompts, world, algorithm)
        for world in worlds
        for algorithm in algorithms
    }
    results["skipped"] = skipped(folder, prompts)
    print(json.dumps(results))
