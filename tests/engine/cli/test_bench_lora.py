"""``kiln bench lora``: its rows and files, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from depth import at_depth

from kiln.engine.bench import choice, vllm_engine
from kiln.engine.bench.engine import BenchEngine
from kiln.engine.bench.kiln_engine import KilnEngine
from kiln.engine.cli.main import main

# A small pool is enough.
DUMMY = ("--load-format", "dummy", "--device", "cpu", "--kv-memory-gib", "0.01")
OUTPUT_TOKENS = at_depth(6, 30)
ROW = {
    "engine", "adapters", "batch_size", "step_ms", "output_tokens_per_s", "device_ms", "growth",
    "growth_floor", "ratio", "short_seconds", "long_seconds",
}  # fmt: skip


def bench(*arguments):
    return main(["bench", "lora", *map(str, arguments)])


def test_a_report_has_every_number_of_adapters_and_the_engine_without(
    folder, tmp_path, capsys, monkeypatch
):
    used = []
    run = KilnEngine.run

    def record(self, prompts, lengths, adapters=None):
        before = dict(self._llm.core.stats().adapter_tokens)
        seconds = run(self, prompts, lengths, adapters)
        after = self._llm.core.stats().adapter_tokens
        grown = {name for name in after if after[name] > before[name]}
        used.append((self.name, len(prompts), len(grown)))
        return seconds

    monkeypatch.setattr(KilnEngine, "run", record)
    load = ("--adapters", "0,1,3", "--batch-sizes", "1,4", "--rank", 2)
    lengths = ("--prompt-tokens", 5, "--output-tokens", OUTPUT_TOKENS)
    assert bench(folder(), *DUMMY, *load, *lengths, "--output", tmp_path / "out") == 0
    assert set(used) == {
        ("kiln", 2, 0), ("kiln", 1, 0), ("kiln", 4, 0),  # with 2 requests: the warm-up
        ("kiln with LoRA", 2, 0), ("kiln with LoRA", 1, 0), ("kiln with LoRA", 4, 0),
        ("kiln with LoRA", 2, 1), ("kiln with LoRA", 1, 1), ("kiln with LoRA", 4, 1),
        ("kiln with LoRA", 2, 2), ("kiln with LoRA", 4, 3),
    }  # fmt: skip

    names = [f"lora-model-cpu.{end}" for end in ("json", "md", "png")]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    report = json.loads((tmp_path / "out" / names[0]).read_text())
    assert [(row["batch_size"], row["adapters"]) for row in report["rows"]] == [
        (1, None), (1, 0), (1, 1), (4, None), (4, 0), (4, 1), (4, 3),
    ]  # fmt: skip
    alone = {row["batch_size"]: row["step_ms"] for row in report["rows"] if row["adapters"] is None}
    for row in report["rows"]:
        assert set(row) == ROW | ({"lora_backend"} if row["adapters"] is not None else set())
        assert row["engine"] == "kiln"
        assert row["device_ms"] is row["growth_floor"] is row["ratio"] is None
        steps = row["step_ms"], alone[row["batch_size"]]
        if row["adapters"] is None or None in steps:  # no difference between the runs was seen
            assert row["growth"] is None
        else:
            assert row["growth"] == pytest.approx(steps[0] / steps[1] - 1)
    assert set(report["load_seconds"]) == {"kiln", "kiln with LoRA"}
    # 2 layers of a hidden size of 32, 48 in the MLP, 4 and 2 heads of 8: inputs plus outputs.
    of_layer = 2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48)
    assert report["load"] == {
        "adapters": [0, 1, 3], "rank": 2, "batch_sizes": [1, 4], "prompt_tokens": 5,
        "output_tokens": OUTPUT_TOKENS, "context": 13 + OUTPUT_TOKENS // 2, "num_adapters": 3,
        "adapter_bytes": 2 * of_layer * 2 * 4,
    }  # fmt: skip
    printed = capsys.readouterr()
    assert printed.out == (tmp_path / "out" / names[1]).read_text()
    assert "kiln with LoRA (3 in use): batch size 4" in printed.err


class PretendedVLLM(BenchEngine):
    """Takes no time worth mention; ``made`` has the configs of all."""

    product = "vllm"
    load_seconds = 1.0
    made = []  # noqa: RUF012 (emptied by the test)

    def __init__(self, config, python):
        self.adapters = tuple(one.name for one in config.lora.modules)
        self.name = "vllm with LoRA" if self.adapters else "vllm"
        self.versions = {"vllm": python}
        self.made.append(config)

    def run(self, prompts, lengths, adapters=None):
        assert set(adapters or ()) <= set(self.adapters)
        if self.adapters and len(prompts) == 4:
            raise MemoryError("no room")
        return max(lengths) * (1 + len(set(adapters or ())))

    def close(self):
        """Free nothing."""


def test_vllm_gets_the_same_adapters_and_what_was_measured_outlives_its_failure(
    folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(choice, "VLLMEngine", PretendedVLLM)
    monkeypatch.setattr(vllm_engine, "require_vllm", lambda python, device: None)
    PretendedVLLM.made.clear()
    load = ("--adapters", "1,2", "--batch-sizes", "2,4", "--prompt-tokens", 5)
    others = ("--output-tokens", OUTPUT_TOKENS, "--baseline", "vllm", "--baseline-python", "some")
    file = tmp_path / "numbers.json"
    assert bench(folder(), *DUMMY, *load, *others, "--json", file) == 1
    alone, adapted = PretendedVLLM.made
    assert (alone.lora.modules, len(adapted.lora.modules)) == ((), 2)
    assert not Path(adapted.lora.modules[0].path).exists()  # removed at the end
    report = json.loads(file.read_text())
    assert report["versions"]["vllm"] == "some"
    assert report["remark"] == "INCOMPLETE, vllm with LoRA: MemoryError: no room"
    rows = [row for row in report["rows"] if row["engine"] == "vllm"]
    assert [(row["batch_size"], row["adapters"]) for row in rows] == [(2, None), (2, 1), (4, None)]
    assert rows[1]["growth"] == pytest.approx(1)
    for row in rows:
        own = [
            one["output_tokens_per_s"] for one in report["rows"]
            if one["engine"] == "kiln"
            and (one["batch_size"], one["adapters"]) == (row["batch_size"], row["adapters"])
        ]  # fmt: skip
        assert len(own) == 1
        ratio = None if own[0] is None else pytest.approx(own[0] / row["output_tokens_per_s"])
        assert row["ratio"] == ratio
    assert "error: vllm with LoRA: MemoryError: no room" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--rank", "0"], 2, ["--rank", "'0'", "1 or more"]),
        (["--adapters", "0,-1"], 2, ["--adapters", "'-1'", "0 or more"]),
        (["--adapters", ""], 2, ["--adapters", "''"]),
        (["--adapters", "4,9", "--batch-sizes", "1,3"], 1, ["--adapters 4", "at most 3 requests"]),
        (["--batch-sizes", "9", "--max-num-seqs", "8"], 1, ["--max-num-seqs 8", "9 requests"]),
        (["--baseline", "transformers"], 2, ["--baseline", "'transformers'", "'vllm'"]),
        (["--baseline-python", "python"], 1, ["only with --baseline vllm"]),
        (["--baseline", "vllm"], 1, ["no package vllm"]),
        (["--prompt-tokens", "400"], 1, ["536 tokens", "512"]),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, code, says, capsys, folder):
    try:
        got = bench(folder(max_position_embeddings=512), *DUMMY, *arguments)
    except SystemExit as end:  # argparse's
        got = end.code
    printed = capsys.readouterr()
    assert (got, printed.out) == (code, "")
    assert all(word in printed.err for word in says), printed.err
    assert "weights" not in printed.err
