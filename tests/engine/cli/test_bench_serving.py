"""``kiln bench serving``: its flags, its files, and vLLM beside Kiln in the same run."""

from __future__ import annotations

import io
import json
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest
from openai_stub import stub_server

from kiln.engine.bench import vllm_engine, vllm_server
from kiln.engine.cli import local_server
from kiln.engine.cli.measuring import load_display
from kiln.engine.distributed.command import module_command

KEY = "s3cret"
SHORT = ("--random-input-len", 8, "--random-output-len", 3)


@pytest.fixture
def server():
    with stub_server() as stub:
        yield stub


def test_a_curve_beside_vllm_has_both_engines_at_every_point(kiln, tmp_path, server, monkeypatch):
    started = []

    @contextmanager
    def start(what):
        started.append(what)
        yield server.url, None

    monkeypatch.setattr(vllm_engine, "require_vllm", lambda python, device: None)
    monkeypatch.setattr(
        vllm_server, "vllm_server", lambda config, python, log, patience: start((python, patience))
    )
    monkeypatch.setattr(
        local_server, "local_server", lambda flags, timeout, log: start((flags, timeout))
    )
    load = ("--dataset-name", "prefix", "--prefix-repetition-num-prefixes", 2)
    lengths = ("--prefix-repetition-prefix-len", 9, "--prefix-repetition-output-len", 3)
    points = ("--max-concurrency", "1,4", "--num-prompts", "2,6", "--metric-percentiles", "50,90")
    other = ("--baseline", "vllm", "--baseline-python", sys.executable)
    more = (*points, *other, "--ready-check-timeout-sec", 77, "--output", tmp_path)
    said = kiln("bench", "serving", "qwen3-0.6b", *load, *lengths, *more)
    assert said.returncode == 0, said.stderr
    (flags, seconds), vllm = started
    assert seconds == 77
    assert vllm == (sys.executable, 77)
    assert flags[0].endswith("/qwen3-0.6b")
    assert flags[1:] == ["--max-restarts", "0", "--load-format", "dummy"]
    report = json.loads((tmp_path / "serving-prefix-qwen3-0.6b-cpu.json").read_text())
    assert [(row["engine"], row["max_concurrency"]) for row in report["rows"]] == [
        ("kiln", 1), ("kiln", 4), ("vllm", 1), ("vllm", 4),
    ]  # fmt: skip
    assert [row["requests"] for row in report["rows"]] == [2, 6, 2, 6]
    assert report["versions"]["vllm"] == "9.8.7"
    assert set(report["load_seconds"]) == {"kiln", "vllm"}
    sent = [tuple(body["prompt"]) for _, _, body in server.asked]
    half = len(sent) // 2
    assert sorted(sent[:half]) == sorted(sent[half:])
    assert len({prompt[:9] for prompt in sent}) == 2 * 3  # of the warm-up and of each point
    page = (tmp_path / "serving-prefix-qwen3-0.6b-cpu.md").read_text()
    assert "2 prefixes of 9 random tokens, each before 256 others, 3 out" in page
    assert "| engine | load |  | mean | median | std | p50 | p90 |" in page
    assert page in said.stdout + "\n"
    assert (tmp_path / "serving-prefix-qwen3-0.6b-cpu.png").stat().st_size > 5000


def test_another_server_gets_chats_with_the_key(kiln, server, tmp_path):
    server.key = KEY
    address = server.url.removeprefix("http://")
    file = tmp_path / "turns.json"
    turns = [{"value": "What is seventeen plus twenty-five?"}, {"value": "It is forty-two."}]
    file.write_text(json.dumps([{"conversations": turns}]))
    more = ("--num-prompts", 3, "--request-rate", "50,inf", "--json", tmp_path / "rows.json")
    data = ("--dataset-name", "sharegpt", "--dataset-path", file, "--backend", "openai-chat")
    said = kiln("bench", "serving", "--url", address, "--api-key", KEY, *data, *more)
    assert said.returncode == 0, said.stderr
    report = json.loads((tmp_path / "rows.json").read_text())
    assert [row["load"] for row in report["rows"]] == ["50 a second", "all at once"]
    assert {row["engine"] for row in report["rows"]} == {address}
    for path, _, body in server.asked:
        assert path == "/v1/chat/completions"
        assert body["messages"] == [{"role": "user", "content": turns[0]["value"]}]
    refused = kiln("bench", "serving", "--url", address, "--api-key", "x", *data)
    assert refused.returncode == 1
    assert "every request failed: HTTP/1.1 401 Unauthorized" in refused.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--api-key", "x"), "--url"),
        (("--request-rate", "1,2", "--max-concurrency", "1,2"), "several values to one only"),
        (("--num-prompts", "1,2"), "--num-prompts has 2 numbers for 1"),
        (("--request-rate", 5, "--baseline", "transformers"), "--request-rate"),
        (("--backend", "openai-chat", "--baseline", "transformers"), "token ids"),
        (("--random-input-len", 4000), "up to 4128 tokens, prompt and output, and the context is"),
        (("--dataset-name", "sharegpt"), "--dataset-path"),
        (("--dataset-path", "x.json"), "random reads no file"),
        (("--dataset-name", "sharegpt", "--dataset-path", "/no"), "cannot be read"),
        (("--baseline-python", "x"), "--baseline vllm"),
        (("qwen3-0.6b", "--backend", "openai-chat"), "no tokenizer with a chat template"),
    ],
)
def test_a_load_that_makes_no_sense_is_refused(kiln, flags, words):
    refused = kiln("bench", "serving", *flags)
    assert refused.returncode == 1
    assert words in refused.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--num-prompts", 0), "--num-prompts: '0': must be a whole number"),
        (("--request-rate", "1,0"), "'0': must be a number above 0, or inf"),
        (("--burstiness", "nan"), "'nan': must be a number above 0"),
        (("--random-range-ratio", 1), "must be at least 0 and below 1"),
        (("--metric-percentiles", "50,101"), "percentiles are between 0 and 100"),
        (("--goodput", "itl:5"), "want ttft:MS, tpot:MS or e2el:MS"),
        (("--dataset-name", "sonnet"), "invalid choice"),
    ],
)
def test_a_wrong_number_is_named(kiln, flags, words):
    refused = kiln("bench", "serving", *flags)
    assert refused.returncode == 2
    assert words in refused.stderr


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


def test_a_terminal_shows_a_bar_and_a_file_a_line(monkeypatch):
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        monkeypatch.setattr(sys, "stderr", stream)
        with load_display() as shown:
            for what in ("kiln: 1 at a time", "kiln: 4 at a time"):
                shown.begin(what, 3)
                for _ in range(3):
                    shown.advance()
    assert "kiln: 4 at a time" in terminal.getvalue()
    assert "3/3" in terminal.getvalue()
    assert file.getvalue() == "kiln: 1 at a time: 3 requests\nkiln: 4 at a time: 3 requests\n"


@pytest.mark.deep
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_too(number):
    command = [*module_command("kiln.engine.cli.main"), "bench", "serving", "--device", "cpu"]
    with subprocess.Popen(
        [*command, "--num-prompts", "100000", *map(str, SHORT)], stderr=subprocess.PIPE, text=True
    ) as bench:
        said = ""
        while "1 at a time" not in said and "16 at a time" not in said:
            line = bench.stderr.readline()
            assert line, said
            said += line
        bench.send_signal(number)
        assert bench.wait(60) != 0
    host, port = re.search(r"http://([\d.]+):(\d+)", said).groups()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), 5)
