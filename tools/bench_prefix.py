#!/usr/bin/env python3
"""Measure what prefix caching saves, and what it costs the host.

    python3 tools/bench_prefix.py [--requests 32] [--shared 1024] [--output benchmarks]

First it times requests that begin with the same tokens, with and without caching. The model has
the demo model's shape, random weights and a longer context. Both ways run in turn, several times;
the numbers are medians. Then it times the host's own work: indexing the blocks of a prompt, and
finding them again. Runs on a CPU.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools" / "import_root")]

from kiln.engine.bench.report import Report, command_line, table  # noqa: E402 - after the path
from kiln.engine.kv.block_pool import BlockPool  # noqa: E402
from kiln.engine.kv.manager import KVManager  # noqa: E402
from kiln.engine.llm import LLM  # noqa: E402
from kiln.engine.requests.request import Request  # noqa: E402
from kiln.engine.requests.sampling_params import SamplingParams  # noqa: E402

_OWN, _OUT, _BLOCK = 32, 8, 16  # tokens: of a prompt behind the shared ones, of an answer
_LONG = 8192


def main() -> None:
    """Measure; write JSON and a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--shared", type=int, default=1024, help="tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        rows = [_shared(_folder(Path(parent), args.shared), args)]
    host = _host(args.repeats)
    command = command_line("tools/bench_prefix.py")
    report = Report("prefix_cache", command, rows, details={"host": host})
    text = _page(report, host)
    print(text)
    report.write(args.output, "prefix_cache", text)


def _folder(parent: Path, shared: int) -> Path:
    """Write the config of the demo model with room for the prompts."""
    config = json.loads((ROOT / "engine" / "demo" / "config.json").read_text())
    config["max_position_embeddings"] = shared + _OWN + _OUT + _BLOCK
    (parent / "config.json").write_text(json.dumps(config))
    return parent


def _shared(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of requests with one prefix, on and off in turn."""
    engines = {
        name: LLM(
            str(folder), device="cpu", load_format="dummy", skip_tokenizer_init=True,
            enable_prefix_caching=name == "on",
        )
        for name in ("off", "on")
    }  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=_OUT, ignore_eos=True)
    times: dict[str, list[float]] = {name: [] for name in engines}
    for repeat in range(args.repeats):
        chance = random.Random(repeat)  # so that no prefix is known from before
        head = chance.choices(range(200), k=args.shared)
        prompts = [head + chance.choices(range(200), k=_OWN) for _ in range(args.requests)]
        answers = []
        for name, llm in engines.items():
            begun = time.perf_counter()
            outputs = llm.generate(prompts, params)
            times[name].append(time.perf_counter() - begun)
            answers.append([one.outputs[0].token_ids for one in outputs])
        assert answers[0] == answers[1], "caching changed a token"
    seconds = {name: statistics.median(own) for name, own in times.items()}
    ratio = seconds["off"] / seconds["on"]
    return {"requests": args.requests, "shared": args.shared, **seconds, "speedup": ratio}


def _request(tokens: list[int]) -> Request:
    return Request(
        "r", tokens, len(tokens), SamplingParams(), 0, 1, 2 * _LONG, frozenset(), is_plain=True
    )


def _host(repeats: int) -> dict[str, float]:
    """Return the least microseconds of the host's work on a prompt of 8,192 tokens."""
    blocks, best = _LONG // _BLOCK, {"index": 1e9, "find": 1e9, "begin": 1e9, "end": 1e9}
    for repeat in range(20 * repeats):
        tokens = random.Random(repeat).choices(range(150_000), k=_LONG)
        kv = KVManager(BlockPool(2 * blocks), _BLOCK, caching=True)
        first, again = _request(tokens), _request(tokens)
        found = kv.prefix(first)
        assert found is not None
        kv.begin(first, found)
        kv.extend(first, _LONG)
        _time(best, "index", lambda own=first, kv=kv: kv.index(own, _LONG))
        kv.release(first)
        found = kv.prefix(again)
        assert found is not None
        assert len(found.blocks) == blocks - 1
        _time(best, "find", lambda own=again, kv=kv: kv.prefix(own))

        def begin(own: Request = again, kv: KVManager = kv, found: Any = found) -> None:
            assert kv.fits(own, found, 1)
            kv.begin(own, found)

        _time(best, "begin", begin)
        _time(best, "end", lambda own=again, kv=kv: kv.release(own))
    total = best["find"] + best["begin"] + best["end"]
    return {
        "index_us_a_block": best["index"] / blocks, "find_us_a_block": best["find"] / blocks,
        "cached_prompt_us": total, **{f"{name}_us": us for name, us in best.items()},
    }  # fmt: skip


def _time(best: dict[str, float], name: str, work: Callable[[], object]) -> None:
    begun = time.perf_counter()
    work()
    best[name] = min(best[name], 1e6 * (time.perf_counter() - begun))


def _page(report: Report, host: dict[str, float]) -> str:
    columns = {
        "requests": "{requests}", "shared tokens": "{shared}", "without caching, s": "{off:.2f}",
        "with, s": "{on:.2f}", "ratio": "{speedup:.1f}×",
    }  # fmt: skip
    return report.markdown(
        "Prefix caching",
        f"The demo model's shape; {_OWN} more tokens in each prompt, {_OUT} in each answer.",
        table(columns, report.rows),
        f"The host, for a prompt of {_LONG:,} tokens, the least of many runs: "
        f"{host['index_us_a_block']:.2f} µs to index a block, {host['find_us_a_block']:.2f} µs to "
        f"find it, and {host['cached_prompt_us']:.0f} µs to find all, begin and end.",
    )


if __name__ == "__main__":
    main()
