"""The routes that tell what is served: several names, probes, and what computes."""

import pytest

from kiln.engine.errors import ConfigError
from kiln.engine.server.serving import ServerSettings

BODY = {"prompt": [5], "max_tokens": 1}


@pytest.fixture(scope="module")
def named(start, tmp_path_factory):
    """A server whose model has three names, one of which looks like "base:adapter"."""
    names = ["first", "second", "first:third"]
    with start("--served-model-name", *names) as (client, _):
        yield client


def test_an_answer_has_the_name_that_was_asked_for(named):
    for asked, said in ((None, "first"), ("second", "second"), ("first:third", "first:third")):
        answer = named.post("/v1/completions", json={**BODY, "model": asked})
        assert answer.json()["model"] == said
    answer = named.post("/v1/completions", json={**BODY, "model": "tiny"})
    assert answer.status_code == 404
    assert "'first', 'second', 'first:third'" in answer.json()["error"]["message"]


def test_models_are_listed_under_each_name(named):
    cards = named.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["first", "second", "first:third"]
    for card in cards:
        assert card == named.get(f"/v1/models/{card['id']}").json()
        assert (card["root"], card["parent"], card["max_model_len"]) == ("first", None, 128)
        assert card["permission"] == []


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
