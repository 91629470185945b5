"""Which graphs are captured, and in which of them a step runs."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch

from kiln.engine.graphs import device as graphs_device
from kiln.engine.graphs.buckets import decode_buckets
from kiln.engine.graphs.emulator import EmulatedGraphs
from kiln.engine.graphs.runner import CudaGraphRunner, GraphKey, decode_key
from kiln.engine.requests.batch import Batch, ScheduledRequest
from kiln.engine.requests.sampling_params import SamplingParams

DECODE = [decode_key(rows) for rows in (1, 2, 4, 8)]
PREFILL = [GraphKey(tokens, rows, is_decode=False) for tokens in (8, 16) for rows in (2, 4)]


def silent(*progress):
    """Report nothing."""


def batch(*counts, samples=True):
    """A step whose requests compute so many tokens each."""
    rows = [
        ScheduledRequest(
            f"r{row}", row, count, 0, [0] * count, 0, [row], samples, 0, SamplingParams(), 0
        )
        for row, count in enumerate(counts)
    ]
    return Batch(tuple(rows))


class Steps:
    """A step adds one to the input; it notes what happens, in order."""

    def __init__(self, fail=None):
        self.input = torch.zeros(64)
        self.events = []
        self.fail = fail or {}

    def __call__(self, key, between):
        self.events.append(key)
        if key in self.fail:
            raise self.fail[key]
        return self.input[: key.rows].unsqueeze(1) + 1

    def addresses(self):
        return (self.input.data_ptr(),)


def made(steps, keys=(*DECODE, *PREFILL), captured=True, **options):
    options = {"garbage_collection": True, **options}  # a collection takes longer than a capture
    runner = CudaGraphRunner(keys, EmulatedGraphs({}), steps.addresses, **options)
    if captured:
        runner.capture(steps, silent)
    return runner


def fit(runner, step):
    """The key that a step runs in, or the reason why there is none."""
    before = runner.counts.fallbacks.copy()
    choice = runner.choose(step)
    if choice.key is not None:
        assert (choice.size, choice.why_eager) == (str(choice.key), "")
        return choice.key
    (reason,) = runner.counts.fallbacks - before
    assert (choice.size, choice.why_eager) == ("", reason)
    return reason


def test_the_largest_graph_is_captured_first_and_each_key_once():
    steps, heard = Steps(), []
    runner = made(steps, [*DECODE, *PREFILL, *DECODE], captured=False)
    runner.capture(steps, lambda *progress: heard.append(progress))
    assert steps.events == sorted({*DECODE, *PREFILL}, reverse=True)
    assert [key.tokens for key in steps.events] == [16, 16, 8, 8, 8, 4, 2, 1]
    assert heard == [("CUDA graphs", done, 8) for done in range(9)]


def test_a_step_runs_in_the_smallest_graph_that_fits():
    runner = made(Steps())
    for rows in range(1, 9):
        assert fit(runner, batch(*[1] * rows)).rows == next(s for s in (1, 2, 4, 8) if s >= rows)
    prefills = {
        (1, 5): (8, 2), (3, 5): (8, 2), (3, 6): (16, 2), (1, 1, 5): (8, 4), (1, 1, 1, 9): (16, 4),
        (2,): (8, 2),
    }  # fmt: skip
    for counts, (tokens, rows) in prefills.items():
        assert fit(runner, batch(*counts)) == GraphKey(tokens, rows, is_decode=False)


def test_one_token_each_without_a_sample_is_no_decode_step():
    """A graph of a decode step samples a token from every row."""
    runner = made(Steps())
    assert fit(runner, batch(1, 1, samples=False)) == GraphKey(8, 2, is_decode=False)
    alone = made(Steps(), DECODE)
    assert fit(alone, batch(1, samples=False)) == "a prefill of too many tokens or rows"


def test_why_a_step_runs_in_no_graph():
    runner = made(Steps())
    assert fit(runner, batch(*[1] * 8)) == decode_key(8)
    assert fit(runner, batch(*[1] * 9)) == "too many rows"
    assert fit(runner, batch(17)) == "a prefill of too many tokens or rows"
    assert fit(runner, batch(2, 1, 1, 1, 1)) == "a prefill of too many tokens or rows"


def test_no_graph_runs_before_the_capture():
    """The largest step is tried out first, and it may be small."""
    steps = Steps()
    runner = made(steps, captured=False)
    assert not runner.is_ready
    runner.capture(steps, silent)
    assert runner.is_ready
    assert fit(runner, batch(1)) == decode_key(1)


def test_a_replay_is_a_step_on_the_same_memory():
    steps = Steps()
    runner = made(steps)
    steps.input.copy_(torch.arange(64.0))
    logits = runner.replay(decode_key(4))
    assert logits.tolist() == [[1], [2], [3], [4]]
    steps.input.zero_()
    assert runner.replay(decode_key(4)).data_ptr() == logits.data_ptr()
    assert logits.tolist() == [[1]] * 4
    assert runner.replay(PREFILL[0]).shape == (2, 1)
    assert runner.counts.replays == {"4": 2, "8 tokens, 2 rows": 1}
    assert steps.events.count(decode_key(4)) == 1, "a replay runs no Python"


def test_inputs_that_have_moved_are_an_error():
    """A graph would go on to read the old memory."""
    steps = Steps()
    runner = made(steps)
    runner.choose(batch(1))
    steps.input = torch.zeros(64)
    with pytest.raises(RuntimeError, match="have moved since it was captured"):
        runner.choose(batch(1))


FAILURES = {
    "out of memory": torch.OutOfMemoryError("tried to allocate 2 GiB\nof 80"),
    "no such kernel": RuntimeError("no such kernel\nat line 7"),
}


@pytest.mark.parametrize("reason", FAILURES)
def test_a_graph_that_cannot_be_captured_is_left_out_and_counted(reason, caplog):
    gone = decode_key(2)
    runner = made(Steps({gone: FAILURES[reason]}))
    assert gone not in runner.keys
    assert runner.counts.fallbacks == {f"2: {reason}": 1}
    assert f"the CUDA graph of 2 is not used: {reason}" in caplog.text
    assert fit(runner, batch(1, 1)) == decode_key(4), "in a larger one"
    assert fit(runner, batch(1)) == decode_key(1)


def test_steps_without_a_larger_graph_run_eagerly_and_are_counted_by_size_and_reason():
    no_memory = torch.OutOfMemoryError("no")
    runner = made(Steps({decode_key(8): no_memory, PREFILL[-1]: no_memory}))
    assert fit(runner, batch(*[1] * 5)) == "8: out of memory"
    assert fit(runner, batch(1, 1, 9)) == "16 tokens, 4 rows: out of memory"
    assert fit(runner, batch(*[1] * 4)) == decode_key(4)
    assert fit(runner, batch(*[1] * 9)) == "too many rows", "even with that graph"


def test_without_memory_for_any_graph_every_step_runs_eagerly():
    keys = (*DECODE, *PREFILL)
    runner = made(Steps(dict.fromkeys(keys, torch.OutOfMemoryError("no"))))
    assert runner.keys == ()
    assert sum(runner.counts.fallbacks.values()) == len(keys)
    assert fit(runner, batch(1)) == "1: out of memory", "the smallest that would fit"


def test_a_graph_that_is_dropped_later_is_replayed_no_more():
    runner = made(Steps())
    runner.drop(decode_key(1), "differs")
    assert fit(runner, batch(1)) == decode_key(2)
    with pytest.raises(KeyError):
        runner.replay(decode_key(1))


def test_strict_raises_what_the_capture_raised():
    with pytest.raises(torch.OutOfMemoryError, match="2 GiB"):
        made(Steps({decode_key(2): FAILURES["out of memory"]}), strict=True)


@pytest.mark.parametrize("collects", [False, True])
def test_garbage_is_frozen_during_the_capture_unless_it_is_enabled(monkeypatch, collects):
    """A collection would look at every object of torch, which takes a tenth of a second."""
    steps, calls = Steps(), []
    for name in ("collect", "freeze", "unfreeze"):
        note = partial(lambda name: calls.append((name, len(steps.events))), name)
        monkeypatch.setattr(graphs_device.gc, name, note)
    made(steps, DECODE, garbage_collection=collects)
    frozen = [("collect", 0), ("freeze", 0), ("unfreeze", len(DECODE))]
    assert calls == ([] if collects else frozen)


def test_garbage_is_no_longer_frozen_after_a_capture_that_failed():
    before = gc.get_freeze_count()
    with pytest.raises(ValueError, match="no"):
        made(Steps({decode_key(8): ValueError("no")}), strict=True, garbage_collection=False)
    assert gc.get_freeze_count() == before


def test_a_first_graph_that_fails_takes_no_other_with_it(monkeypatch):
    """torch refuses the memory pool of a failed capture, unless another graph holds it."""
    renewed = []
    monkeypatch.setattr(EmulatedGraphs, "renew_pool", lambda self: renewed.append(len(held)))
    no_kernel = FAILURES["no such kernel"]
    steps = Steps({decode_key(8): no_kernel, decode_key(2): no_kernel})
    runner = made(steps, DECODE, captured=False)
    held = runner._captured
    runner.capture(steps, silent)
    assert renewed == [0]
    assert [key.rows for key in runner.keys] == [1, 4]


def test_memory_is_measured_with_the_largest_graphs():
    sizes = decode_buckets(256)
    steps, keys = Steps(), [decode_key(size) for size in sizes]
    runner = made(steps, keys, captured=False)
    free = iter([10_000, 9_000, *range(8_990, 8_920, -10)])
    assert runner.measure(steps, lambda: next(free)) == 1_000 + (len(keys) - 1) * 10
    assert steps.events == [keys[-1], *keys[:-9:-1]], "the first time for what libraries keep"
    assert not runner.is_ready, "the graphs are captured again afterwards"
    runner.capture(steps, silent)
    assert fit(runner, batch(1)) == decode_key(1)


def test_memory_that_other_programs_return_does_not_make_it_less_than_none():
    free = iter(range(1_000, 2_000, 100))
    assert made(Steps(), captured=False).measure(Steps(), lambda: next(free)) == 0
    free = iter([1_000, 900])
    assert made(Steps(), DECODE[:1], captured=False).measure(Steps(), lambda: next(free)) == 100


def test_a_small_graph_that_is_slower_than_a_larger_one_is_not_used(monkeypatch):
    times = {1: 1.3, 2: 1.02, 4: 1.0, 8: 1.2, 16: 1.1, 17: 0.5}  # many rows are not timed

    def milliseconds(self, graph):
        return times[len(graph.calls[0][3][0])]

    monkeypatch.setattr(EmulatedGraphs, "milliseconds", milliseconds)
    runner = made(Steps(), [decode_key(rows) for rows in times])
    assert [key.rows for key in runner.keys] == [2, 4, 16, 17], "a difference of 2 % may be noise"
    assert fit(runner, batch(1)) == decode_key(2)
    assert fit(runner, batch(*[1] * 5)) == decode_key(16)
    assert not runner.counts.fallbacks


def test_measuring_without_memory_drops_those_graphs():
    no_memory = torch.OutOfMemoryError("no")
    steps = Steps({decode_key(8): no_memory, decode_key(4): no_memory})
    runner = made(steps, DECODE, captured=False)
    assert runner.measure(steps, lambda: 500) == 0
    assert [key.rows for key in runner.keys] == [1, 2]


def test_every_step_up_to_the_largest_has_a_graph():
    keys = [decode_key(size) for size in decode_buckets(64)]
    runner = made(Steps(), keys)
    for rows in range(1, 65):
        assert fit(runner, batch(*[1] * rows)).rows >= rows
