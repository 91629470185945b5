"""The benchmarks of the host's work run, and measure what they say."""

from __future__ import annotations

import bench_host
import bench_step_message
from bench_step_message import decode, decode_step, encode
from depth import at_depth


def test_a_decode_step_of_the_host_is_timed(monkeypatch):
    monkeypatch.setattr(bench_host, "STEPS", 3)
    monkeypatch.setattr(bench_host, "WARM_UP", 2)
    assert 0 < bench_host._measure("new", 2, 40) < 1000


def test_every_rank_decodes_the_step_before_its_answer_counts():
    world = at_depth(2, 3)  # each rank but the first is a process
    [row] = bench_step_message.measure(world, sizes=(17,), steps=5)
    assert (row["world"], row["rows"]) == (world, 17)
    assert row["send_us"] > 0  # the times of a busy machine say no more
    assert row["arrive_us"] > 0
    frame = decode_step(17)
    assert row["bytes"] == len(encode(frame))
    found = decode(encode(frame))
    assert found.key == frame.key
    assert [one.row for one in found.batch.requests] == [*range(17)]
