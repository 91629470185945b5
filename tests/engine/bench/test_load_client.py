"""The client of the serving benchmark counts events and tokens, and names what failed."""

from __future__ import annotations

import itertools
import math
import resource
import statistics

import pytest
from openai_stub import stub_server

from kiln.engine.bench.arrivals import Arrivals
from kiln.engine.bench.load_client import Target, run_load


@pytest.fixture(scope="module")
def server():
    with stub_server() as stub:
        yield stub


@pytest.fixture(autouse=True)
def fresh(server):
    server.asked.clear()
    server.trouble, server.key, server.split = {}, "", False


def body(token, tokens=5):
    return {"prompt": [token, 1, 2], "max_tokens": tokens}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("is_chat", [False, True])
def test_an_event_has_a_time_for_each_token_however_its_bytes_arrive(server, split, is_chat):
    server.split = split
    bodies = [body(one) for one in range(6)]
    if is_chat:
        bodies = [{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}] * 6
    ended = []
    target = Target(server.url, "stub", "k3y", is_chat)
    seconds, answers = run_load(target, bodies, Arrivals(2), lambda: ended.append(1))
    assert [answer.error for answer in answers] == [""] * 6
    for answer in answers:
        assert (len(answer.events), answer.output_tokens, answer.prompt_tokens) == (5, 5, 3)
        assert answer.started < answer.events[0] <= answer.events[-1]
        assert answer.events == sorted(answer.events)
    assert len(ended) == 6
    assert seconds >= max(one.events[-1] for one in answers) - min(one.started for one in answers)
    assert {path for path, _, _ in server.asked} == {target.path}
    assert {key for _, key, _ in server.asked} == {"Bearer k3y"}
    for _, _, sent in server.asked:
        assert (sent["model"], sent["stream"]) == ("stub", True)
        assert sent["stream_options"] == {"include_usage": True}


def test_a_request_that_fails_is_named_and_ends_no_other(server):
    wrong = {1: "refuse", 2: "error", 3: "break"}
    server.trouble = {(token,): what for token, what in wrong.items()}
    _, answers = run_load(Target(server.url), [body(token) for token in range(5)], Arrivals(2))
    assert [answer.error for answer in answers] == [
        "",
        "HTTP/1.1 400 Bad Request: the prompt is too long",
        "an error in the stream: the engine died",
        "the answer ended without its usage",
        "",
    ]
    assert [len(answers[index].events) for index in (0, 4)] == [5, 5]


def test_a_wrong_key_and_no_server_are_named(server):
    server.key = "right"
    _, answers = run_load(Target(server.url, api_key="wrong"), [body(0)], Arrivals(1))
    assert answers[0].error == "HTTP/1.1 401 Unauthorized: Invalid API key"
    server.trouble = {(0,): "close"}
    server.key = ""
    _, answers = run_load(Target(server.url), [body(0)], Arrivals(1))
    assert answers[0].error == "the connection was closed before an answer"
    _, answers = run_load(Target("http://127.0.0.1:1"), [body(0)], Arrivals(1))
    assert answers[0].error.startswith("ConnectionRefusedError: ")


def test_no_more_requests_than_the_limit_are_under_way(server):
    _, answers = run_load(Target(server.url), [body(0)] * 12, Arrivals(3))
    marks = sorted(mark for one in answers for mark in ((one.started, 1), (one.events[-1], -1)))
    under_way = list(itertools.accumulate(step for _, step in marks))
    assert max(under_way) <= 3


def test_a_connection_for_each_request_is_allowed(server):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (80, limits[1]))
        _, answers = run_load(Target(server.url), [body(0)] * 100, Arrivals(None))
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 164
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(answers) == 100


def test_arrivals_are_random_and_have_the_rate():
    times = Arrivals(None, 50.0).times(2000)
    assert times == Arrivals(None, 50.0).times(2000)
    assert times != Arrivals(None, 50.0).times(2000, seed=1)
    assert times[-1] == pytest.approx(2000 / 50)
    assert Arrivals(4).times(3) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0, math.inf])
def test_the_burstiness_is_that_of_a_gamma_distribution(burstiness):
    times = Arrivals(None, 50.0, burstiness).times(4000)
    gaps = [late - early for early, late in itertools.pairwise(times)]
    assert min(gaps) >= 0
    spread = statistics.stdev(gaps) / statistics.mean(gaps)
    assert spread == pytest.approx(1 / math.sqrt(burstiness), rel=0.1, abs=1e-6)


def test_arrivals_say_what_they_are():
    every = (Arrivals(4), Arrivals(None, 2.5), Arrivals(3, 8), Arrivals(None))
    says = ["4 at a time", "2.5 a second", "8 a second, at most 3 at a time", "all at once"]
    assert [str(one) for one in every] == says
