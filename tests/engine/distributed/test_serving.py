"""`kiln serve` with several ranks: it answers, and one that ends is noticed and replaced."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from depth import at_depth
from metric_lines import by_label

import kiln
from kiln import LLM, SamplingParams
from kiln.engine.cli.local_server import local_server
from kiln.engine.distributed.command import module_command

DEMO = Path(kiln.__file__).resolve().parents[3] / "engine" / "demo"
FLAGS = [str(DEMO), "--device", "cpu", "--dtype", "float32", "--num-kv-blocks", "128"]
PROMPT = [5, 6, 7, 8]
ENDLESS = {"prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True, "stream": True}
SECONDS = 20  # 5 on a machine that is not busy


def answer(url):
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    done = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    return done.json()["choices"][0]["text"]


def alone():
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    llm = LLM(str(DEMO), device="cpu", dtype="float32", num_kv_blocks=128)
    return llm.generate([PROMPT], params)[0].outputs[0].text


def processes():
    """Return the parent and the command of every process that runs."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue  # it has just ended
        if stat[0] != "Z":
            found[int(folder.name)] = (int(stat[1]), command)
    return found


def descendants(pid):
    """Return the processes that a process has started, and those that they have, by command."""
    every, found, last = processes(), {}, {pid}
    while last:
        last = {own for own, (parent, _) in every.items() if parent in last}
        found |= {own: every[own][1] for own in last}
    return found


def is_gone(pid):
    until = time.monotonic() + 5
    while pid in processes() and time.monotonic() < until:
        time.sleep(0.05)
    return pid not in processes()


GONE = [
    ("torch", "follow", signal.SIGKILL),
    ("torch", "follow", signal.SIGSTOP),
    ("torch", "worker", signal.SIGKILL),
    ("torch", "worker", signal.SIGSTOP),
    ("host", "follow", signal.SIGKILL),  # the sums of Kiln's kernels do not wait for it either
    ("host", "follow", signal.SIGSTOP),
]


@pytest.mark.parametrize(("kernels", "victim", "how"), at_depth(GONE[:1], GONE))
def test_clients_hear_of_a_rank_that_is_gone_and_all_ranks_are_replaced(
    monkeypatch, kernels, victim, how
):
    monkeypatch.setenv("KILN_CPU_KERNELS", kernels)
    with local_server([*FLAGS, "--tp", "2"]) as (url, server):
        if how is signal.SIGKILL and victim == "follow":
            assert answer(url) == alone()
            name = "torch" if kernels == "torch" else "fused_all_reduce_add_rms_norm"
            metrics = httpx.get(f"{url}/metrics").text
            assert name in by_label(metrics, "kiln:all_reduces_total", "algorithm")
        ranks = descendants(server.pid)
        assert sum("runner.follow" in command for command in ranks.values()) == 1
        (pid,) = (own for own, command in ranks.items() if f".{victim} " in f"{command} ")
        with httpx.stream("POST", f"{url}/v1/completions", json=ENDLESS, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(pid, how)
            begun = time.monotonic()
            last = [line for line in lines if '"error"' in line]
            assert time.monotonic() - begun < SECONDS
        assert "rank 1" in last[0] if victim == "follow" else "engine process" in last[0]
        until = time.monotonic() + 60
        while not is_ready(url):
            assert time.monotonic() < until, "the engine is not restarted"
            time.sleep(0.2)
        assert answer(url) == alone()
        later = descendants(server.pid)
        assert len(later) == len(ranks)
        assert not set(later) & set(ranks)
        assert all(is_gone(own) for own in ranks)
    assert all(is_gone(own) for own in later)
    assert server.returncode == 0


@pytest.mark.deep
def test_ranks_that_cannot_share_a_model_end_in_one_line():
    command = [*module_command("kiln.engine.cli.main"), "serve", *FLAGS, "--tp", "3", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "error: tensor_parallel_size=3: num_attention_heads is" in done.stderr
    assert "Traceback" not in done.stderr


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def as_torchrun(node, meeting, program):
    """Return a command and an environment; torchrun itself takes as long as Kiln to start."""
    place = {"RANK": node, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": meeting, "TORCHELASTIC_RUN_ID": "none"}
    return program, {name: str(value) for name, value in place.items()}


def by_torchrun(node, meeting, program):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank"]
    torchrun += [str(node), "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
    return [*torchrun, "--master-port", str(meeting), "--no-python", *program], {}


@pytest.mark.parametrize("launch", at_depth([as_torchrun], [as_torchrun, by_torchrun]))
def test_two_machines_by_torchrun_here_both_of_them_this_one(tmp_path, launch):
    port, meeting = free_port(), free_port()
    kiln_serve = [*module_command("kiln.engine.cli.main"), "serve", *FLAGS, "--port", str(port)]
    nodes = []
    for node in range(2):
        command, environ = launch(node, meeting, kiln_serve)
        with (tmp_path / str(node)).open("w") as said:
            nodes.append(subprocess.Popen(command, env=os.environ | environ, stderr=said))
    try:
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + 60
        while not is_ready(url) and time.monotonic() < until:
            time.sleep(0.2)
        assert answer(url) == alone()
        ranks = {pid for node in nodes for pid in descendants(node.pid)}
        nodes[0].terminate()
        assert nodes[1].wait(30) is not None
        nodes[0].wait(30)
        assert all(is_gone(pid) for pid in ranks)
    finally:
        for node in nodes:
            node.kill()


def is_ready(url):
    try:
        return httpx.get(f"{url}/health/ready").status_code == 200
    except httpx.TransportError:
        return False
