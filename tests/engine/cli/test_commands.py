"""The commands do what their help says."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from depth import at_depth

import kiln as package
from kiln.engine.cli import commands, listen, local_server
from kiln.engine.cli.main import build_parser
from kiln.engine.cli.parser import commands_of
from kiln.engine.distributed.command import module_command
from kiln.engine.process.child import EngineProcess

ROOT = Path(package.__file__).parents[1]
SMALL = ("--kv-memory-gib", "0.1")
DEMO = Path(__file__).parents[3] / "engine" / "demo"


def test_every_module_of_the_folder_is_a_command():
    found = commands_of(commands)
    folder = Path(commands.__file__).parent
    modules = {path.stem for path in folder.iterdir() if not path.stem.startswith("__")}
    assert sorted(found) == sorted(modules)
    assert {"serve", "chat", "doctor", "env", "bench", "version"} <= set(found)
    text = build_parser().format_help()
    assert all(command.HELP in " ".join(text.split()) for command in found.values())


HELP = """
import sys
calls, standard = 0, 0

def count(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")

sys.setprofile(count)
import argparse, dataclasses, inspect
standard = calls
from kiln.engine.cli.main import build_parser
build_parser().format_help()
sys.setprofile(None)
heavy = {'torch', 'transformers', 'fastapi', 'zmq', 'httpx', 'rich'} & set(sys.modules)
assert not heavy, heavy
print(standard, calls - standard)
"""


def test_help_does_little_and_imports_nothing_heavy():
    """Beside what the standard library's own modules for a command line do as they are imported."""
    code = f"import sys; sys.path.append({str(ROOT)!r})\n{HELP}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    standard, own = map(int, done.stdout.split())
    assert own < 6 * standard  # some more in a checkout whose modules were not compiled yet


def test_the_api_process_imports_neither_torch_nor_transformers():
    code = (
        f"import sys; sys.path.append({str(ROOT)!r})\n"
        "import kiln.engine.cli.serving\n"
        "heavy = {'torch', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_version(kiln, kiln_process):
    for run, argument in ((kiln_process, "version"), (kiln, "version"), (kiln, "--version")):
        done = run(argument)
        assert (done.returncode, done.stdout) == (0, f"kiln {package.__version__}\n")


def test_env_shows_every_variable_and_its_value(kiln):
    from kiln.cache.env import describe, read
    from kiln.jit_kernels.declare.families import families

    shown = kiln("env", KILN_NORM="torch", COLUMNS="80").stdout
    given, _, every = shown.partition("\n\n")
    assert "  KILN_NORM=torch" in given.splitlines(), "what is set comes first"
    assert "KILN_ROTARY" not in given
    assert max(map(len, every.splitlines())) <= 80
    words = " ".join(every.split())
    for row in describe(families(), read(families())):
        assert row.name in words
        assert row.values in words
        assert " ".join(row.help.split()) in words or "family of kernels" in words


def test_env_is_a_list_for_programs(kiln):
    rows = {row["name"]: row for row in json.loads(kiln("env", "--json", KILN_NORM="jit").stdout)}
    assert (rows["KILN_NORM"]["value"], rows["KILN_NORM"]["changed"]) == ("jit", True)
    assert rows["KILN_NORM"]["values"].split(" | ") == ["auto", "jit", "triton", "torch"]
    assert rows["KILN_ROTARY"]["changed"] is False


def test_doctor_looks_at_everything(kiln, tmp_path):
    result = kiln("doctor", KILN_HOST_COMPILER="no-such-compiler", COLUMNS="200")
    assert result.returncode == 0, "nothing that is missing here keeps Kiln from serving"
    for name in ("Python", "torch", "GPU", "NVRTC", "Triton", "Kernel cache", "Machine"):
        assert f" {name} " in result.stdout
    (line,) = [line for line in result.stdout.splitlines() if "C++ compiler" in line]
    assert line.startswith("missing")
    file = tmp_path / "file"
    file.write_text("")
    broken = kiln("doctor", KILN_KERNEL_CACHE_DIR=str(file / "inside"), COLUMNS="200").stdout
    (line,) = [line for line in broken.splitlines() if "Kernel cache" in line]
    assert line.startswith("missing")


@pytest.mark.parametrize(
    ("host", "local"),
    [
        *(("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True)),
        *(("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("example.org", False)),
    ],
)
def test_only_loopback_hosts_need_no_key(host, local):
    assert listen.is_loopback(host) is local


def test_a_listener_takes_the_port_at_once():
    with listen.open_listener("127.0.0.1", 0) as listener:
        url = listen.url_of(listener)
        port = int(url.rpartition(":")[2])
        assert url == f"http://127.0.0.1:{port}"
        with pytest.raises(Exception, match=f"port {port}"):
            listen.open_listener("127.0.0.1", port)


def test_chat_answers_each_line_of_a_pipe_and_stops_at_max_tokens(kiln):
    lines = ["What is 17 + 25?", "/reset", "What is 2 + 3?", "Who are you?", "/quit", "never"]
    result = kiln("chat", *SMALL, "--max-tokens", 4, stdin="\n".join(lines))
    assert result.returncode == 0, result.stderr
    *sums, short = result.stdout.splitlines()
    assert sums == ["42", "5"]
    assert 0 < len(short) < len("I am a tiny demo model")


@pytest.mark.deep  # a process of its own, not this one
def test_chat_answers_as_a_command(kiln_process):
    result = kiln_process("chat", stdin="What is 17 + 25?\n/reset\nWhat is 2 + 3?\n/quit\nnever\n")
    assert (result.returncode, result.stdout) == (0, "42\n5\n"), result.stderr


def test_chat_refuses_a_bad_value_before_it_starts_an_engine(kiln, monkeypatch):
    monkeypatch.setattr(EngineProcess, "spawn", None)
    bad = kiln("chat", "--temperature", -1, stdin="hi\n")
    assert bad.returncode == 1
    assert "temperature must be between 0 and 100" in bad.stderr


@pytest.fixture(scope="module")
def served():
    """``kiln serve`` as a user starts it, and what it said up to the line to try."""
    command = [*module_command("kiln.engine.cli.main"), "serve", "--port", "0", *SMALL]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        lines = []
        while not (lines and lines[-1].startswith("curl ")):
            line = server.stdout.readline()
            assert line, server.stderr.read()
            lines.append(line)
        yield SimpleNamespace(process=server, said="".join(lines))
        server.kill()


def test_bench_counts_every_token(kiln, tmp_path, served, monkeypatch):
    url = re.search(r"http://[\d.:]+", served.said)[0]
    if at_depth(True, False):  # no second server
        monkeypatch.setattr(
            local_server,
            "local_server",
            lambda flags, timeout, log: nullcontext((url, served.process)),
        )
    load = ("--num-prompts", 4, "--max-concurrency", 2)
    load += ("--random-input-len", 20, "--random-output-len", 5)
    result = kiln("bench", "serving", *SMALL, *load, "--output", tmp_path)
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "serving-demo-cpu.json").read_text())
    (row,) = report["rows"]
    assert (row["requests"], row["output_tokens"]) == (4, 20)
    assert row["output_tokens_per_s"] == pytest.approx(20 / row["seconds"])
    assert 0 < row["median_ttft_ms"] <= row["p99_ttft_ms"]
    assert row["failures"] == {}
    assert {"hardware", "versions", "command"} <= set(report)
    table = (tmp_path / "serving-demo-cpu.md").read_text()
    assert table in result.stdout + "\n"


def test_serve_says_what_where_and_one_line_to_try(served):
    """The line that is printed works as it stands, and Ctrl-C ends the server with code 0."""
    assert f"Kiln {package.__version__} serves demo: " in served.said
    budget = "steps of 2048 tokens (the default on a CPU)"
    assert f"on cpu · context 2048 tokens · {budget} · " in served.said
    line = served.said.splitlines()[-1]
    curl = ["bash", "-c", line.replace("curl ", "curl -sS -m 20 ", 1)]
    answer = subprocess.run(curl, capture_output=True, text=True, timeout=120)
    assert '"content":"42"' in answer.stdout, answer
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(15) == 0
    loading = served.process.stderr.read()
    assert "importing torch …" in loading
    assert "Traceback" not in loading


def test_an_fp8_pool_and_weights_quantised_at_load_have_kernels_of_their_own_to_warm_up(kiln):
    asked = ("warmup", "--arch", "sm_90a", "--dry-run")
    plain = set(kiln(*asked, "--model", DEMO).stdout.splitlines())
    fp8 = set(kiln(*asked, "--model", DEMO, "--kv-cache-dtype", "fp8").stdout.splitlines())
    own = {name.partition("[")[0] for name in fp8 - plain}
    assert own == {"paged_attention", "paged_prefill", "rope_store"}
    assert all("e4m3" in name for name in fp8 - plain)
    refused = kiln(*asked, "--kv-cache-dtype", "fp8")
    assert (refused.returncode, "--kv-cache-dtype needs --model" in refused.stderr) == (1, True)
    at_load = {*kiln(*asked, "--model", DEMO, "-q", "fp8").stdout.splitlines()}
    own = {name.partition("[")[0] for name in at_load - plain}
    products = {"skinny_gemm", "quantized_gemm"}
    rounding = {"quantize", "fused_add_rms_norm_quant", "silu_and_mul_quant"}
    assert own == {"dequantize", *products, *rounding}
    other = kiln(*asked, "--model", DEMO, "--hf-overrides", '{"dtype": "float16"}')
    assert any("fp16" in name for name in {*other.stdout.splitlines()} - plain)
    assert not any("bf16" in name for name in other.stdout.splitlines())
    for flag, value in (
        ("--quantization", "fp8"),
        ("--hf-overrides", "{}"),
        ("--revision", "a"),
        ("--dtype", "fp16"),
    ):
        refused = kiln(*asked, flag, value)
        assert (refused.returncode, f"{flag} needs --model" in refused.stderr) == (1, True)
    half = kiln(*asked, "--model", DEMO, "--dtype", "half")
    assert half.stdout == other.stdout
