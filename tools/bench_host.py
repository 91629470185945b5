#!/usr/bin/env python3
"""Time what a decode step costs the host, beside an older commit in the same run.

    python tools/bench_host.py [--output benchmarks]

Each engine runs its scheduler, lays out a step's inputs and reads its tokens; the model is left
out. The rows of both engines take turns, in processes of their own. Writes host_work.{json,md}.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OLD = "59f16b9"  # the last commit that laid out every list anew in each step
ROWS, CONTEXTS = (1, 64, 256), (512, 8192)
ROUNDS, STEPS, WARM_UP = 5, 100, 20
LIMITS_MS = {64: 0.25, 256: 0.6}
VOCABULARY = 1000


def main() -> None:
    """Time every row of both engines in turn; write JSON and a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks")
    parser.add_argument("--child", nargs=3, metavar=("ENGINE", "ROWS", "CONTEXT"))
    args = parser.parse_args()
    if args.child:
        engine, rows, context = args.child
        print(json.dumps(_measure(engine, int(rows), int(context))))
        return
    sys.path.insert(0, str(ROOT / "tools" / "import_root"))
    from kiln.engine.bench.report import Report, command_line, table

    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.check_output(["git", "-C", str(ROOT), "archive", OLD])
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        rows = [_row(Path(folder), rows, context) for context in CONTEXTS for rows in ROWS]
    text = (
        f"The median of {STEPS} decode steps in each of {ROUNDS} processes, which alternate: their "
        f"median. Python's garbage collector is off. Before: commit {OLD}."
    )
    columns = {
        "rows": "{rows}", "context": "{context}", "ms a step": "{ms:.3f}",
        "before": "{old_ms:.3f}", "times faster": "{ratio:.1f}", "limit": "{limit_ms}",
    }  # fmt: skip
    report = Report("host_work", command_line("tools/bench_host.py"), rows)
    page = report.markdown("What a decode step costs the host", text, table(columns, rows))
    print(page)
    report.write(args.output, "host_work", page)


def _row(old: Path, rows: int, context: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {"new": [], "old": []}
    for _ in range(ROUNDS):
        for engine, root in (("new", ROOT), ("old", old)):
            command = [sys.executable, __file__, "--child", engine, str(rows), str(context)]
            env = {**os.environ, "PYTHONPATH": str(root / "tools" / "import_root")}
            times[engine].append(json.loads(subprocess.check_output(command, env=env, text=True)))
    new, before = (statistics.median(times[engine]) for engine in ("new", "old"))
    print(f"{rows} rows of {context}: {new:.3f} ms, before {before:.3f}", file=sys.stderr)
    return {
        "rows": rows,
        "context": context,
        "ms": new,
        "old_ms": before,
        "ratio": before / new,
        "limit_ms": LIMITS_MS.get(rows),
        "rounds_ms": times,
    }


def _measure(engine: str, rows: int, context: int) -> float:
    """Return the median milliseconds of a decode step of one engine."""
    core, request = (_new_core if engine == "new" else _old_core)(rows, context)
    for index in range(rows):
        core.add(request(f"r{index}", [index % VOCABULARY] * (context - 1)))
    while core.stats().waiting or core.stats().generated_tokens < 2 * rows:
        core.step()
    gc.disable()
    times = []
    for _ in range(WARM_UP + STEPS):
        begun = time.perf_counter()
        core.step()
        times.append(1000 * (time.perf_counter() - begun))
    return statistics.median(times[WARM_UP:])


def _sizes(rows: int, context: int) -> tuple[int, int]:
    """Return the longest request in tokens, and the KV blocks for all."""
    longest = context + 2 * (WARM_UP + STEPS) + rows
    return longest, rows * (longest // 16 + 1)


def _new_core(rows: int, context: int) -> Any:
    import numpy as np
    import torch

    from kiln.engine.config import EngineConfig, KVConfig, ModelConfig, SchedulerConfig
    from kiln.engine.core import EngineCore
    from kiln.engine.graphs.counts import GraphCounts
    from kiln.engine.requests.batch import StepOutput
    from kiln.engine.requests.request import NewRequest
    from kiln.engine.requests.sampling_params import SamplingParams
    from kiln.engine.runner.rows import Rows, message_room
    from kiln.engine.runner.sampler import PendingSamples
    from kiln.jit_kernels.ops.sampling.functions import Samples

    longest, blocks = _sizes(rows, context)
    budget = 8192

    class Runner:
        device_type, max_model_len, num_blocks = "cuda", longest, blocks
        vocab_size, adapter_store, limits, host_blocks = VOCABULARY, None, None, None
        embedder, long_start, image_token_ids = None, 0, frozenset[int]()

        def __init__(self) -> None:
            self._rows = Rows(rows)
            room = message_room(rows, budget, blocks)
            self._messages = [np.zeros(room, np.int32) for _ in range(2)]
            self._turn = 0

        def graph_counts(self) -> Any:
            return GraphCounts()

        def all_reduces(self) -> dict[str, int]:
            return {}

        def launch(self, batch: Any) -> Any:
            message, self._turn = self._messages[self._turn], 1 - self._turn
            self._rows.write(batch, message)
            sampling = batch.requests
            if not all(batch.columns.num_samples):
                sampling = [request for request in sampling if request.num_samples]
            count = len(sampling)
            storage = torch.zeros(Samples.size_of(max(count, 1), 0), dtype=torch.int32)
            return sampling, PendingSamples(Samples(storage, max(count, 1)), None)

        def collect(self, launched: Any) -> Any:
            sampling, pending = launched
            return StepOutput(pending.wait(sampling) if sampling else ())

    limits = SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=budget)
    config = EngineConfig(ModelConfig("none"), KVConfig(block_size=16), limits)
    params = SamplingParams(temperature=0, max_tokens=longest - context, ignore_eos=True)
    core = EngineCore(config, runner=Runner(), eos=frozenset())
    return core, lambda name, prompt: NewRequest(name, prompt, params)


def _old_core(rows: int, context: int) -> Any:
    import torch

    from kiln.engine.batch import StepOutput
    from kiln.engine.config import EngineConfig, KVConfig, ModelConfig, SchedulerConfig
    from kiln.engine.core import EngineCore
    from kiln.engine.request import NewRequest
    from kiln.engine.runner import sampler
    from kiln.engine.runner.inputs import make_inputs
    from kiln.engine.sampling_params import SamplingParams

    longest, blocks = _sizes(rows, context)

    def sample_tokens(logits: Any, *_: Any, **__: Any) -> Any:
        zeros = torch.zeros(len(logits), dtype=torch.int64)
        host = SimpleNamespace(tokens=zeros, errors=zeros)
        return SimpleNamespace(on_host=lambda: host)

    sampler.sample_tokens = sample_tokens

    class Runner:
        max_model_len, num_blocks, vocab_size = longest, blocks, VOCABULARY

        def run(self, batch: Any) -> Any:
            make_inputs(batch, 16, torch.device("cpu"))
            sampling = [request for request in batch.requests if request.samples]
            logits = torch.zeros(len(sampling), 1)
            return StepOutput(sampler.sample(logits, sampling) if sampling else ())

    limits = SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=8192)
    config = EngineConfig(ModelConfig("none"), KVConfig(block_size=16), limits)
    params = SamplingParams(temperature=0, max_tokens=longest - context, ignore_eos=True)
    core = EngineCore(config, runner=Runner(), eos=frozenset())
    return core, lambda name, prompt: NewRequest(name, prompt, params)


if __name__ == "__main__":
    main()
