"""What captures on a GPU, with a stand-in for torch's graphs: order, edges, and what remains."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from kiln.engine.graphs import device as graphs_device
from kiln.engine.graphs.device import CudaGraphs


@pytest.fixture
def events(monkeypatch):
    """What happens, in order: captures and replays with the number of the graph."""
    seen = []

    class Graph:
        made = 0

        def __init__(self):
            Graph.made += 1
            self.number = Graph.made

        def capture_begin(self, pool, capture_error_mode):
            assert (pool, capture_error_mode) == ("pool", "thread_local")
            seen.append("begin")

        def capture_end(self):
            seen.append("end")

        def replay(self):
            seen.append("replay")

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            seen.append(f"{self.name} waits for {other.name}")

        def synchronize(self):
            seen.append("synchronize")

    def capture_stream(device, priority):
        assert priority < 0, "branches beside layers get what these leave"
        return Stream("capture")

    names = {
        "CUDAGraph": Graph,
        "Stream": capture_stream,
        "current_stream": lambda device: Stream("current"),
        "graph_pool_handle": lambda: "pool",
        "stream": lambda stream: contextlib.nullcontext(),
    }
    for name, value in names.items():
        monkeypatch.setattr(torch.cuda, name, value)
    graphs_device._capture_stream.cache_clear()
    monkeypatch.setattr(graphs_device, "at_graph_edge", lambda device: seen.append("edge"))
    yield seen
    graphs_device._capture_stream.cache_clear()


def made():
    return CudaGraphs(torch.device("cuda", 0))


def test_a_step_runs_once_before_it_is_captured_on_the_capture_stream(events):
    graph = made().capture(lambda between: events.append("step"))
    assert events == [
        "capture waits for current", "step", "synchronize",
        "edge", "begin", "step", "end", "edge",
        "current waits for capture",
    ]  # fmt: skip
    events.clear()
    graph.replay()
    assert events == ["replay", "edge"]


def test_calls_between_pieces_run_at_replays_alone(events):
    def step(between):
        events.append("first")
        between(lambda: events.append("attention"))
        events.append("second")

    graph = made().capture(step)
    assert "attention" not in events
    assert events[3:-1] == [
        "synchronize", "edge", "begin", "first", "end", "edge",
        "edge", "begin", "second", "end", "edge",
    ]  # fmt: skip
    for _ in range(2):
        events.clear()
        graph.replay()
        assert events == ["replay", "edge", "attention", "replay", "edge"]


def test_a_capture_that_fails_is_ended_and_says_why(events):
    """Else the capture stream would stay in capture, and every later graph would fail."""
    runs = []

    def step(between):
        runs.append(1)
        if len(runs) == 2:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    device = made()
    with pytest.raises(torch.OutOfMemoryError, match="2 GiB"):
        device.capture(step)
    assert events.count("begin") == events.count("end") == 1
    device.capture(lambda between: None)
    assert events.count("begin") == events.count("end") == 2


def test_the_end_of_a_failed_capture_does_not_hide_why_it_failed(events, monkeypatch):
    """CUDA refuses to end a capture that an error made invalid."""

    def refuse(self):
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", refuse)

    def step(between):
        if "begin" in events:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    with pytest.raises(torch.OutOfMemoryError, match="2 GiB"):
        made().capture(step)


def test_a_tensor_that_is_kept_owns_no_memory():
    base = torch.arange(12.0)
    view = base[2:].view(2, 5)[:, 1:3]
    kept = CudaGraphs.keep(SimpleNamespace(), view)
    assert kept.data_ptr() == view.data_ptr()
    assert (kept.shape, kept.stride()) == (view.shape, view.stride())
    base.mul_(2)
    assert torch.equal(kept, view)
    assert kept.untyped_storage()._cdata != base.untyped_storage()._cdata
