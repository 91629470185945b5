"""What requests that change their logits cost the steps of everybody, with CUDA graphs.

16 requests of a small model decode; none, one or all of them have penalties, bad words or allowed
tokens. Each step should still be launched before the tokens of the one before are known.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu.pace import Pace, Row
from kiln.engine.bench.shapes import SHAPES
from kiln.engine.config import EngineConfig, GraphConfig, KVConfig, ModelConfig, SchedulerConfig
from kiln.engine.core import EngineCore
from kiln.engine.requests.request import NewRequest
from kiln.engine.requests.sampling_params import SamplingParams

_REQUESTS, _PROMPT, _STEPS = 16, 128, 240
_MOST = 0.02  # of the steps may be launched with no other one in flight
_CHANGES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "bad_words": {"bad_words_token_ids": [[5, 6, 7], [8]]},
    "allowed_token_ids": {"allowed_token_ids": list(range(3, 90))},
}


def steps_ahead(args: argparse.Namespace) -> list[Row]:
    """Return a row for each change, by one request and by all."""
    with tempfile.TemporaryDirectory() as parent:
        core = engine(Path(parent), SHAPES["qwen3-0.6b"], "cuda")
        return Pace(args, seconds=50).rows(cases(), str, lambda case: [row_of(core, *case)])


def cases() -> list[tuple[str, int]]:
    """Return the changes, and how many of the requests make them."""
    return [
        (name, count) for name in _CHANGES for count in ((1, _REQUESTS) if _CHANGES[name] else (0,))
    ]


def engine(folder: Path, shape: dict[str, Any], device: str) -> EngineCore:
    """Return an engine with random weights and room for the requests."""
    (folder / "config.json").write_text(json.dumps(shape))
    blocks = _REQUESTS * (-(-(_PROMPT + _STEPS) // 16) + 1)
    return EngineCore(
        EngineConfig(
            ModelConfig(
                str(folder),
                dtype="bfloat16",
                device=device,
                load_format="dummy",
                max_model_len=1024,
            ),
            KVConfig(num_blocks=max(blocks, 64), enable_prefix_caching=False),
            SchedulerConfig(max_num_seqs=_REQUESTS, max_num_batched_tokens=_REQUESTS * _PROMPT),
            GraphConfig(bs=(_REQUESTS,)),
        )
    )


def row_of(core: EngineCore, name: str, count: int) -> Row:
    """Run the requests, of which ``count`` change their logits, and time their decode steps."""
    for index in range(_REQUESTS):
        change = _CHANGES[name] if index < count else {}
        params = SamplingParams(
            temperature=0, max_tokens=_STEPS, ignore_eos=True, seed=index, **change
        )
        core.add(NewRequest(f"r{index}", [3 + index] * _PROMPT, params))
    for _ in range(2):  # the prompts, and the first decode
        core.step()
    before, begun, steps = core.stats(), time.perf_counter(), 0
    while core.has_work:
        core.step()
        steps += 1
    seconds, after = time.perf_counter() - begun, core.stats()
    behind = (after.steps_not_ahead - before.steps_not_ahead) / max(after.steps - before.steps, 1)
    return {
        "change": name, "requests": _REQUESTS, "changing": count, "ms": 1000 * seconds / steps,
        "not_ahead": behind, "ok": behind < _MOST,
    }  # fmt: skip
