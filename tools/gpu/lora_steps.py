"""What LoRA adapters cost steps of a large model's shapes, with CUDA graphs.

Decode steps without adapters, on a server that has some, and with one or several in a step; the
same while another adapter is loaded; and a long prompt.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu.pace import Pace, Row
from kiln.engine.bench.device_time import device_work
from kiln.engine.bench.lora_adapters import RandomAdapter
from kiln.engine.bench.shapes import SHAPES
from kiln.engine.config import (
    EngineConfig,
    GraphConfig,
    KVConfig,
    LoRAConfig,
    LoRAModule,
    ModelConfig,
    SchedulerConfig,
)
from kiln.engine.core import EngineCore
from kiln.engine.requests.adapter_job import LoadAdapter, UnloadAdapter
from kiln.engine.requests.request import NewRequest
from kiln.engine.requests.sampling_params import SamplingParams
from kiln.jit_kernels.bench.ceilings import measure_ceilings

_ADAPTERS, _MANY, _RANK = 8, 64, 16
_FOLDER = "adapter"
_PROMPT, _LONG_PROMPT = 128, 4096  # tokens
_STEPS = 96
_LOADS = 3
_LONG_RUN = 1600  # tokens of the requests that decode meanwhile
_ITEMSIZE = 2


@dataclass(frozen=True, slots=True)
class Setup:
    """A model's shape and folder, and where its adapters are."""

    shape: dict[str, Any]
    folder: Path
    adapters: Path
    device: str
    steps: int = _STEPS
    long_prompt: int = _LONG_PROMPT
    long_run: int = _LONG_RUN

    def engine(self, num_adapters: int) -> EngineCore:
        """Return an engine with random weights, and room for 64 requests."""
        blocks = (64 * (_PROMPT + self.long_run + 16) + self.long_prompt) // 16 + 64
        modules = (
            LoRAModule(f"a{index}", str(self.adapters / _FOLDER)) for index in range(num_adapters)
        )
        lora = LoRAConfig(tuple(modules), max_lora_rank=_RANK, root=str(self.adapters))
        return EngineCore(
            EngineConfig(
                ModelConfig(
                    str(self.folder),
                    dtype="bfloat16",
                    device=self.device,
                    load_format="dummy",
                    max_model_len=self.long_prompt,
                ),
                KVConfig(num_blocks=blocks, enable_prefix_caching=False),
                SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=self.long_prompt),
                GraphConfig(bs=(1, 64)),
                lora if num_adapters else LoRAConfig(),
            )
        )


