"""Adapters loaded and unloaded over HTTP, while requests run."""

from __future__ import annotations

import json
import shutil
import threading
import time

import httpx
import pytest
from metric_lines import by_label, value

from kiln.engine.cli.local_server import local_server
from kiln.engine.text.tokenizer import Tokenizer

PATH = "/v1/completions"
LOAD, UNLOAD, LIST = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/lora_adapters"


@pytest.fixture(scope="module")
def root(made, tmp_path_factory):
    """A folder of adapters, with a link to one outside and one that is damaged."""
    root = tmp_path_factory.mktemp("root")
    for form in ("rank-1", "patterns", "rank-64", "embedding-and-head"):
        shutil.copytree(made("llama").adapters[form], root / form)
    (root / "link").symlink_to(made("llama").adapters["head"])
    sly = root / "sly"
    shutil.copytree(made("llama").adapters["head"], sly)
    weights = sly / "adapter_model.safetensors"
    weights.unlink()
    weights.symlink_to(made("llama").adapters["head"] / weights.name)
    (root / "loop").symlink_to(root / "loop")
    broken = root / "broken"
    shutil.copytree(made("llama").adapters["rank-1"], broken)
    config = json.loads((broken / "adapter_config.json").read_text())
    (broken / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    return root


@pytest.fixture(scope="module")
def model(made, tokenizer_folders, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "tiny"
    shutil.copytree(made("llama").folder, folder)
    shutil.copytree(tokenizer_folders["byte-level"], folder, dirs_exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def server(made, root, model):
    flags = [
        "--device",
        "cpu",
        "--num-kv-blocks",
        "64",
        "--max-loras",
        "2",
        "--max-lora-rank",
        "32",
    ]
    modules = ["--lora-modules", f"first={made('llama').adapters['v-alone']}"]
    with (
        local_server([str(model), *flags, *modules, "--lora-root", str(root)], timeout=60) as (
            url,
            _,
        ),
        httpx.Client(base_url=url, timeout=120) as client,
    ):
        yield client


@pytest.fixture
def text(answers, model):
    """Return a function from an adapter's form to (body, PEFT's text)."""
    tokenizer = Tokenizer.load(model)

    def find(form):
        for prompt, own, tokens in zip(*answers("llama"), strict=True):
            if own == form:
                body = {"prompt": prompt, "max_tokens": len(tokens), "temperature": 0}
                return {**body, "ignore_eos": True}, tokenizer.decode(tokens)
        raise AssertionError(form)

    return find


def check(server, name, form, text):
    body, wanted = text(form)
    answer = server.post(PATH, json={**body, "model": name})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == wanted


def refused(answer, status, *parts):
    assert answer.status_code == status, answer.text
    message = answer.json()["error"]["message"]
    for part in parts:
        assert part in message


def names(server):
    return [card["lora_name"] for card in server.get(LIST).json()["data"]]


def unload(server, name, **body):
    return server.post(UNLOAD, json={"lora_name": name, **body})


def test_load_use_unload_and_the_same_name_for_another(server, root, text):
    for form in ("rank-1", "patterns", "embedding-and-head"):
        begun = time.monotonic()
        answer = server.post(LOAD, json={"lora_name": "mine", "lora_path": form})
        assert time.monotonic() - begun < 0.9, "an idle engine wakes up"
        assert answer.status_code == 200, answer.text
        card = answer.json()
        assert (card["lora_name"], card["lora_path"], card["pinned"]) == ("mine", form, False)
        assert card["num_bytes"] > 1000
        check(server, "mine", form, text)
        check(server, "tiny", None, text)
        check(server, "tiny:first", "v-alone", text)
        assert names(server) == ["first", "mine"]
        models = [card["id"] for card in server.get("/v1/models").json()["data"]]
        assert models == ["tiny", "first", "mine"]
        assert unload(server, "mine").json() == {"lora_name": "mine", "status": "unloaded"}
        refused(server.post(PATH, json={"prompt": [5], "model": "mine"}), 404, "'mine'")
        assert names(server) == ["first"]
    absolute = {"lora_name": "mine", "lora_path": str(root / "rank-1"), "pinned": True}
    assert server.post(LOAD, json=absolute).json()["pinned"] is True
    refused(server.post(LOAD, json={"lora_name": "two", "lora_path": "patterns", "pinned": True}),
            400, "leaves no room to the others")  # fmt: skip
    check(server, "mine", "rank-1", text)
    unload(server, "mine")


@pytest.mark.parametrize(
    ("status", "body", "part"),
    [
        (400, {"lora_name": "first", "lora_path": "rank-1"}, "the name is taken"),
        (400, {"lora_name": "tiny", "lora_path": "rank-1"}, "is a name of the model"),
        (400, {"lora_name": "a:b", "lora_path": "rank-1"}, "LoRA adapter name"),
        (400, {"lora_name": "a", "lora_path": "nothing"}, "is not a folder"),
        (400, {"lora_name": "a", "lora_path": "broken"}, "use_dora is True, DoRA"),
        (400, {"lora_name": "a", "lora_path": "rank-64"}, "rank 64, above max_lora_rank=32"),
        (400, {"lora_name": "a", "lora_path": "loop"}, "lora_path"),
        (400, {"lora_name": "a", "lora_path": "x\0y"}, "lora_path"),
        (400, {"lora_name": "a", "lora_path": "n" * 300}, "LoRA adapter 'a'"),
        (403, {"lora_name": "a", "lora_path": "../rank-1"}, "outside of lora_root"),
        (403, {"lora_name": "a", "lora_path": "/etc"}, "outside of lora_root"),
        (403, {"lora_name": "a", "lora_path": "link"}, "outside of lora_root"),
        (403, {"lora_name": "a", "lora_path": "sly"}, "outside of lora_root"),
        (400, {"lora_name": "a"}, "lora_path: is required"),
        (400, {"lora_name": "a", "lora_path": "rank-1", "pined": True}, "did you mean pinned"),
        (400, {"lora_name": "a", "lora_path": "rank-1", "pinned": "yes"}, "true or false"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_its_reason(server, status, body, part, text):
    refused(server.post(LOAD, json=body), status, part)
    assert names(server) == ["first"]
    check(server, "first", "v-alone", text)


def test_what_cannot_be_unloaded(server):
    refused(unload(server, "nobody"), 404, "'nobody' is not loaded; loaded: first")
    refused(unload(server, "first", timeout_s=-1), 400, "timeout_s")
    assert names(server) == ["first"]


def test_unloading_waits_for_its_requests_and_gives_up_after_the_timeout(server, text):
    assert server.post(LOAD, json={"lora_name": "busy", "lora_path": "patterns"}).is_success
    body = {"prompt": [5], "model": "busy", "max_tokens": 90, "ignore_eos": True, "stream": True}
    with server.stream("POST", PATH, json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        refused(unload(server, "busy", timeout_s=0), 409, "1 requests still use it")
        check(server, "busy", "patterns", text)
        ended = []
        thread = threading.Thread(target=lambda: ended.append(unload(server, "busy")))
        thread.start()
        assert list(lines)[-2].endswith("[DONE]"), "it reads to its end"
        thread.join()
    assert ended[0].status_code == 200
    assert names(server) == ["first"]


def test_metrics_by_adapter(server, text):
    assert server.post(LOAD, json={"lora_name": "seen", "lora_path": "patterns"}).is_success
    check(server, "seen", "patterns", text)
    deadline = time.monotonic() + 10
    tokens = ("kiln:lora_generation_tokens_total", "adapter")
    while by_label(metrics := server.get("/metrics").text, *tokens).get("seen") != 8:
        assert time.monotonic() < deadline, metrics
        time.sleep(0.05)
    assert value(metrics, "kiln:lora_on_device", adapter="seen") == 1
    assert value(metrics, "kiln:lora_requests_running", adapter="seen") == 0
    assert value(metrics, "kiln:lora_placements_total", adapter="seen") == 1
    assert value(metrics, "kiln:num_lora_evictions_total") >= 0
    assert [card["on_device"] for card in server.get(LIST).json()["data"]][-1] is True
    unload(server, "seen")


@pytest.mark.deep
def test_without_a_root_nothing_is_loaded_or_unloaded(made, model):
    modules = ["--lora-modules", f"first={made('llama').adapters['v-alone']}"]
    flags = ["--device", "cpu", "--num-kv-blocks", "8"]
    with (
        local_server([str(model), *flags, *modules], timeout=60) as (url, _),
        httpx.Client(base_url=url, timeout=120) as client,
    ):
        refused(client.post(LOAD, json={"lora_name": "a", "lora_path": "b"}), 403, "--lora-root")
        refused(unload(client, "first"), 403, "--lora-root")
        assert names(client) == ["first"]
