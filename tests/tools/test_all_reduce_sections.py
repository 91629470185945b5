"""The sections of gpu_check about all-reduces, on the host toolchain."""

from __future__ import annotations

import argparse

import pytest
import torch
from depth import at_depth
from gpu import all_reduce as sections

from kiln.jit_kernels import torch_ops
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.ops.all_reduce.layout import ALGORITHMS
from kiln.jit_kernels.ops.all_reduce.virtual import VirtualGroup
from kiln.jit_kernels.toolchains import host


@pytest.fixture
def calls(monkeypatch):
    """Run Kiln's own kernels on the CPU; return the names of those that ran."""
    ran = []

    def run(spec, a):
        ran.append(spec.name)
        host.run(spec, a, env=settings())

    monkeypatch.setattr(torch_ops, "run", run)
    monkeypatch.setattr(sections, "_SIZES", (1, 7, 520))
    # Each dtype has kernels of its own to build.
    monkeypatch.setattr(sections, "_DTYPES", at_depth((torch.float32,), sections._DTYPES))
    return ran


def test_rounds_call_every_algorithm_and_find_nothing(calls):
    row = sections.skewed(3, device="cpu")
    assert row["ok"]
    assert (row["rounds"], row["replays"], row["wrong"], row["late"]) == (21, 1, 0, "")
    assert {*calls} == {*ALGORITHMS}
    assert len(calls) == 63, "once to load the kernels"


def test_a_wrong_bit_is_counted(calls, monkeypatch):
    made = sections.cases(2, "cpu")
    made[5].want.view(torch.uint8)[1, 0] ^= 1
    monkeypatch.setattr(sections, "cases", lambda world, device: made)
    row = sections.skewed(2, device="cpu")
    assert (row["ok"], row["wrong"]) == (False, 2)


def test_a_late_rank_is_told(calls, monkeypatch):
    late = ["rank 0 waited 10 s for rank 1"]
    monkeypatch.setattr(VirtualGroup, "late_ranks", lambda group: late)
    row = sections.skewed(2, device="cpu")
    assert (row["ok"], row["late"]) == (False, late[0])


def test_a_ranks_own_launch_finds_the_same_buffers():
    group = VirtualGroup(3, "cpu", max_bytes=100, max_blocks=1)
    for rank in range(3):
        own = sections.own_members(group, rank)
        found = [own.buffers.data_ptr() + int(distance) for distance in own.peers]
        assert found == [row.data_ptr() for row in group.members.buffers]
        assert own.buffers.data_ptr() == found[rank]
        assert own.record.data_ptr() == group.members.record[rank].data_ptr()
        assert own.first_rank == rank


def test_times_have_a_row_for_each_size_with_every_algorithm(calls, monkeypatch):
    monkeypatch.setattr(sections, "_BYTES", [32, 1024])
    monkeypatch.setattr(sections, "_LARGE", 1024)
    monkeypatch.setattr(sections, "_microseconds", lambda call: call() is not None and 1.5)
    rows = list(sections.times(2, device="cpu"))
    assert [row["bytes"] for row in rows] == [32, 1024]
    assert all(row[name] == 1.5 for row in rows for name in (*ALGORITHMS, "torch"))
    assert [*calls] == [*ALGORITHMS] * 2
    assert all(row["ok"] for row in rows)


def test_a_quick_run_leaves_out_some_groups(monkeypatch):
    monkeypatch.setattr(sections, "times", lambda world: iter([{"ranks": world}]))
    args = argparse.Namespace(quick=True)
    assert [row["ranks"] for row in sections.latency(args)] == [2, 4, 6, 8]