def lora_steps(args: argparse.Namespace) -> list[Row]:
    """Return a row per kind of step."""
    shape = SHAPES["llama3-8b"]
    with tempfile.TemporaryDirectory() as parent:
        setup = prepare(shape, Path(parent), "cuda", steps=_STEPS // 3 if args.quick else _STEPS)
        bytes_s = measure_ceilings("cuda").copy_bytes_s
        return Pace(args, seconds=90).rows(["llama3-8b"], str, lambda _: rows_of(setup, bytes_s))


def prepare(shape: dict[str, Any], parent: Path, device: str, **numbers: int) -> Setup:
    """Write the model's config and an adapter."""
    setup = Setup(shape, parent / "model", parent / "adapters", device, **numbers)
    setup.folder.mkdir()
    (setup.folder / "config.json").write_text(json.dumps(shape))
    RandomAdapter.of_model(setup.folder, _RANK, torch.bfloat16).save(setup.adapters / _FOLDER)
    return setup


def rows_of(setup: Setup, copy_bytes_s: float) -> Iterator[Row]:
    """Yield the rows: the engine without adapters first, which all others are compared with."""
    plain = setup.engine(0)
    without = {rows: _decode(plain, setup, rows, 0) for rows in (1, 64)}
    prompt = _long_prompt(plain, setup, None)
    del plain
    gc.collect()
    core = setup.engine(_ADAPTERS)
    for rows, used in ((1, 0), (1, 1), (64, 0), (64, 1), (64, _ADAPTERS)):
        yield _decode_row(core, setup, rows, used, without[rows], copy_bytes_s)
    grown = _long_prompt(core, setup, "a0") - prompt
    floor = 1000 * _prompt_bytes(setup) / copy_bytes_s
    yield {"step": f"prompt of {setup.long_prompt} tokens", "adapters": 1, "ms": prompt + grown,
           "growth": grown / prompt, "floor_ms": floor, "over_floor": grown / floor}  # fmt: skip
    yield _while_loading(core, setup)
    del core
    gc.collect()
    yield _decode_row(setup.engine(_MANY), setup, 64, _MANY, without[64], copy_bytes_s)


def _decode_row(
    core: EngineCore, setup: Setup, rows: int, used: int, base: dict[str, Any], bytes_s: float
) -> Row:
    """Return a row for decode steps with some adapters; ``base``: of a server without any."""
    own = _decode(core, setup, rows, used)
    adapter = RandomAdapter.of_model(setup.folder, _RANK, torch.bfloat16)
    return {
        "step": "decode", "rows": rows, "adapters": used, **own,
        "growth": own["ms"] / base["ms"] - 1,
        "floor_ms": 1000 * used * adapter.num_bytes / bytes_s,
        "us_a_site": 1000 * (own["ms"] - base["ms"]) / (4 * setup.shape["num_hidden_layers"]),
        **({"ok": own["launches"] == base["launches"]} if used == 0 else {}),
    }  # fmt: skip


def _start(core: EngineCore, rows: int, used: int, steps: int, first: int = 0) -> list[str]:
    """Add requests that use some adapters in turn, and run them to their first tokens."""
    params = SamplingParams(temperature=0, max_tokens=steps + 16, ignore_eos=True)
    names = [f"r{row}" for row in range(rows)]
    for row, name in enumerate(names):
        adapter = f"a{first + row % used}" if used else None
        core.add(NewRequest(name, [3 + row] * _PROMPT, params, adapter))
    for _ in range(rows * _PROMPT // core.config.scheduler.budget + 8):
        core.step()
    return names


def _finish(core: EngineCore, names: list[str]) -> None:
    for name in names:
        core.abort(name)
    while core.has_work:
        core.step()


def _timed_step(core: EngineCore) -> float:
    begun = time.perf_counter()
    core.step()
    return 1000 * (time.perf_counter() - begun)


def _decode(core: EngineCore, setup: Setup, rows: int, used: int) -> dict[str, Any]:
    """Return the median milliseconds of a decode step, and the kernels that it launches."""
    names = _start(core, rows, used, setup.steps)
    times = [_timed_step(core) for _ in range(setup.steps)]
    _finish(core, names)
    launches = None
    if setup.device == "cuda":
        prompts = [[3] * _PROMPT for _ in range(rows)]
        adapters = [f"a{row % used}" for row in range(rows)] if used else None
        launches = device_work(core, prompts, 8, 16, adapters)["device_launches"]
    return {"ms": statistics.median(times), "launches": launches}


def _long_prompt(core: EngineCore, setup: Setup, adapter: str | None) -> float:
    """Return the least milliseconds of a step that computes a long prompt."""
    params, times = SamplingParams(temperature=0, max_tokens=1), []
    for repeat in range(8):
        core.add(NewRequest(f"p{repeat}", [5] * (setup.long_prompt - 1), params, adapter))
        begun = time.perf_counter()
        while core.has_work:
            core.step()
        times.append(1000 * (time.perf_counter() - begun))
    return min(times[1:])


def _prompt_bytes(setup: Setup) -> int:
    """Return the bytes that an adapter must move for a long prompt: x once, and out twice."""
    adapter = RandomAdapter.of_model(setup.folder, _RANK, torch.bfloat16)
    outputs = sum(target.output_size for target in adapter.targets)
    # q, k and v read one x, and so do gate and up.
    alone = ("q_proj", "o_proj", "gate_proj", "down_proj")
    inputs = sum(one.input_size for one in adapter.targets if one.name.endswith(alone))
    return setup.long_prompt * _ITEMSIZE * (inputs + 2 * outputs) + adapter.num_bytes


def _while_loading(core: EngineCore, setup: Setup) -> Row:
    """Return the times of decode steps while an adapter is loaded and copied, several times."""
    # A pinned adapter goes to the start of the pool, where nothing may run.
    names = _start(core, 64, 1, setup.long_run, first=_ADAPTERS - 1)
    gc.collect()
    gc.freeze()  # as an engine process does: a full collection would take as long as many steps
    quiet = statistics.median(_timed_step(core) for _ in range(setup.steps // 2))
    times, loads = [], 0
    for load in range(_LOADS):
        core.adapters.begin(LoadAdapter(f"l{load}", "late", _FOLDER, pinned=True))
        while len(times) < setup.long_run // 2:
            times.append(_timed_step(core))
            for result in core.adapters.end():
                if result.error is not None:
                    raise result.error
            if core.stats().adapter_on_device.get("late"):
                loads += 1
                break
        core.adapters.begin(UnloadAdapter(f"u{load}", "late", 10.0))
        while core.adapters.are_pending:
            core.step()
            core.adapters.end()
    gc.unfreeze()
    _finish(core, names)
    adapter = RandomAdapter.of_model(setup.folder, _RANK, torch.bfloat16)
    return {
        "step": f"decode while {adapter.num_bytes / 1e6:.0f} MB are loaded", "rows": 64,
        "adapters": 1, "ms": statistics.median(times), "slowest_ms": max(times),
        "steps": len(times), "loads": loads, "over_quiet": max(times) / quiet,
        "ok": loads == _LOADS and max(times) <= 2 * quiet,
    }  # fmt: skip
