"""Ctrl-C at any line of the host's work leaves nothing held, and the next call works."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from depth import at_depth
from fake_host import FakeHost

from kiln.engine import core as core_module
from kiln.engine.kv import host_tier
from kiln.engine.llm import LLM
from kiln.engine.lora.loaded_adapter import Copied
from kiln.engine.requests.sampling_params import SamplingParams

# What changes state that outlives a call.
FILES = ("engine/core.py", "engine/scheduler.py", "engine/requests/", "engine/lora/", "engine/kv/")
ADAPTERS = {"first": "folder", "second": "folder", "third": "folder"}
PROMPTS = [[index] * (3 + 4 * index) for index in range(6)]
LORA = ["first", None, "second", "third", "first", None]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=14, ignore_eos=True),
    SamplingParams(seed=1, max_tokens=11, presence_penalty=1.0, ignore_eos=True),
] * 3


class Store:
    """Adapters of which one fits on the device, as a store that copies at once."""

    num_slots, size = 2, 15
    sizes = dict.fromkeys(ADAPTERS, 10)

    def __init__(self):
        self.begun, self.slots = [], {}

    def info(self, name, path, *, pinned):
        return SimpleNamespace(name=name)

    def begin(self, name, slot, start):
        self.begun.append((name, slot))

    def copied(self, *, wait=False):
        done, self.begun = self.begun, []
        self.slots |= {slot: name for name, slot in done}
        return [Copied(name) for name, _ in done]

    def clear(self, slot):
        self.slots.pop(slot, None)


class Interrupts:
    """Raises an interrupt at some of the lines that run, counted from 1.

    ``ran`` are the lines that ran, ``places`` those that were interrupted.
    """

    def __init__(self, *at):
        self.at, self.ran, self.places = set(at), [], []

    def __enter__(self):
        sys.settrace(self._call)
        return self

    def __exit__(self, *error):
        sys.settrace(None)

    def _call(self, frame, event, argument):
        return self._line if any(one in frame.f_code.co_filename for one in FILES) else None

    def _line(self, frame, event, argument):
        if event == "line":
            self.ran.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
            if len(self.ran) in self.at:
                sys.settrace(self._call)  # Python ends a trace that raises
                self.places.append(self.ran[-1])
                frame.f_trace = self._line
                raise KeyboardInterrupt
        return self._line


@pytest.fixture
def runner(fake_runner, monkeypatch):
    class Runner(fake_runner):
        def run(self, batch):
            for row in batch.requests:
                wanted = LORA[PROMPTS.index(self.prompts[row.request_id])]
                assert self.adapter_store.slots.get(row.adapter_slot) == wanted, "another adapter"
            return super().run(batch)

    made = Runner(num_blocks=10, vocab_size=400)
    made.adapter_store = Store()
    monkeypatch.setattr(core_module, "load_runner", lambda config, progress: made)
    return made


@pytest.fixture(params=["fcfs", "priority"])
def llm(runner, tmp_path, request, monkeypatch):
    class Prompts(dict):
        """The prompt of each request id, which counts up."""

        def __missing__(self, request_id):
            return PROMPTS[(int(request_id.split("-")[0]) - self.first) % len(PROMPTS)]

    if request.param == "priority":  # it also interrupts the host tier
        runner.host_blocks = FakeHost(runner, num_slots=60, latest=1)
        monkeypatch.setattr(host_tier, "LEAST_LOADED", 1)
    runner.prompts = Prompts()
    runner.prompts.first = 0
    return LLM(
        str(tmp_path),
        block_size=4,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        scheduling_policy=request.param,
        lora_modules=ADAPTERS,
        max_loras=2,
        skip_tokenizer_init=True,
    )


def answers(llm, runner):
    # The steps that were in flight at an interrupt are dropped: the stand-in must not expect them.
    runner.collected = runner.launched
    runner.prompts.first = next(llm._request_ids) + 1
    by_priority = llm.core.config.scheduler.scheduling_policy == "priority"
    priorities = [2, 1, 0] * 2 if by_priority else 0
    outputs = llm.generate(PROMPTS, PARAMS, lora=LORA, priority=priorities)
    return [list(one.outputs[0].token_ids) for one in outputs]


def held(llm):
    """What the engine keeps of requests."""
    scheduler = llm.core.scheduler
    scheduler.kv.pool.check_integrity()
    return {
        "blocks": scheduler.kv.pool.num_held,
        "rows": set(range(4)) - set(scheduler._free_rows),
        "requests": [*scheduler.running, *scheduler.waiting],
        "launched": len(scheduler.steps) + len(llm.core._in_flight),
        "adapters": [one.name for one in scheduler.adapters.loaded if one.requests or one.running],
    }


NOTHING = {"blocks": 0, "rows": set(), "requests": [], "launched": 0, "adapters": []}


def points(lines):
    """Return where to interrupt: the first, a middle and the last run of each line.

    In quick runs these are some 15 of them.
    """
    runs = defaultdict(list)
    for number, line in enumerate(lines.ran, 1):
        runs[line].append(number)
    chosen = sorted({at for of in runs.values() for at in (of[0], of[len(of) // 2], of[-1])})
    return chosen[:: at_depth(max(1, len(chosen) // 15), 1)]


@pytest.mark.timeout(3000)
def test_an_interrupt_at_any_line_leaves_nothing_held(llm, runner):
    wanted = answers(llm, runner)
    with Interrupts() as lines:
        assert answers(llm, runner) == wanted
    assert llm.core.scheduler.num_preemptions
    assert llm.core.scheduler.adapters.num_evictions
    if runner.host_blocks is not None:
        assert llm.core.stats().kv_offload_loaded_blocks
        assert any(line.startswith("host_tier") for line in lines.ran)
    chosen, interrupted = points(lines), 0
    for point in chosen:
        interrupts = Interrupts(point)
        try:
            with interrupts:
                answers(llm, runner)
        except KeyboardInterrupt:
            interrupted += 1
            assert held(llm) == NOTHING, interrupts.places
        assert answers(llm, runner) == wanted, interrupts.places
    # The last of them may not be reached: what the host tier has differs from run to run.
    assert interrupted > 0.8 * len(chosen)


@pytest.mark.timeout(3000)
def test_an_interrupt_while_the_last_one_is_handled_leaves_nothing_to_the_next_call(llm, runner):
    wanted = answers(llm, runner)
    with Interrupts() as lines:
        answers(llm, runner)
    for point in points(lines):
        later = point + 1 + point % 97
        interrupts = Interrupts(point, later)
        try:
            with interrupts:
                answers(llm, runner)
        except KeyboardInterrupt:
            assert interrupts.places
        else:  # the run had fewer lines this time: less was on the device already
            assert interrupts.places == []
        assert answers(llm, runner) == wanted, interrupts.places
        assert held(llm) == NOTHING, interrupts.places
