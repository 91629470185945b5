"""Ranks that are processes of this machine: what they run, and how they fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kiln
from kiln.engine.errors import ConfigError, DeviceError, EngineClosedError, ModelError
from kiln.engine.runner import load

ROOT = Path(kiln.__file__).resolve().parents[1]
PROGRAM = """
import json, sys
from kiln import LLM, SamplingParams
folder, prompts, dtype = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
params = SamplingParams(temperature=0, max_tokens=8, logprobs=0)
found = []
for world in (1, 2):
    sizes = {"num_kv_blocks": 64, "max_num_batched_tokens": 48, "max_num_seqs": 4}
    with LLM(folder, device="cpu", dtype=dtype, tensor_parallel_size=world, **sizes) as llm:
        outputs = [one.outputs[0] for one in llm.generate(prompts, params)]
        stats = llm.core.stats()
        found.append(
            {
                "tokens": [list(one.token_ids) for one in outputs],
                "first": [next(iter(one.logprobs[0].values())).logprob for one in outputs],
                "replays": sum(stats.graph_replays.values()),
                "steps": stats.steps,
                "sums": dict(stats.all_reduces),
                "attention": type(llm.core.runner.loaded.attention).__name__,
                "compiled": type(llm.core.runner.loaded.model).__name__,
            }
        )
print(json.dumps(found))
"""
GRAPHS = {"KILN_CPU_GRAPHS": "emulate", "KILN_GRAPH_STRICT": "1"}


def alone_and_with_two_ranks(folder, prompts, dtype, **environ):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), json.dumps(prompts), dtype],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.deep
def test_graphs_of_compiled_pieces(model_of, prompts):
    """A replayed graph sums too, and every rank replays the graph that rank 0 chose."""
    folder, _ = model_of("biases", "Llama", attention_bias=True, mlp_bias=True)
    environ = {**GRAPHS, "KILN_COMPILE": "eager"}
    alone, two = alone_and_with_two_ranks(folder, prompts, "float32", **environ)
    assert two["tokens"] == alone["tokens"]
    assert two["replays"] == two["steps"] > 0
    assert two["sums"]["torch"] > 5 * two["steps"]
    assert two["compiled"] == "CompiledModel"


@pytest.mark.deep
def test_the_kernels_own_source_in_float16(model_of, prompts):
    """Attention by kernels for the heads of a rank, in graphs; sums of halves are rounded."""
    folder, _ = model_of("wide-heads", "Qwen3", head_dim=64, num_attention_heads=2)
    environ = {**GRAPHS, "KILN_CPU_KERNELS": "host"}
    alone, two = alone_and_with_two_ranks(folder, prompts, "float16", **environ)
    assert two["attention"] == "KernelAttention"
    assert two["replays"] == two["steps"] > 0
    assert two["first"] == pytest.approx(alone["first"], abs=0.1)


FOLLOWERS = {
    "never comes": ("sys.exit(3)", ConfigError, "rank 1 .* exited with code 3 before it had"),
    "dies while ranks connect": (
        "inbox.run(lambda told: os.kill(os.getpid(), 9))",
        DeviceError,
        "rank 1 of 2 .* was killed by signal 9",
    ),
    "cannot load": (
        "inbox.run(lambda told: fail(ModelError('/m: shard 2 is missing')))",
        ModelError,
        "rank 1 of 2 .*: /m: shard 2 is missing",
    ),
    "stops on a fault": (
        "inbox.run(lambda told: fail(KeyError('x')))",
        DeviceError,
        "rank 1 of 2 .* stopped on KeyError: 'x'",
    ),
}
FOLLOWER = """
import os, sys
from kiln.engine.distributed.inbox import Inbox
from kiln.engine.errors import ModelError

def fail(error):
    raise error

def main(arguments):
    inbox = Inbox(arguments[1], int(arguments[0])) if "inbox" in {code!r} else None
    {code}
"""


@pytest.mark.parametrize("how", FOLLOWERS)
def test_a_follower_that_fails_at_the_start_ends_the_load_at_once(
    model_of, llm_of, tmp_path, monkeypatch, how
):
    code, error, says = FOLLOWERS[how]
    (tmp_path / "odd_follower.py").write_text(FOLLOWER.format(code=code))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(load, "FOLLOWER", "odd_follower")
    folder, _ = model_of("plain")
    begun = time.monotonic()
    with pytest.raises(error, match=says):
        llm_of(folder, 2)
    assert time.monotonic() - begun < 10


def test_a_step_that_rank_0_alone_cannot_run_ends_the_engine(model_of, llm_of, tokens_of, capfd):
    """The others wait for its sums: there is no other request to go on with."""
    folder, _ = model_of("plain")
    llm = llm_of(folder, 2)
    (follower,) = llm.core.runner._followers._members

    def fail(*arguments):
        raise ValueError("no such row")

    llm.core.runner.executor._compute = fail
    for _ in range(2):  # the next call too
        with pytest.raises(DeviceError, match=r"rank 0 of 2 failed in a step .*: no such row"):
            tokens_of(llm)
    begun = time.monotonic()
    llm.close()
    assert time.monotonic() - begun < 4  # it is not killed after a wait
    assert follower.child.returncode == 0
    assert "Traceback" not in capfd.readouterr().err


FAILS = """
import sys
from kiln import LLM, SamplingParams
from kiln.engine.runner.executor import Executor

compute, calls = Executor._compute, []

def fail(self, batch, key):  # the other rank is another process, and runs the step
    calls.append(batch)
    if len(calls) == 3:
        raise MemoryError("rank 0 alone")
    return compute(self, batch, key)

llm = LLM(sys.argv[1], device="cpu", dtype="float32", tensor_parallel_size=2, num_kv_blocks=64,
          disable_overlap_schedule=sys.argv[2] == "off")
Executor._compute = fail
for prompts in ([[1], [2]], [[3]]):
    try:
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20))
    except Exception as error:
        print(type(error).__name__, error)
"""


@pytest.mark.deep
@pytest.mark.parametrize("overlap", ["on", "off"])
def test_after_a_step_that_failed_on_rank_0_the_next_call_raises_and_the_program_ends(
    model_of, overlap
):
    """With overlap the step behind the failed one is launched already."""
    folder, _ = model_of("plain")
    command = [sys.executable, "-c", FAILS, str(folder), overlap]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100)
    first, again = done.stdout.splitlines()
    assert first.startswith("DeviceError rank 0 of 2 failed in a step of 2 tokens")
    assert again == first
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_after_an_interrupt_in_a_step_the_engine_says_that_it_is_broken(model_of, llm_of):
    """On a GPU, Ctrl-C can come when the other ranks have been told of a step."""
    folder, _ = model_of("plain")
    llm = llm_of(folder, 2, disable_overlap_schedule=True)  # steps run in this thread

    def interrupt(*arguments):
        raise KeyboardInterrupt

    run, llm.core.runner.executor._compute = llm.core.runner.executor._compute, interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2]])
    llm.core.runner.executor._compute = run
    with pytest.raises(DeviceError, match=r"was interrupted in a step .* start Kiln again"):
        llm.generate([[1, 2]])


def test_after_close_no_process_is_left_and_no_step_runs(model_of, llm_of, tokens_of):
    folder, _ = model_of("plain")
    llm = llm_of(folder, 2)
    (follower,) = llm.core.runner._followers._members
    assert follower.child.poll() is None
    first = tokens_of(llm)
    assert first == tokens_of(llm_of(folder, 1))
    llm.close()
    llm.close()
    assert follower.child.returncode == 0
    with pytest.raises(EngineClosedError):
        tokens_of(llm)
