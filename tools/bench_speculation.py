#!/usr/bin/env python3
"""Measure speculative decoding by n-gram beside plain decoding.

    python3 tools/bench_speculation.py [--model llama3-8b] [--rows 1 64] [--output benchmarks]

Weights of a model's shape, under which each of eight tokens is followed by the next one: greedy
answers repeat themselves. A random text: answers at a high temperature, where no draft is right.
The layers compute as always, and what they add is multiplied by zero. Both engines run one after
the other in this process, each case several times; the numbers are medians. Runs on a CPU too, with
--model tiny.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools" / "import_root")]

import torch  # noqa: E402 - after the path, as all below

from kiln.engine.bench.report import Report, command_line, table  # noqa: E402
from kiln.engine.bench.shapes import SHAPES, write_shape  # noqa: E402
from kiln.engine.compile.parameters import parts_of  # noqa: E402
from kiln.engine.layers.embedding import Embedding  # noqa: E402
from kiln.engine.layers.linear import Linear  # noqa: E402
from kiln.engine.layers.mlp import GatedMLP  # noqa: E402
from kiln.engine.layers.norm import StreamNorm  # noqa: E402
from kiln.engine.layers.weight import DenseWeight  # noqa: E402
from kiln.engine.llm import LLM  # noqa: E402
from kiln.engine.models.block import SelfAttention  # noqa: E402
from kiln.engine.models.decoder import Decoder  # noqa: E402
from kiln.engine.requests.sampling_params import SamplingParams  # noqa: E402
from kiln.engine.runner.memory import free_unused  # noqa: E402
from kiln.engine.runner.model_runner import ModelRunner  # noqa: E402

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}
TINY = {
    **SHAPES["qwen3-0.6b"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1000,
    "tie_word_embeddings": False,
}  # fmt: skip
TEXTS = {"repeats itself": {"temperature": 0}, "random": {"temperature": 100.0, "seed": 1}}
_PROMPT, _PERIOD = 64, 8  # tokens


def main() -> None:
    """Measure every case without and with drafts; write JSON and a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["llama3-8b", "tiny"], default="llama3-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        folder = _folder(args.model, Path(parent))
        found = {name: _measure(folder, args, config) for name, config in ENGINES.items()}
    rows = [
        {**plain, "drafts": with_drafts, "speedup": with_drafts["tokens_s"] / plain["tokens_s"]}
        for plain, with_drafts in zip(*found.values(), strict=True)
    ]
    report = Report(f"speculation-{args.model}", command_line("tools/bench_speculation.py"), rows)
    text = _page(report, args.model)
    print(text)
    report.write(args.output, report.benchmark, text)


ENGINES = {"plain": None, "ngram": NGRAM}


def _folder(model: str, parent: Path) -> Path:
    if model != "tiny":
        return write_shape(model, parent)
    (parent / "config.json").write_text(json.dumps(TINY))
    return parent


def _measure(
    folder: Path, args: argparse.Namespace, config: dict[str, Any] | None
) -> list[dict[str, Any]]:
    """Return a row for each text and number of rows."""
    llm = LLM(
        str(folder), load_format="dummy", skip_tokenizer_init=True,
        max_model_len=_PROMPT + args.tokens + 64, max_num_seqs=max(args.rows),
        enable_prefix_caching=False, speculative_config=config,
    )  # fmt: skip
    _let_it_repeat(llm)
    cases = [(text, rows) for text in TEXTS for rows in args.rows]
    measured = [_case(llm, args, text, rows) for text, rows in cases]
    device = llm.core.runner.device_type
    llm.close()
    free_unused(device)
    return measured


@torch.inference_mode()
def _let_it_repeat(llm: LLM) -> None:
    """Change the weights, in their places, so that a token decides alone what follows it."""
    runner = llm.core.runner
    assert isinstance(runner, ModelRunner)
    model = runner.loaded.model
    assert isinstance(model, Decoder)
    for attention in parts_of(model, SelfAttention):
        attention.output.weight.values.zero_()
    for mlp in parts_of(model, GatedMLP):
        mlp.down.weight.values.zero_()
    assert isinstance(model.head, Linear)
    assert isinstance(model.embedding, Embedding)
    assert isinstance(model.norm, StreamNorm)
    model.norm.weight.fill_(1)
    head = model.head.weight
    assert isinstance(head, DenseWeight)
    head.values.zero_()
    head.values[:_PERIOD] = model.embedding.weight[:_PERIOD].roll(1, 0)


def _case(llm: LLM, args: argparse.Namespace, text: str, rows: int) -> dict[str, Any]:
    chance = random.Random(rows)
    prompts = [
        [*range(_PERIOD)] * (_PROMPT // _PERIOD)
        if text == "repeats itself"
        else chance.choices(range(900), k=_PROMPT)
        for _ in range(rows)
    ]
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True, **TEXTS[text])
    one = SamplingParams(max_tokens=1, ignore_eos=True, **TEXTS[text])
    rates, before = [], llm.core.stats()
    for _ in range(args.repeats):
        begun = time.perf_counter()
        llm.generate(prompts, one)
        first = time.perf_counter()
        llm.generate(prompts, params)
        decoding = time.perf_counter() - first - (first - begun)
        rates.append(rows * (args.tokens - 1) / decoding)
    after = llm.core.stats()
    drafted, accepted, steps = (
        getattr(after, name) - getattr(before, name)
        for name in ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "steps")
    )
    return {
        "text": text, "rows": rows, "tokens_s": statistics.median(rates), "steps": steps,
        "accepted": accepted / drafted if drafted else None,
        "not_ahead": (after.steps_not_ahead - before.steps_not_ahead) / steps,
    }  # fmt: skip


def _page(report: Report, model: str) -> str:
    columns = {
        "text": "{text}", "rows": "{rows}", "plain, tokens/s": "{tokens_s:.0f}",
        "n-gram, tokens/s": "{drafts[tokens_s]:.0f}", "ratio": "{speedup:.2f}×",
        "steps": "{steps}", "with drafts": "{drafts[steps]}",
    }  # fmt: skip
    return report.markdown(
        f"Speculative decoding by n-gram, {model}",
        "3 drafts from the last 2 to 4 tokens. Steps are those of all repeats.",
        table(columns, report.rows),
    )


if __name__ == "__main__":
    main()
