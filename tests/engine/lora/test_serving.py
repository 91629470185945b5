"""Adapters over HTTP: by name, mixed, streamed; a name that is not served is never the base."""

from __future__ import annotations

import asyncio
import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from one_life import OneLife

from kiln.engine.cli.local_server import ServerStartError, local_server
from kiln.engine.cli.main import main
from kiln.engine.config import EngineConfig, KVConfig, LoRAConfig, LoRAModule, ModelConfig
from kiln.engine.errors import AdapterError, AdapterNotFoundError, ConfigError
from kiln.engine.process.adapter_calls import AdapterCalls
from kiln.engine.process.child import EngineProcess
from kiln.engine.process.client import EngineClient
from kiln.engine.process.token_stream import TokenStream
from kiln.engine.process.wire import ModelInfo
from kiln.engine.requests.adapter_job import AdapterInfo
from kiln.engine.requests.request import NewRequest
from kiln.engine.requests.sampling_params import SamplingParams
from kiln.engine.server.app import create_app
from kiln.engine.server.serving import ServerSettings
from kiln.engine.text.tokenizer import Tokenizer

FORMS = ["rank-64", "patterns", "embedding-and-head"]
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def folder(made, tokenizer_folders, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "tiny"
    shutil.copytree(made("llama").folder, folder)
    shutil.copytree(tokenizer_folders["byte-level"], folder, dirs_exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def server(made, folder):
    modules = [f"{form}={made('llama').adapters[form]}" for form in FORMS]
    flags = ["--device", "cpu", "--num-kv-blocks", "64", "--lora-modules", *modules]
    with (
        local_server([str(folder), *flags], timeout=60) as (url, _),
        httpx.Client(base_url=url, timeout=120) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def cases(answers, folder):
    """Bodies of requests with the text that PEFT answers, and the adapter."""
    tokenizer = Tokenizer.load(folder)
    found = []
    for prompt, form, tokens in zip(*answers("llama"), strict=True):
        if form is None or form in FORMS:
            body = {"prompt": prompt, "max_tokens": len(tokens), "temperature": 0}
            found.append(({**body, "ignore_eos": True}, form, tokenizer.decode(tokens)))
    return found


def text_of(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_each_adapter_answers_as_peft_and_gives_its_name(server, cases):
    for body, form, text in cases:
        names = [None, "tiny"] if form is None else [form, f"tiny:{form}"]
        for name in names:
            answer = server.post(PATH, json={**body, "model": name})
            assert text_of(answer) == text
            assert answer.json()["model"] == (form or "tiny")


def test_streams_of_all_adapters_at_once(server, cases):
    def read(case):
        body, form, _ = case
        whole, names = "", set()
        with server.stream("POST", PATH, json={**body, "model": form, "stream": True}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    whole += event["choices"][0]["text"]
                    names.add(event["model"])
        return whole, names

    with ThreadPoolExecutor(len(cases)) as pool:
        found = list(pool.map(read, cases))
    assert found == [(text, {form or "tiny"}) for _, form, text in cases]


def test_chat_uses_the_adapter_too(server):
    body = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 8}
    texts = set()
    for name in ("tiny", *FORMS):
        answer = server.post("/v1/chat/completions", json={**body, "model": name})
        assert answer.json()["model"] == name
        texts.add(answer.json()["choices"][0]["message"]["content"])
    assert len(texts) == 4


@pytest.mark.parametrize(
    "name",
    ["rank", "rank-64 ", "tiny:", ":rank-64", "tiny:tiny", "rank-64:tiny", "tiny:tiny:rank-64", ""],
)
def test_another_name_is_404_and_never_the_base(server, name):
    for path, body in (
        (PATH, {"prompt": [5]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    ):
        answer = server.post(path, json={**body, "model": name})
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "'tiny', 'rank-64', 'patterns'" in error["message"]


def test_the_models_route_lists_adapters_with_their_parent(server):
    cards = server.get("/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [
        ("tiny", None), *((form, "tiny") for form in FORMS),
    ]  # fmt: skip
    for card in cards:
        assert server.get(f"/v1/models/{card['id']}").json() == card
        assert card["max_model_len"] == 96
    assert server.get("/v1/models/tiny:patterns").json() == cards[2]
    assert server.get("/v1/models/nobody").status_code == 404


class Unloaded:
    """An EngineClient whose engine has lost an adapter that the server still lists."""

    is_ready = is_alive = True
    model_info = ModelInfo(128, 400, "float32", "cpu")

    def __init__(self):
        self.adapters = AdapterCalls(lambda message: None)
        self.adapters.adapters = {"mine": AdapterInfo("mine", "here", False, 8, 64)}

    def stats(self):
        return {}

    def stream(self, *requests):
        assert [request.adapter for request in requests] == ["mine"]
        stream = TokenStream([requests[0].request_id], lambda ids: None)
        stream.put(AdapterNotFoundError("LoRA adapter 'mine' is not loaded", "lora"))
        return stream


def test_an_adapter_that_the_engine_does_not_know_is_404():
    app = create_app(OneLife(Unloaded()), None, ServerSettings(("tiny",)))

    async def send():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://x"
        ) as http:
            return await http.post(PATH, json={"prompt": [5], "model": "mine"})

    answer = asyncio.run(send())
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


def test_refusals_and_failures_keep_their_kind_between_processes(folder, made, tmp_path):
    kv, model = KVConfig(num_blocks=16), ModelConfig(str(folder), device="cpu")
    params = SamplingParams(max_tokens=2)
    own = LoRAModule("mine", str(made("llama").adapters["rank-1"]))

    async def ask(client, name, adapter):
        tokens = []
        async for output in client.stream(NewRequest(name, [5], params, adapter)):
            tokens += output.token_ids
        return tokens

    async def run(config):
        async with EngineClient(EngineProcess.spawn(config)) as client:
            await client.wait_ready()
            with pytest.raises(AdapterNotFoundError, match="'other' is not loaded; loaded: mine"):
                await ask(client, "a", "other")
            return [await ask(client, "b", None), await ask(client, "c", "mine")]

    found = asyncio.run(run(EngineConfig(model, kv, lora=LoRAConfig((own,)))))
    assert [len(tokens) for tokens in found] == [2, 2]
    nothing = LoRAConfig((LoRAModule("mine", str(tmp_path)),))
    with pytest.raises(AdapterError, match=r"adapter_config\.json is missing"):
        asyncio.run(run(EngineConfig(model, kv, lora=nothing)))


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a=b", "a\n", "x" * 129])
def test_a_name_that_no_request_could_use_is_refused(name):
    with pytest.raises(ConfigError, match="LoRA adapter name"):
        LoRAModule(name, "somewhere")


def test_names_are_used_once():
    twice = (LoRAModule("a", "here"), LoRAModule("a", "there"))
    with pytest.raises(ConfigError, match="'a': must be used for one adapter"):
        LoRAConfig(twice)
    with pytest.raises(ConfigError, match="'tiny': is a name of the model"):
        ServerSettings(("tiny",), adapters=("tiny",))


@pytest.mark.parametrize("given", ["mine", "=path", "mine=", "a:b=path"])
def test_the_flag_wants_names_and_paths(folder, given, capsys):
    assert main(["serve", str(folder), "--lora-modules", given]) == 1
    assert "lora" in capsys.readouterr().err.lower()


@pytest.mark.deep
def test_the_engine_that_cannot_load_an_adapter_says_why(folder, tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "use_dora": true}')
    flags = ["--device", "cpu", "--num-kv-blocks", "8", "--lora-modules", f"mine={tmp_path}"]
    with (
        pytest.raises(ServerStartError, match=r"LoRA adapter 'mine': .*use_dora is True, DoRA"),
        local_server([str(folder), *flags], timeout=60),
    ):
        pass
