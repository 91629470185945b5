"""The life of an LLM in its process: threads that share it, forks, its end, and the next one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
from depth import at_depth

import kiln
from kiln import LLM, SamplingParams
from kiln.engine import core
from kiln.engine.errors import EngineClosedError

ROOT = Path(kiln.__file__).resolve().parents[1]
DEMO = Path(__file__).resolve().parents[2] / "engine" / "demo"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
CHAT = [{"role": "user", "content": "Hello"}]


def load(**settings):
    return LLM(
        str(DEMO), device="cpu", dtype="float32", num_kv_blocks=50, max_model_len=128, **settings
    )


@pytest.fixture(scope="module")
def llm():
    with load() as made:
        yield made


def test_calls_from_several_threads_wait_for_each_other(llm):
    prompts = [[index + 1, 2, 3] for index in range(6)]
    wanted = [llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for prompt in prompts]
    found, errors = {}, []

    def work(own):
        try:
            for index in own:
                output = llm.generate([prompts[index]], GREEDY)[0]
                found[index] = output.outputs[0].token_ids
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(range(k, 6, 3),)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert [found.get(index) for index in range(6)] == wanted
    assert llm.core.stats().kv_blocks_used == 0


@pytest.mark.parametrize("call", ["generate", "chat", "close"])
def test_a_fork_of_the_process_is_told_to_make_its_own(llm, call):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        said = b"no error"
        try:
            if call == "close":
                llm.close()
            else:
                getattr(llm, call)(CHAT if call == "chat" else "a", GREEDY)
        except EngineClosedError as error:
            said = str(error).encode()
        finally:
            os.write(write, said)
            os._exit(0)
    os.close(write)
    said = os.read(read, 1000).decode()
    os.close(read)
    os.waitpid(child, 0)
    if call == "close":
        assert said == "no error"
    else:
        assert f"belongs to process {os.getpid()}" in said
        assert "make an LLM after the fork" in said
    assert llm.generate([[1]], GREEDY)[0].outputs[0].finish_reason == "length"


KINDS = {
    "torch": {},
    "graphs": {"KILN_CPU_GRAPHS": "emulate"},
    "pieces": {"KILN_COMPILE": "eager"},
    "kernels": {"KILN_CPU_KERNELS": "host", "KILN_CPU_GRAPHS": "emulate"},
}
# In a process of its own, whose environment chooses what runs. Fake tensors have no memory.
TWICE = """
import gc, sys, threading, weakref
import torch
from torch._subclasses.fake_tensor import FakeTensor
from kiln import LLM, SamplingParams

def held():
    tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
    storages = [one.untyped_storage() for one in tensors if not isinstance(one, FakeTensor)]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())

folder = sys.argv[1]
for number in range(2):
    gc.enable()
    llm = LLM(folder, device="cpu", dtype="float32", num_kv_blocks=4000, max_model_len=64,
              max_num_seqs=2, max_num_batched_tokens=4,
              lora_modules={"sentence": folder + "/adapters/sentence"})
    [output] = llm.generate([[1, 2]], SamplingParams(max_tokens=4, logprobs=1), lora="sentence")
    open = held()
    gc.disable()  # close itself must do it
    llm.close()
    llm.close()
    print(open, held(), *[one.name for one in threading.enumerate() if "step" in one.name])
"""


@pytest.mark.parametrize("kind", at_depth(["torch"], list(KINDS)))
def test_close_gives_all_memory_and_threads_back(kind, tmp_path):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **KINDS[kind]}
    if kind == "pieces":  # an empty cache, so that the first start traces the model
        environ["KILN_KERNEL_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-W", "ignore", "-c", TWICE, str(DEMO)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    for line in done.stdout.splitlines():
        opened, closed, *threads = line.split()
        assert int(opened) > 150_000_000  # bytes
        assert int(closed) < 100_000
        assert threads == []
    assert len(done.stdout.splitlines()) == 2


def test_a_closed_llm_says_so_and_another_one_works():
    first = load()
    model = weakref.ref(first.core.runner.loaded.model)
    wanted = first.generate([[1, 2]], GREEDY)[0].outputs[0].token_ids
    first.close()
    assert model() is None
    for call in (lambda: first.generate("a", GREEDY), lambda: first.chat(CHAT, GREEDY)):
        with pytest.raises(EngineClosedError, match="this LLM was closed: make a new one"):
            call()
    with load() as second:
        assert second.generate([[1, 2]], GREEDY)[0].outputs[0].token_ids == wanted


def test_requests_without_a_seed_differ_from_one_engine_to_the_next(fake_runner, monkeypatch):
    monkeypatch.setattr(core, "load_runner", lambda config, progress: fake_runner())
    free = SamplingParams(max_tokens=4)

    def seeds(**settings):
        with load(skip_tokenizer_init=True, **settings) as llm:
            return [one.outputs[0].seed for one in llm.generate([[1], [2]], free)]

    one, two = seeds(), seeds()
    assert len({*one, *two}) == 4
    assert seeds(seed=7) == seeds(seed=7)
