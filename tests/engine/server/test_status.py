"""The routes that tell what is served: several names, probes, and what computes."""

from types import SimpleNamespace

import pytest
from one_life import OneLife

from kiln.engine.errors import ConfigError
from kiln.engine.server.errors import ApiError
from kiln.engine.server.metrics import Metrics
from kiln.engine.server.serving import ServerSettings, Serving

BODY = {"prompt": [5], "max_tokens": 1}


def test_an_answer_has_the_name_that_was_asked_for(opened):
    for asked, said in ((None, "first"), ("second", "second"), ("first:third", "first:third")):
        answer = opened.post("/v1/completions", json={**BODY, "model": asked})
        assert answer.json()["model"] == said
    answer = opened.post("/v1/completions", json={**BODY, "model": "tiny"})
    assert answer.status_code == 404
    assert "'first', 'second', 'first:third'" in answer.json()["error"]["message"]


def test_models_are_listed_under_each_name(opened):
    cards = opened.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["first", "second", "first:third"]
    for card in cards:
        assert card == opened.get(f"/v1/models/{card['id']}").json()
        assert (card["root"], card["parent"], card["max_model_len"]) == ("first", None, 128)
        assert card["permission"] == []
        assert card["task"] == "generate"
        # of the folder's generation_config.json
        assert card["default_sampling_params"] == {
            "temperature": 0.5,
            "top_p": 1.0,
            "top_k": 50,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }


def test_an_adapter_is_requested_alone_or_behind_any_name_of_the_model():
    client = SimpleNamespace(adapters=SimpleNamespace(adapters=dict.fromkeys(("sql", "third"))))
    settings = ServerSettings(("first", "second", "first:third"))
    serving = Serving(OneLife(client), None, settings, Metrics(dict, lambda: True, "first"))
    for name in ("sql", "first:sql", "second:sql", "first:third:sql"):
        assert serving.require_model(name) == ("sql", "sql")
    assert serving.require_model("second:third") == ("third", "third")
    assert serving.require_model("first:third") == ("first:third", None)
    for name in ("other:sql", "second:", "first:second", "sql:first", ""):
        with pytest.raises(ApiError, match="is not served here"):
            serving.require_model(name)


@pytest.mark.parametrize("names", [("a", "a"), ("",), ("a", "")])
def test_a_name_that_cannot_be_told_from_others_is_refused(names):
    with pytest.raises(ConfigError, match="served_model_name="):
        ServerSettings(names)


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
def test_ping_is_200_when_requests_are_accepted(api, method):
    answer = api.request(method, "/ping")
    assert answer.status_code == 200
    assert bool(answer.content) == (method != "HEAD")


def test_kernels_tells_what_runs_and_why(api):
    answer = api.get("/kernels").json()
    assert (answer["device"], answer["dtype"]) == ("cpu", "float32")
    assert {"attention_decode", "norm", "sampling"} <= set(answer["kernels"])
    for choice in answer["kernels"].values():
        assert choice["implementation"] in ("torch", "jit", "host", "triton")
        assert choice["reason"]
    assert answer["graphs"]["captured"] == 0
    assert answer["all_reduce"] is None
