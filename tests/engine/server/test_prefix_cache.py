"""Prefix caching over HTTP: counts of cached tokens, salts, the reset, and the metrics."""

from __future__ import annotations

import time

import pytest

from tests.engine.server.conftest import gauge

PATHS = {
    "/v1/completions": {"prompt": "tell me"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "tell me"}]},
    "/v1/responses": {"input": "tell me"},
}


def complete(client, prompt, **fields):
    body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True, "seed": 1, **fields}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_prompt_is_computed_once_and_the_answer_stays_the_same(api):
    prompt = [*range(200, 240)]
    assert api.post("/reset_prefix_cache").status_code == 200
    first, second = complete(api, prompt), complete(api, prompt)
    assert (cached(first), cached(second)) == (0, 32)
    assert first["choices"] == second["choices"]
    api.post("/reset_prefix_cache")
    assert cached(complete(api, prompt)) == 0


def test_cached_tokens_count_once_for_each_prompt(api):
    shared = [*range(240, 280)]
    api.post("/reset_prefix_cache")
    complete(api, shared)
    answer = complete(api, [[*shared, 5], [*shared, 6], [7] * 40], n=3)
    assert (answer["usage"]["prompt_tokens"], cached(answer)) == (122, 64)


def settled(api, names):
    """Gauges once the engine has reported what came before, which it does five times a second."""
    found, before = [gauge(api, name) for name in names], None
    while found != before:
        time.sleep(0.5)
        found, before = [gauge(api, name) for name in names], found
    return found


def test_metrics_count_looked_up_and_found_tokens(api):
    prompt = [*range(280, 310)]
    names = ("prefix_cache_queries_total", "prefix_cache_hits_total")
    api.post("/reset_prefix_cache")
    before = settled(api, names)
    for _ in range(2):
        complete(api, prompt, n=1)
    answer = complete(api, prompt, n=2)
    assert cached(answer) == 16
    wanted = [before[0] + 4 * 30, before[1] + 3 * 16]
    for _ in range(200):
        if [gauge(api, name) for name in names] == wanted:
            break
    assert [gauge(api, name) for name in names] == wanted
    assert gauge(api, "kv_blocks_used") == 0
    assert gauge(api, "kv_blocks_cached") > 0


@pytest.mark.parametrize("path", PATHS)
def test_an_empty_salt_is_refused_and_others_are_accepted(api, path):
    refused = api.post(path, json={**PATHS[path], "cache_salt": ""})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "cache_salt"
    assert api.post(path, json={**PATHS[path], "cache_salt": "mine"}).status_code == 200
