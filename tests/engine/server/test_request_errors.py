"""A request that the engine cannot finish gets status 500; the server and the others go on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

GOOD = {"prompt": [5, 60, 7], "max_tokens": 20, "seed": 3, "ignore_eos": True, "temperature": 1.0}
# Every token of the vocabulary is banned until the second.
BAD = {"prompt": [5], "max_tokens": 4, "min_tokens": 2, "stop_token_ids": list(range(400))}


def complete(api, body):
    return api.post("/v1/completions", json=body)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_fails_before_its_first_token_is_status_500(api, stream):
    answer = complete(api, {**BAD, "stream": stream})
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "generation_failed")
    assert "only stop tokens can be sampled" in error["message"]


def test_its_neighbours_get_the_tokens_that_they_get_alone(api):
    alone = complete(api, GOOD).json()["choices"]
    with ThreadPoolExecutor(8) as pool:
        bodies = [GOOD, BAD] * 8
        answers = list(pool.map(lambda body: complete(api, body), bodies))
    assert [answer.status_code for answer in answers] == [200, 500] * 8
    assert all(answer.json()["choices"] == alone for answer in answers[::2])
