"""Tiny models, and engines of several ranks, which are threads or processes."""

from __future__ import annotations

import queue
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from kiln import LLM, SamplingParams
from kiln.engine.distributed.calls import encode_call
from kiln.engine.distributed.channel import Kind
from kiln.engine.distributed.command import private_folder
from kiln.engine.runner import follow, load

SIZES = {
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}


@pytest.fixture(scope="session")
def model_of(tmp_path_factory):
    """Return a function that writes a model of a family whose tokens depend on all before them."""

    made: dict[str, tuple[Path, Any]] = {}

    def make(name: str, family: str = "Llama", **more: Any) -> tuple[Path, Any]:
        import transformers

        if name in made:
            return made[name]

        torch.manual_seed(3)
        config = getattr(transformers, f"{family}Config")(**{**SIZES, **more})
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        made[name] = (folder, model)
        return made[name]

    return make


class ThreadInbox:
    """A follower's connection to rank 0, both of them threads of this process."""

    def __init__(self, replies: Any) -> None:
        self.messages: Any = queue.SimpleQueue()
        self.reply = replies

    def use_check(self, check: Any) -> None:
        pass

    def next(self) -> tuple[Kind, bytes]:
        return self.messages.get()


class ThreadFollowers:
    """What Followers is, with a thread for each follower instead of a process."""

    def __init__(self, size: int) -> None:
        self.size, self.folder, self.error = size, private_folder(), None
        self._replies: Any = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._inboxes: list[ThreadInbox] = []

    @classmethod
    def spawn(cls, size: int, module: str, on_lost: Any = None) -> ThreadFollowers:
        return cls(size)

    def start(self, told: Any) -> None:
        for rank in range(1, self.size):
            inbox = ThreadInbox(lambda error, rank=rank: self._replies.put((rank, error)))
            thread = threading.Thread(target=self._follow, args=(told, rank, inbox), daemon=True)
            self._inboxes.append(inbox)
            self._threads.append(thread)
            thread.start()

    def _follow(self, told: Any, rank: int, inbox: ThreadInbox) -> None:
        try:
            config, group = follow._spawned(told, rank)
            follow.follow(inbox, config, group)
            group.close()
        except BaseException as error:
            self.error = error

    def send(self, kind: Kind, content: bytes = b"") -> None:
        for inbox in self._inboxes:
            inbox.messages.put((kind, content))

    def call(self, method: Any, *arguments: Any) -> None:
        self.send(Kind.CALL, encode_call(method, *arguments))

    def replies(self) -> list[tuple[int, str]]:
        told = [self._replies.get(timeout=120) for _ in self._inboxes]
        return [one for one in told if one[1] is not None]

    def use_abort(self, abort: Any) -> None:
        pass

    def declare_ready(self) -> None:
        pass

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def blame(self, error: Exception) -> BaseException:
        return self.error or error

    def stop(self) -> None:
        self.send(Kind.STOP)

    def close(self) -> None:
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()
        self._threads.clear()
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def llm_of():
    """Return a function that starts an engine with some ranks; all end with the test."""
    made = []

    def start(folder: Path, world: int, **settings: Any) -> LLM:
        sizes = {"max_model_len": 64, "num_kv_blocks": 64, **settings}
        made.append(
            LLM(str(folder), device="cpu", dtype="float32", tensor_parallel_size=world, **sizes)
        )
        return made[-1]

    yield start
    for llm in made:
        llm.close()


@pytest.fixture
def in_threads(monkeypatch):
    """Ranks are threads: all but the processes and sockets is real, and starts at once."""
    monkeypatch.setattr(load, "Followers", ThreadFollowers)


@pytest.fixture
def prompts():
    return [[(7 * place + 3 * size + 1) % 300 for place in range(size)] for size in (1, 5, 16, 33)]


@pytest.fixture
def tokens_of(prompts):
    """Return a function from an engine to its greedy answers."""

    def tokens(llm: LLM, count: int = 8, **more: Any) -> list[list[int]]:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=count), **more)
        return [list(one.outputs[0].token_ids) for one in outputs]

    return tokens
