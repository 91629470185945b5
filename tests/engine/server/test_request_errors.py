"""A request that the engine refuses gets status 400; the server and the others go on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

GOOD = {"prompt": [5, 60, 7], "max_tokens": 20, "seed": 3, "ignore_eos": True, "temperature": 1.0}
# Every token of the vocabulary is banned until the second.
BAD = {"prompt": [5], "max_tokens": 4, "min_tokens": 2, "stop_token_ids": list(range(400))}


def complete(api, body):
    return api.post("/v1/completions", json=body)


@pytest.mark.parametrize("stream", [False, True])
def test_min_tokens_with_every_token_banned_is_status_400(api, stream):
    answer = complete(api, {**BAD, "stream": stream})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "min_tokens")
    assert "ban all 400 tokens" in error["message"]


def test_its_neighbours_get_the_tokens_that_they_get_alone(api):
    alone = complete(api, GOOD).json()["choices"]
    with ThreadPoolExecutor(8) as pool:
        bodies = [GOOD, BAD] * 8
        answers = list(pool.map(lambda body: complete(api, body), bodies))
    assert [answer.status_code for answer in answers] == [200, 400] * 8
    assert all(answer.json()["choices"] == alone for answer in answers[::2])
