"""/metrics says how often each graph was replayed, and why steps ran without one."""

from __future__ import annotations

import re
import time

import msgspec
import pytest

from kiln.engine.process import wire
from kiln.engine.server.metrics import Metrics


def render(stats):
    return Metrics(lambda: stats, lambda: True).render().decode()


def by_label(text, name):
    """The numbers of a metric by its one label."""
    found = re.findall(rf'^kiln:{name}{{\w+="(.*)"}} (\S+)$', text, re.MULTILINE)
    return {label: float(number) for label, number in found}


STATS = {
    "graphs": 3,
    "graph_bytes": 1 << 20,
    "graph_capture_seconds": 0.25,
    "graph_replays": {"4": 7, "16 tokens, 4 rows": 2},
    "graph_fallbacks": {"too many rows": 5, "8: out of memory": 1},
}


def test_replays_are_by_size_and_fallbacks_by_reason():
    text = render(STATS)
    assert by_label(text, "graph_replays") == STATS["graph_replays"]
    assert by_label(text, "graph_fallbacks") == STATS["graph_fallbacks"]
    assert 'kiln:graph_replays{size="4"} 7.0' in text
    assert 'kiln:graph_fallbacks{reason="8: out of memory"} 1.0' in text
    for line in ("num_graphs 3.0", "graph_bytes 1.048576e+06", "graph_capture_seconds 0.25"):
        assert f"kiln:{line}\n" in text


def test_a_reason_may_have_any_characters():
    """It holds the first line of an error."""
    text = render({"graph_fallbacks": {'2: no "mm"\\of this': 1}})
    assert r'reason="2: no \"mm\"\\of this"} 1.0' in text


@pytest.mark.parametrize("stats", [{}, {"graph_replays": {}, "graph_fallbacks": {}}])
def test_without_graphs_there_are_no_numbers(stats):
    text = render(stats)
    assert by_label(text, "graph_replays") == by_label(text, "graph_fallbacks") == {}


def test_counts_by_label_pass_between_the_processes():
    sent = msgspec.msgpack.encode(wire.Stats({"running": 1, **STATS}))
    assert wire.to_client_decoder().decode(sent) == wire.Stats({"running": 1, **STATS})


def test_a_server_counts_the_graphs_that_it_replays(start, monkeypatch):
    """In float32 the attention of torch runs between the pieces of each graph."""
    monkeypatch.setenv("KILN_CPU_GRAPHS", "emulate")
    monkeypatch.setenv("KILN_GRAPH_VERIFY", "off")
    flags = ("--max-num-seqs", "3", "--cuda-graph-bs", "2", "--max-num-batched-tokens", "20")
    body = {"prompt": [[5] * 7, [6, 7], [8] * 30], "max_tokens": 6, "ignore_eos": True}
    with start(*flags) as (client, _):
        assert by_label(client.get("/metrics").text, "graph_replays") == {}, "none but for clients"
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        text = final_metrics(client)
    replays, reasons = by_label(text, "graph_replays"), by_label(text, "graph_fallbacks")
    assert replays["2"] > 0
    assert any("tokens" in size for size in replays)
    assert reasons["too many rows"] > 0
    assert sum(replays.values()) + sum(reasons.values()) == number(text, "num_steps")


def number(text, name):
    return float(re.search(rf"^kiln:{name} (\S+)$", text, re.MULTILINE)[1])


def final_metrics(client):
    """The metrics once the engine has reported its last step; it does a few times a second."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        text = client.get("/metrics").text
        steps = sum(by_label(text, "graph_replays").values())
        busy = number(text, "num_requests_running") + number(text, "kv_blocks_used")
        if steps and not busy:
            return text
        time.sleep(0.02)
    raise AssertionError("the engine does not report its steps")
