"""/timeline tells of single steps and /stats of all, in the numbers of /metrics."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest
from metric_lines import by_label, value
from scripted_engine import Writer
from writing_engine import app_of

from kiln.engine.errors import EngineDeadError

BODY = {"prompt": [[5] * 7, [6, 7], [8] * 30], "max_tokens": 12, "ignore_eos": True}


def watched(client, since, until):
    """The steps from a position on, once they are such that ``until`` is true."""
    deadline, found = time.monotonic() + 60, []
    while time.monotonic() < deadline:
        answer = client.get("/timeline", params={"since": since})
        assert answer.status_code == 200, answer.text
        page = answer.json()
        assert page["next"] == page["first"] + len(page["steps"])
        since, found = page["next"], found + page["steps"]
        if until(found):
            return since, found
        time.sleep(0.05)
    raise AssertionError("the records do not come")


def position(client):
    """The position behind all records of earlier requests, and of one more, which is the last."""
    before = client.get("/timeline").json()["next"]
    time.sleep(0.1)  # so that its step began clearly later than any other
    begun = time.time() - 0.05
    client.post("/v1/completions", json={"prompt": [5], "max_tokens": 1})
    return watched(client, before, lambda found: any(s["begun"] > begun for s in found))[0]


def test_steps_say_their_graph_or_why_they_have_none(opened, until_idle):
    since = position(opened)
    begun = time.time()
    assert opened.post("/v1/completions", json=BODY).status_code == 200
    until_idle(opened)
    ended = time.time()
    _, steps = watched(opened, since, lambda found: sum(s["generated"] for s in found) == 36)
    assert [one["number"] for one in steps] == list(
        range(steps[0]["number"], steps[0]["number"] + len(steps))
    )
    for one in steps:
        assert (one["graph"] is None) != (one["why_eager"] is None)
        assert 0 <= one["waited"] <= one["seconds"] < ended - begun
        assert begun - 0.1 < one["begun"] < ended + 0.1
        assert one["tokens"] == one["requests"] or one["kind"] != "decode"
    decodes = [one for one in steps if one["kind"] == "decode"]
    assert {one["graph"] for one in decodes if one["requests"] <= 2} == {"2"}
    assert {one["why_eager"] for one in decodes if one["requests"] == 3} == {"too many rows"}
    assert any("tokens" in (one["graph"] or "") for one in steps if one["kind"] != "decode")
    assert sum(one["tokens"] for one in steps if one["kind"] == "prefill") >= 7


def test_steps_of_the_timeline_are_those_that_metrics_count(opened, until_idle):
    def counted():
        until_idle(opened)
        text = opened.get("/metrics").text
        sizes, reasons = ("graph_replays", "size"), ("graph_fallbacks", "reason")
        return [by_label(text, f"kiln:{name}_total", label) for name, label in (sizes, reasons)]

    since = position(opened)
    before = counted()
    opened.post("/v1/completions", json=BODY)
    new = [
        {name: one - old.get(name, 0) for name, one in now.items() if one != old.get(name, 0)}
        for now, old in zip(counted(), before, strict=True)
    ]
    number = sum(sum(one.values()) for one in new)
    _, steps = watched(opened, since, lambda found: len(found) >= number)
    for counts, field in zip(new, ("graph", "why_eager"), strict=True):
        seen = [one[field] for one in steps if one[field] is not None]
        assert {name: seen.count(name) for name in seen} == counts


@pytest.mark.parametrize("wrong", ["-1", "x", "1.5", "", "1" * 30, "²"])
def test_a_position_that_is_none_is_refused(opened, wrong):
    answer = opened.get("/timeline", params={"since": wrong})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "since"


def of_one_moment(client):
    """The texts of /metrics and the values of /stats, with no step counted in between.

    The engine sends its counts now and then: those of an earlier test's last steps may come late.
    """
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        text, stats, later = (client.get(f"/{name}") for name in ("metrics", "stats", "metrics"))
        if len({value(one.text, "kiln:num_steps_total") for one in (text, later)}) == 1:
            return text.text, stats.json()
    raise AssertionError("steps are counted without end")


def test_stats_are_the_metrics(opened, until_idle):
    until_idle(opened)
    text, stats = of_one_moment(opened)
    assert (stats["state"], stats["message"]) == ("ready", "")
    assert stats["model"]["names"] == ["first", "second", "first:third"]
    assert (stats["model"]["device"], stats["model"]["max_model_len"]) == ("cpu", 128)
    for name in ("num_requests_running", "kv_blocks_total", "num_graphs"):
        assert stats["values"][name] == value(text, f"kiln:{name}")
    assert stats["values"]["num_steps"] == value(text, "kiln:num_steps_total")
    replays = by_label(text, "kiln:graph_replays_total", "size")
    assert stats["values"]["graph_replays"] == replays
    first = stats["histograms"]["time_to_first_token_seconds"]
    assert len(first["counts"]) == len(first["bounds"]) + 1
    assert first["counts"] == sorted(first["counts"])
    assert first["counts"][-1] == value(text, "kiln:time_to_first_token_seconds_count")
    assert first["sum"] == value(text, "kiln:time_to_first_token_seconds_sum")


def test_stats_say_what_a_server_waits_for(tokenizer):
    class Loading(Writer):
        is_ready = False

        @property
        def model_info(self):
            raise EngineDeadError("the engine is still loading the model")

        @model_info.setter
        def model_info(self, info):
            pass

    engine = Loading(tokenizer)
    engine.is_ready = False

    async def ask():
        transport = httpx.ASGITransport(app_of(engine, tokenizer))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            return (await http.get("/stats")).json()

    stats = asyncio.run(ask())
    assert (stats["state"], stats["model"]) == ("loading", None)
    assert stats["message"] == "the engine is still loading the model"
    assert stats["values"]["engine_ready"] == 0
