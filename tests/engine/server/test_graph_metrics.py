"""/metrics says how often each graph was replayed, and why steps ran without one."""

from __future__ import annotations

import time

import msgspec
import pytest
from metric_lines import by_label, value

from kiln.engine.process import wire
from kiln.engine.server.metrics import Metrics


def render(stats):
    return Metrics(lambda: stats, lambda: True, "m").render("")[0].decode()


def replays_of(text):
    return by_label(text, "kiln:graph_replays_total", "size")


def reasons_of(text):
    return by_label(text, "kiln:graph_fallbacks_total", "reason")


STATS = {
    "graphs": 3,
    "graph_bytes": 1 << 20,
    "graph_capture_seconds": 0.25,
    "graph_replays": {"4": 7, "16 tokens, 4 rows": 2},
    "graph_fallbacks": {"too many rows": 5, "8: out of memory": 1},
}


def test_replays_are_by_size_and_fallbacks_by_reason():
    text = render(STATS)
    assert replays_of(text) == STATS["graph_replays"]
    assert reasons_of(text) == STATS["graph_fallbacks"]
    assert 'kiln:graph_replays_total{model_name="m",size="4"} 7.0' in text
    for name in ("graphs", "graph_bytes", "graph_capture_seconds"):
        shown = "kiln:num_graphs" if name == "graphs" else f"kiln:{name}"
        assert value(text, shown) == STATS[name]


def test_a_reason_may_have_any_characters():
    """It holds the first line of an error."""
    text = render({"graph_fallbacks": {'2: no "mm"\\of this': 1}})
    assert reasons_of(text) == {'2: no "mm"\\of this': 1}


@pytest.mark.parametrize("stats", [{}, {"graph_replays": {}, "graph_fallbacks": {}}])
def test_without_graphs_there_are_no_numbers(stats):
    text = render(stats)
    assert replays_of(text) == reasons_of(text) == {}


def test_counts_by_label_pass_between_the_processes():
    sent = msgspec.msgpack.encode(wire.Stats({"running": 1, **STATS}))
    assert msgspec.msgpack.decode(sent, type=wire.ToClient) == wire.Stats({"running": 1, **STATS})


def test_a_server_counts_the_graphs_that_it_replays(opened):
    """In float32 the attention of torch runs between the pieces of each graph."""
    body = {"prompt": [[5] * 7, [6, 7], [8] * 30], "max_tokens": 40, "ignore_eos": True}
    answer = opened.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    text = final_metrics(opened)
    replays, reasons = replays_of(text), reasons_of(text)
    assert replays["2"] > 0
    assert any("tokens" in size for size in replays)
    assert reasons["too many rows"] > 0
    counted = sum(replays.values()) + sum(reasons.values())
    assert counted == number(text, "num_steps_total"), "none but for clients"


def number(text, name):
    return value(text, f"kiln:{name}")


def final_metrics(client):
    """The metrics once the engine has reported its last step; it does a few times a second."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        text = client.get("/metrics").text
        steps = sum(replays_of(text).values())
        busy = number(text, "num_requests_running") + number(text, "kv_blocks_used")
        if steps and not busy:
            return text
        time.sleep(0.02)
    raise AssertionError("the engine does not report its steps")
