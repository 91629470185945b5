"""``kiln bench latency``, ``offline`` and ``prefill``: rows, files, and what they refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from kiln.engine.bench import prefill
from kiln.engine.cli.main import main
from kiln.engine.cli.numbers import batches, count, count_range, counts

ROOT = Path(__file__).resolve().parents[3]
SERVER = (
    "fastapi", "uvicorn", "starlette", "pydantic", "zmq", "msgspec", "httpx", "rich",
    "prometheus_client",
)  # fmt: skip
BOTH = """
import sys
sys.modules |= dict.fromkeys({absent!r})  # importing one raises ImportError
from kiln.engine.cli.main import main
common = ["--load-format", "dummy", "--device", "cpu", "--kv-memory-gib", "0.01"]
lengths = ["--prompt-tokens", "4-9", "--output-tokens", "2-6"]
assert main(["bench", "latency", {folder!r}, *common, "--batch-sizes", "1,3",
    "--prompt-tokens", "9", "--output-tokens", "20", "--json", {latency!r}]) == 0
assert main(["bench", "offline", {folder!r}, *common, *lengths, "--num-prompts", "5",
    "--json", {offline!r}]) == 0
"""
LATENCY = {
    "engine", "batch_size", "step_ms", "output_tokens_per_s", "device_ms", "idle_ms", "floor_ms",
    "share", "ratio", "short_seconds", "long_seconds",
}  # fmt: skip


def test_a_config_alone_is_measured_without_a_server_package(folder, tmp_path):
    model = folder()
    assert [path.name for path in model.iterdir()] == ["config.json"]
    files = {name: str(tmp_path / f"{name}.json") for name in ("latency", "offline")}
    code = BOTH.format(absent=SERVER, folder=str(model), **files)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            "PYTHONPATH": str(ROOT / "tools/import_root"),
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "# Decode steps of model" in done.stdout
    assert "# Offline throughput of model" in done.stdout
    assert "kiln: batch size 3" in done.stderr
    report = json.loads(Path(files["latency"]).read_text())
    assert [row["batch_size"] for row in report["rows"]] == [1, 3]
    for row in report["rows"]:
        assert set(row) == LATENCY
        assert row["step_ms"] is None or row["step_ms"] > 0
        assert row["device_ms"] is row["floor_ms"] is row["share"] is row["ratio"] is None
    assert report["load"] == {
        "batch_sizes": [1, 3], "prompt_tokens": 9, "output_tokens": 20, "context": 27,
    }  # fmt: skip
    assert (report["model"], report["load_format"], report["device"]) == ("model", "dummy", "cpu")
    assert report["limits"]["max_model_len"] == 128  # the model's: less than the usual 4096
    (row,) = json.loads(Path(files["offline"]).read_text())["rows"]
    assert (row["engine"], row["requests"]) == ("kiln", 5)
    assert 10 <= row["output_tokens"] <= 30
    assert row["output_tokens_per_s"] == pytest.approx(row["output_tokens"] / row["seconds"])


# A small pool is enough.
DUMMY = ("--load-format", "dummy", "--device", "cpu", "--kv-memory-gib", "0.01")


def bench(*arguments):
    return main(["bench", *map(str, arguments)])


def test_a_baseline_is_a_row_of_the_same_report(folder, tmp_path, capsys):
    flags = (*DUMMY, "--baseline", "transformers")
    load = ("--num-prompts", 4, "--prompt-tokens", "3-6", "--output-tokens", "4", "--output")
    assert bench("offline", folder(), *flags, *load, tmp_path / "out") == 0
    names = ["offline-model-cpu.json", "offline-model-cpu.md", "offline-model-cpu.png"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    report = json.loads((tmp_path / "out" / names[0]).read_text())
    kiln, other = report["rows"]
    assert other["engine"] == "transformers, static batches of 256"
    assert other["ratio"] == pytest.approx(
        kiln["output_tokens_per_s"] / other["output_tokens_per_s"]
    )
    assert kiln["output_tokens"] == other["output_tokens"] == 16
    assert set(report["load_seconds"]) == {"kiln", "transformers"}
    out = capsys.readouterr().out
    assert out == (tmp_path / "out" / names[1]).read_text()


def test_kilns_rows_survive_a_baseline_that_fails(folder, tmp_path, capsys, monkeypatch):
    from kiln.engine.bench import transformers_engine

    def fail(config, size=None):
        raise NotImplementedError("no such thing here")

    monkeypatch.setattr(transformers_engine, "StaticBatches", fail)
    flags = (*DUMMY, "--baseline", "transformers")
    load = ("--batch-sizes", 1, "--prompt-tokens", 4, "--output-tokens", 20)
    file = tmp_path / "numbers.json"
    assert bench("latency", folder(), *flags, *load, "--json", file) == 1
    report = json.loads(file.read_text())
    assert [row["engine"] for row in report["rows"]] == ["kiln"]
    what = "transformers: NotImplementedError: no such thing here"
    assert report["remark"] == f"INCOMPLETE, {what}"
    printed = capsys.readouterr()
    assert f"error: {what}" in printed.err
    assert "| kiln | 1 |" in printed.out


def test_a_latency_report_has_a_plot(folder, tmp_path):
    flags = (*DUMMY, "--batch-sizes", 2)
    load = ("--prompt-tokens", 4, "--output-tokens", 30, "--output", tmp_path / "out")
    assert bench("latency", folder(), *flags, *load) == 0
    assert (tmp_path / "out" / "latency-model-cpu.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["latency", "qwen3-0.6"], ["'qwen3-0.6'", "qwen3-0.6b, llama3-8b, llama3-70b"]),
        (["latency", "qwen3-0.6b", "--load-format", "auto"], ["--load-format auto", "no weights"]),
        (["latency", "--baseline", "vllm"], ["no package vllm", sys.executable]),
        (["offline", "--baseline-python", "python"], ["only with --baseline vllm"]),
        (["latency", "--batch-sizes", "9", "--max-num-seqs", "8"], ["--max-num-seqs 8", "9 req"]),
        (["latency", "--prompt-tokens", "2000"], ["2136 tokens", "2048"]),
        (["offline", "--output-tokens", "2000"], ["3024 tokens", "2048"]),
        (["prefill", "--prompts", "2x64,1x9000"], ["9001 tokens", "2048"]),
        (["prefill", "--max-model-len", "200"], ["257 tokens", "200"]),
    ],
)
def test_what_cannot_be_measured_is_refused_before_the_model_loads(arguments, says, capsys):
    assert bench(*arguments) == 1
    printed = capsys.readouterr()
    assert all(word in printed.err for word in says), printed.err
    assert "loading" not in printed.err
    assert printed.out == ""


def test_numbers_on_the_command_line():
    assert (count("7"), counts("16, 1,16"), count_range("3-9")) == (7, (16, 1), (3, 9))
    assert count_range("5") == (5, 5)
    assert batches("64x256, 8x8000") == ((64, 256), (8, 8000))
    wrongs = [(count, "0"), (count, "-1"), (counts, "1,,2"), (count_range, "9-3")]
    for read, wrong in (*wrongs, (batches, "64"), (batches, "0x5"), (batches, "2x3x4")):
        with pytest.raises(ArgumentTypeError, match="must"):
            read(wrong)


def test_prefill_is_measured_with_each_budget(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(prefill, "PROMPTS", ((3, 20), (2, 40), (1, 200)))  # 128 tokens fit
    out = tmp_path / "out"
    assert bench("prefill", folder(), *DUMMY, "--budgets", 16, "--output", out) == 0
    names = [f"prefill-model-cpu.{end}" for end in ("json", "md", "png")]
    assert sorted(path.name for path in out.iterdir()) == names
    report = json.loads((out / names[0]).read_text())
    assert report["load"] == {"prompts": [[3, 20], [2, 40]]}
    assert list(report["load_seconds"]) == ["kiln", "kiln, 16 tokens a step"]
    found = [(row["asked_budget"], row["token_budget"]) for row in report["rows"]]
    assert found == [(None, 2048)] * 2 + [(16, 16)] * 2
    for row in report["rows"]:
        count = row["num_prompts"] * row["prompt_tokens"]
        assert row["tokens_per_s"] == pytest.approx(count / min(row["seconds"]))
        assert row["device_ms"] is row["busy"] is row["ratio"] is None
    printed = capsys.readouterr()
    assert printed.out == (out / names[1]).read_text()
    assert "kiln, 16 tokens a step: 2 × 40" in printed.err


def test_a_budget_that_a_flag_gives_is_no_default(folder, tmp_path):
    file = tmp_path / "numbers.json"
    load = ("--prompts", "2x9", "--max-num-batched-tokens", 70, "--json", file)
    assert bench("prefill", folder(), *DUMMY, *load) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["asked_budget"], row["token_budget"]) == (70, 70)
