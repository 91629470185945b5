"""One real server, on a tiny random model, for all of the tests here."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import ExitStack, contextmanager

import httpx
import pytest
import torch
from embedding_folders import save_random, write_modules
from metric_lines import value

from kiln.engine.cli.local_server import local_server
from kiln.engine.text.tokenizer import Tokenizer

CONTEXT = 128
TINY_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "vocab_size": 400,
    "eos_token_id": 2,
}


@pytest.fixture(scope="session")
def model_folder(tokenizer_folders, tmp_path_factory):
    """A config and a tokenizer; the weights are dummies."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    shutil.copytree(tokenizer_folders["byte-level"], folder)
    (folder / "config.json").write_text(json.dumps(TINY_QWEN3))
    # Half of the vocabulary ends an answer, so that one drawn at random soon does.
    generation = {"temperature": 0.5, "top_k": 50, "eos_token_id": list(range(2, 400, 2))}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder):
    return Tokenizer.load(model_folder)


@pytest.fixture(scope="session")
def start(model_folder):
    """Start a server with more flags: ``with start("--port", "0") as (client, process)``."""

    @contextmanager
    def starter(*flags, model=None, program=None):
        arguments = [
            *(str(model or model_folder), "--load-format", "dummy", "--num-kv-blocks", "64"),
            *("--device", "cpu"),
        ]
        os.environ["OMP_NUM_THREADS"] = "1"
        with (
            local_server([*arguments, *flags], 300, program) as (url, process),
            httpx.Client(base_url=url, timeout=120) as client,
        ):
            yield client, process

    return starter


@pytest.fixture(scope="session")
def server_and_process(start):
    """The shared server: an httpx client, and the process of the API."""
    with start("--max-num-seqs", "8", "--max-waiting", "40") as (client, process):
        yield client, process


KEY = "s3cret-ключ"
NAMES = ["first", "second", "first:third"]  # of which one looks like "base:adapter"


@pytest.fixture(scope="session")
def guarded(start, tmp_path_factory):
    """A second server, with what the first one lacks: a key, names, a chat template, and graphs."""
    folder = tmp_path_factory.mktemp("flags")
    key, template = folder / "key", folder / "template.jinja"
    key.write_text(KEY + "\n", encoding="utf-8")
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    flags = ["--api-key-file", str(key), "--chat-template", str(template)]
    flags += ["--ignore-unknown-fields", "--served-model-name", *NAMES]
    flags += ["--max-num-seqs", "3", "--cuda-graph-bs", "2", "--max-num-batched-tokens", "20"]
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:  # for this server alone
            patch.setenv("KILN_CPU_GRAPHS", "emulate")
            patch.setenv("KILN_GRAPH_VERIFY", "off")
            client, _ = stack.enter_context(start(*flags))
        yield client


@pytest.fixture(scope="session")
def opened(guarded):
    """A client of the second server that has its key."""
    headers = {b"Authorization": f"Bearer {KEY}".encode()}
    with httpx.Client(base_url=guarded.base_url, timeout=120, headers=headers) as client:
        yield client


@pytest.fixture(scope="session")
def server(server_and_process):
    """The shared server, as an httpx client."""
    return server_and_process[0]


@pytest.fixture(scope="session")
def embedding_server(start, tokenizer_folders, tmp_path_factory):
    """A server of a sentence-transformers folder that pools the mean: a client, and the network.

    Its tokenizer begins a text with token 1. Token 2 is broken: its weights are NaN.
    """
    folder = tmp_path_factory.mktemp("models") / "tiny-embedding"
    shutil.copytree(tokenizer_folders["llama"], folder)
    network = save_random(folder, vocab_size=600)
    with torch.no_grad():
        network.embed_tokens.weight[2] = float("nan")
    network.save_pretrained(folder)
    write_modules(folder, "mean_tokens")
    flags = ["--load-format", "auto", "--max-num-seqs", "8", "--max-waiting", "140"]
    with start(*flags, model=folder) as (client, _):
        yield client, network


@pytest.fixture
def api(server):
    """The shared server; after the test it still answers, and holds no block."""
    yield server
    answer = server.post("/v1/completions", json={"prompt": [5], "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    wait_until_idle(server)


def gauge(client, name):
    """One number of /metrics."""
    return value(client.get("/metrics").text, f"kiln:{name}")


def wait_until_idle(client):
    """Wait until every block is free again."""
    import time

    deadline = time.monotonic() + 60
    while gauge(client, "kv_blocks_used") or gauge(client, "num_requests_running"):
        assert time.monotonic() < deadline, "the engine still holds blocks"
        time.sleep(0.02)


@pytest.fixture
def metric():
    return gauge


@pytest.fixture
def until_idle():
    return wait_until_idle


def _events(response):
    """The JSON of a stream's events; it must end with [DONE]."""
    data = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


@pytest.fixture
def stream():
    """POST a body with stream set and return its events."""

    def post(client, path, body):
        with client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            return _events(response)

    return post
