#!/usr/bin/env python3
"""Measure what structured outputs cost: tokens/s with grammars beside those without.

    python3 tools/bench_structured.py [--model demo|llama3-8b] [--rows 16] [--vllm PYTHON]

All rows decode so many tokens, and no output ends before. Weights are random but for the demo
model's, and a vocabulary of the model's size is made for them. Each case runs several times, all
cases in turn; the numbers are medians. ``--vllm``: an interpreter with vLLM, which runs the same
cases behind Kiln on the same GPU.
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

from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402 - after the path

from kiln.engine.bench.report import Report, command_line, table  # noqa: E402
from kiln.engine.bench.shapes import SHAPES, write_shape  # noqa: E402
from kiln.engine.bench.vllm_engine import VLLMEngine  # noqa: E402
from kiln.engine.config_forms import offline_config  # noqa: E402
from kiln.engine.llm import LLM  # noqa: E402
from kiln.engine.requests.sampling_params import SamplingParams  # noqa: E402

_CITIES = ["Oslo", "Lima", "Cairo", "Quito", "Hanoi", "Accra", "Delhi", "Tokyo", "Paris", "Rome"]


def _records(**more: Any) -> dict[str, Any]:
    """Return the schema of a long list of records."""
    properties = {
        "city": {"enum": _CITIES},
        "date": {"type": "string", "format": "date"},
        "people": {"type": "integer", "minimum": 0, "maximum": 9_999_999},
        "tags": {"type": "array", "maxItems": 3, "items": {"enum": ["new", "old", "big"]}},
        "mayor": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
        **more,
    }
    record = {"type": "object", "properties": properties, "required": list(properties)}
    # So that no output ends.
    return {"type": "array", "minItems": 10_000, "items": {**record, "additionalProperties": False}}


FORMS: dict[str, dict[str, Any] | None] = {
    "free": None,
    "json_schema": {"json": _records()},
    "json_schema, texts of at most 24 letters": {
        "json": _records(name={"type": "string", "maxLength": 24})
    },
    "regex": {"regex": r"(\d{4}-\d{2}-\d{2} ){500}"},
}
_PROMPT = 32  # tokens
_SPECIAL = ["<unk>", "<s>", "</s>"]


def main() -> None:
    """Measure; write JSON and a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["demo", *SHAPES], default="demo")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256, help="of an output")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        folder = _folder(args.model, Path(parent))
        rows = _measure("kiln", _Kiln(folder, args), args)
        if args.vllm:
            rows += _measure("vllm", _VLLM(folder, args), args)
    name = f"structured_outputs-{args.model}"
    report = Report(name, command_line("tools/bench_structured.py"), rows)
    columns = {
        "engine": "{engine}", "rows": "{rows}", "outputs": "{form}", "tokens/s": "{tokens_s:,.0f}",
        "of free": "{share:.3f}",
    }  # fmt: skip
    text = report.markdown("Structured outputs", f"Model: {args.model}.", table(columns, rows))
    print(text)
    report.write(args.output, name, text)


def _measure(name: str, engine: _Kiln | _VLLM, args: argparse.Namespace) -> list[dict[str, Any]]:
    times: dict[str, list[float]] = {form: [] for form in FORMS}
    for repeat in range(args.repeats + 1):
        chance = random.Random(repeat)
        prompts = [chance.choices(range(300, 700), k=_PROMPT) for _ in range(args.rows)]
        for form, structured in FORMS.items():
            seconds = engine.run(prompts, structured)
            if repeat:  # the first one warms up
                times[form].append(seconds)
    engine.close()  # the GPU is the next one's
    made = args.rows * args.tokens
    speeds = {form: made / statistics.median(own) for form, own in times.items()}
    return [
        {
            "engine": name, "rows": args.rows, "form": form, "tokens_s": speed,
            "share": speed / speeds["free"],
        }
        for form, speed in speeds.items()
    ]  # fmt: skip


class _Kiln:
    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self._tokens = args.tokens
        more = {} if args.model == "demo" else {"load_format": "dummy", "max_model_len": 2048}
        self._llm = LLM(str(folder), max_num_seqs=args.rows, enable_prefix_caching=False, **more)  # type: ignore[arg-type]

    def run(self, prompts: list[list[int]], structured: dict[str, Any] | None) -> float:
        params = SamplingParams(
            temperature=0, max_tokens=self._tokens, ignore_eos=True, detokenize=False,
            structured_outputs=structured,
        )  # fmt: skip
        begun = time.perf_counter()
        outputs = self._llm.generate(prompts, params)
        seconds = time.perf_counter() - begun
        for one in outputs:
            assert len(one.outputs[0].token_ids) == self._tokens, one.outputs[0]
        return seconds

    def close(self) -> None:
        self._llm.close()


class _VLLM:
    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self._tokens = args.tokens
        config = offline_config(
            str(folder),
            {"load_format": "dummy", "max_model_len": 2048, "max_num_seqs": args.rows},
        )
        self._engine = VLLMEngine(config, args.vllm, with_tokenizer=True)
        self.close = self._engine.close

    def run(self, prompts: list[list[int]], structured: dict[str, Any] | None) -> float:
        lengths = [self._tokens] * len(prompts)
        return self._engine.run(prompts, lengths, structured=structured)


def _folder(model: str, parent: Path) -> Path:
    """Return the demo model, or a folder of a model's shape and a vocabulary of its size."""
    if model == "demo":
        return ROOT / "engine" / "demo"
    folder, chance = write_shape(model, parent), random.Random(1)
    texts = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {text: index for index, text in enumerate(texts)}
    while len(vocabulary) < SHAPES[model]["vocab_size"]:
        letters = "".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(2, 8)))
        vocabulary.setdefault(chance.choice(["", "Ġ"]) + letters, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


if __name__ == "__main__":
    main()
