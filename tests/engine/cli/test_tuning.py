"""What ``kiln warmup --tune-comm`` shows."""

from __future__ import annotations

from rich.console import Console

from kiln.engine.cli.tuning import summary, times_table
from kiln.engine.distributed.all_reduce_plan import Plan
from kiln.engine.distributed.tuner import Tuned
from kiln.jit_kernels.ops.all_reduce.modes import ModeConfig


def test_the_times_of_the_chosen_blocks_and_what_engines_will_use():
    rows = [
        {"bytes": size, "blocks": blocks, "algorithm": name, "us": us}
        for size, blocks, name, us in (
            (1024, 0, "torch", 9.0), (1024, 16, "one_shot_push", 3.25),
            (1024, 32, "one_shot_push", 77.0), (2 << 20, 16, "two_shot", 21.0),
            (2 << 20, 0, "torch", 20.0), (8192, 16, "fused", 66.0),
        )
    ]  # fmt: skip
    plan = Plan(ModeConfig(4096, measured=True), 4096, max_bytes=1 << 20, max_blocks=16)
    console = Console(width=100)
    with console.capture() as captured:
        console.print(times_table(Tuned(plan, tuple(rows))))
    lines = [line.split() for line in captured.get().splitlines()]
    assert ["message", "one_shot_push", "two_shot", "torch"] in lines
    assert ["1", "KiB", "*", "3.2", "-", "9.0"] in lines
    assert ["2", "MiB", "-", "21.0", "*", "20.0"] in lines
    assert not any("77.0" in line or "66.0" in line for line in lines), "not with these blocks"


def test_who_sums_which_messages():
    plan = Plan(ModeConfig(4096, measured=True), 2048, max_bytes=1 << 20)
    lines = summary(Tuned(plan, ())).splitlines()
    assert lines == [
        "one kernel sums, adds and normalises messages of up to 2 KiB",
        "torch sums messages of more than 1 MiB",
    ]
    never = Plan(ModeConfig(0, measured=True), 0, max_bytes=0)
    assert summary(Tuned(never, ())).startswith("torch sums messages of every size")
