"""The serving benchmark: the same requests for each server, failures counted, curves drawn."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from openai_stub import stub_server

from kiln.engine.bench.arrivals import Arrivals
from kiln.engine.bench.datasets import RandomTokens
from kiln.engine.bench.engine import BenchError
from kiln.engine.bench.load_client import LoadError, Target
from kiln.engine.bench.served_engine import ServedEngine
from kiln.engine.bench.serving import Load, Point, Shown, measure
from kiln.engine.bench.vllm_server import server_flags, version, vllm_server
from kiln.engine.config import EngineConfig, KVConfig, ModelConfig, SchedulerConfig

DEMO = Path(__file__).resolve().parents[3] / "engine" / "demo"
POINTS = (Point(Arrivals(1), 3), Point(Arrivals(4), 8), Point(Arrivals(None, 400.0), 6))
LOAD = Load(RandomTokens(2000, 20, 4, range_ratio=0.5), POINTS)
CONFIG = EngineConfig(ModelConfig(str(DEMO), device="cpu", dtype="float32", seed=3))


@pytest.fixture
def server():
    with stub_server() as stub:
        yield stub


def test_every_server_gets_the_same_requests_and_none_twice(server):
    rounds = []
    for _ in range(2):
        server.asked.clear()
        rows = list(measure("some", Target(server.url), LOAD))
        rounds.append(sorted(tuple(body["prompt"]) for _, _, body in server.asked))
    assert rounds[0] == rounds[1]
    assert len({prompt[:8] for prompt in rounds[0]}) == len(rounds[0]) == 3 + 3 + 8 + 6
    assert [row["load"] for row in rows] == ["1 at a time", "4 at a time", "400 a second"]
    assert [row["requests"] for row in rows] == [3, 8, 6]
    assert [row["max_concurrency"] for row in rows] == [1, 4, None]
    for _, _, body in server.asked:
        assert (body["temperature"], body["ignore_eos"]) == (0, True)
    others = list(measure("some", Target(server.url), replace(LOAD, seed=1)))
    assert [row["output_tokens"] for row in others] != [row["output_tokens"] for row in rows]


def test_a_chat_has_the_text_of_the_tokens(server):
    chat = replace(LOAD, points=POINTS[:1], text_of=lambda ids: f"{len(ids)} tokens")
    list(measure("some", Target(server.url, is_chat=True), chat))
    [text] = {body["messages"][0]["content"].split()[1] for _, _, body in server.asked}
    assert text == "tokens"


def test_failures_are_counted_by_their_error(server):
    told = []
    shown = Shown(lambda what, total: told.append((what, total)))
    rows = measure("some", Target(server.url), LOAD, shown)
    assert next(rows)["failures"] == {}
    server.trouble = {(token,): "short" for token in range(1000)}
    server.trouble |= {(token,): "refuse" for token in range(1000, 2000)}
    row = next(rows)
    assert row["requests"] == 0
    assert sum(row["failures"].values()) == 8
    assert "HTTP/1.1 400 Bad Request: the prompt is too long" in row["failures"]
    assert any(one.startswith("wrong number of output tokens, such as") for one in row["failures"])
    server.trouble = {}
    assert next(rows)["requests"] == 6
    assert told == [
        ("some: warm-up", 3),
        ("some: 1 at a time", 3),
        ("some: 4 at a time", 8),
        ("some: 400 a second", 6),
    ]


def test_a_server_that_refuses_everything_ends_the_run(server):
    server.key = "another"
    with pytest.raises(LoadError, match=r"some, http.*: every request failed: .* Invalid API key"):
        next(measure("some", Target(server.url, api_key="k"), LOAD))


@pytest.fixture
def python(tmp_path):
    """An interpreter that has a server of vLLM's, which is the stub."""
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    helpers = Path(__file__).resolve().parents[2] / "helpers"
    (package / "api_server.py").write_text(
        f"import sys\nsys.path.append({str(helpers)!r})\nfrom openai_stub import main\n"
        "main(sys.argv[1:])\n"
    )
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)


def serve(python):
    return ServedEngine("vllm", lambda log: vllm_server(CONFIG, python, log, 60), version)


def test_vllms_server_is_started_measured_and_stopped(python):
    engine = serve(python)
    log, process = engine._log.path, engine._process
    assert engine.versions == {"vllm": "9.8.7"}
    assert engine.load_seconds > 0
    rows = list(engine.measure(LOAD, Shown()))
    assert [row["engine"] for row in rows] == ["vllm"] * 3
    assert "'--model'" in log.read_text()
    engine.close()
    assert process.poll() is not None
    assert not log.exists()


def test_a_server_that_does_not_start_or_ends_shows_its_log(python, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "no start")
    with pytest.raises(BenchError, match=r"exit code 1; the end of its log (?s:.*)no such luck"):
        serve(python)
    monkeypatch.setenv("FAKE_VLLM", "exit")
    engine = serve(python)
    log = engine._log.path
    with pytest.raises(BenchError, match=r"ended with exit code 7; (?s:.*)a line of the log"):
        list(engine.measure(LOAD, Shown()))
    engine.close()
    assert log.exists()
    os.unlink(log)


def test_vllms_server_gets_the_settings_of_kiln():
    flags = server_flags(CONFIG)
    pairs = dict(zip(flags[::2], flags[1::2], strict=True))
    assert pairs["--model"] == str(DEMO)
    assert (pairs["--dtype"], pairs["--seed"]) == ("float32", "3")
    assert "--max-model-len" not in pairs
    assert not {"--skip-tokenizer-init", "--enable-prefix-caching"} & set(flags)
    limits = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=77)
    model = replace(CONFIG.model, max_model_len=99, hf_overrides='{"rms_norm_eps": 0.5}')
    flags = server_flags(EngineConfig(model, KVConfig(enable_prefix_caching=False), limits))
    assert flags[-1] == "--no-enable-prefix-caching"
    pairs = dict(zip(flags[:-1:2], flags[1:-1:2], strict=True))
    assert (pairs["--max-model-len"], pairs["--max-num-seqs"]) == ("99", "3")
    assert pairs["--max-num-batched-tokens"] == "77"
    assert pairs["--hf-overrides"] == '{"rms_norm_eps": 0.5}'
