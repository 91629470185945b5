"""One rank of an engine that ``engine_ranks`` starts: its case as JSON, a folder, its rank."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_PATHS = [str(ROOT / "tools" / "import_root"), str(ROOT / "tools")]
sys.path[:0] = [path for path in _PATHS if path not in sys.path]

import torch  # noqa: E402 - after the path, as all below

from gpu.greedy import exact_products  # noqa: E402
from gpu.pace import Row  # noqa: E402
from kiln import LLM, SamplingParams  # noqa: E402
from kiln.engine.cli.torchrun import with_torchrun  # noqa: E402
from kiln.engine.config import (  # noqa: E402
    EngineConfig,
    GraphConfig,
    KVConfig,
    LoRAConfig,
    LoRAModule,
    ModelConfig,
)
from kiln.engine.errors import DeviceError  # noqa: E402
from kiln.engine.runner.follow import follow_launched  # noqa: E402

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_PATIENCE = 60.0  # seconds, after which a rank prints where it is
_BEFORE = 0.3  # seconds of generating, before a rank is lost


def main(arguments: list[str]) -> int:
    """Serve the case as rank 0, or follow."""
    case, folder, rank = json.loads(arguments[0]), Path(arguments[1]), int(arguments[2])
    faulthandler.dump_traceback_later(_PATIENCE)
    torch.set_num_threads(1)
    exact_products()
    config, place = with_torchrun(_config(case))
    if place is None:
        raise RuntimeError("torchrun's variables are not set")
    if place.rank > 0:
        (folder / f"process{rank}").write_text(str(os.getpid()))
        return follow_launched(place, config)
    written = folder / "rank0.json"
    try:
        written.write_text(json.dumps({"rows": [_lead(case, config, folder)]}))
    except Exception as error:
        traceback.print_exc()
        written.write_text(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        sys.stderr.flush()
        os._exit(1)  # others may wait for this rank in calls that nothing ends
    return 0


def _config(case: dict[str, Any]) -> EngineConfig:
    modules = tuple(LoRAModule(name, path) for name, path in case["adapters"].items())
    return EngineConfig(
        ModelConfig(case["folder"], dtype=case["dtype"], device=case["device"]),
        KVConfig(num_blocks=512, enable_prefix_caching=False),
        graphs=GraphConfig(enabled=case["graphs"], bs=(1, 8, 17)),
        lora=LoRAConfig(modules),
    )


def _lead(case: dict[str, Any], config: EngineConfig, folder: Path) -> Row:
    params = SamplingParams(temperature=0, max_tokens=case["max_tokens"], ignore_eos=True)
    llm = LLM.from_config(config, skip_tokenizer_init=True)
    begun: list[float] = []
    if case["lost"]:
        last = folder / f"process{case['world'] - 1}"
        losing = (int(last.read_text()), _SIGNALS[case["lost"]], begun)
        threading.Timer(_BEFORE, _lose, losing).start()
    row: Row = {}
    try:
        outputs = llm.generate(case["prompts"], params, lora=case["names"] or None)
        row["tokens"] = [list(output.outputs[0].token_ids) for output in outputs]
    except DeviceError as error:
        if not begun:
            raise
        row |= {"told": str(error), "seconds": time.monotonic() - begun[0]}
    stats = llm.core.stats()
    row["calls"] = dict(stats.all_reduces)
    row["replays"] = sum(stats.graph_replays.values())
    closing = time.monotonic()
    llm.close()
    return row | ({"closed": time.monotonic() - closing} if case["lost"] else {})


def _lose(process: int, number: signal.Signals, begun: list[float]) -> None:
    begun.append(time.monotonic())
    os.kill(process, number)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
