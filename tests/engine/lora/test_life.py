"""2,000 random loads, unloads, reloads and requests: each answer is that of its own adapter."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import torch

from kiln.engine.config import EngineConfig, KVConfig, LoRAConfig, ModelConfig, SchedulerConfig
from kiln.engine.core import EngineCore
from kiln.engine.errors import AdapterBusyError, AdapterError, AdapterNotFoundError
from kiln.engine.lora.slots import AdapterSlots
from kiln.engine.requests.adapter_job import LoadAdapter, UnloadAdapter
from kiln.engine.requests.request import NewRequest
from kiln.engine.requests.sampling_params import SamplingParams

NUM_STEPS = 2000
NAMES = [f"name-{index}" for index in range(7)]
POOL_BYTES = 320_000  # the largest form takes 240,000, most take 10,000 to 60,000


@pytest.fixture
def poisoned(monkeypatch):
    """Memory of the pool that an adapter has left is NaN: reading it ends a request."""
    take_off = AdapterSlots._take_off

    def poison(slots, own):
        span = own.span
        take_off(slots, own)
        with torch.inference_mode():
            slots.store.pool.values[span.start : span.end] = float("nan")

    monkeypatch.setattr(AdapterSlots, "_take_off", poison)


class Life:
    """An engine, and what its clients know."""

    def __init__(self, made, answers, seed):
        self.chance = random.Random(seed)
        self.forms = made.forms
        self.cases = {}  # form to its prompts with their answers
        for prompt, form, tokens in zip(*answers, strict=True):
            self.cases.setdefault(form, []).append((prompt, tokens))
        root = made.folder.parent
        lora = LoRAConfig(max_loras=3, memory_gib=POOL_BYTES / 2**30, root=str(root))
        self.core = EngineCore(
            EngineConfig(
                ModelConfig(str(made.folder), dtype="float32", device="cpu"),
                KVConfig(num_blocks=8),
                SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=40),
                lora=lora,
            )
        )
        self.slots = self.core.scheduler.adapters
        self.slots._patience = 0.05
        self.loaded = {}  # name to form
        self.jobs = {}  # id to job
        self.expected, self.found = {}, {}
        self.counts = Counter()
        self.ids = map(str, itertools.count())

    def act(self):
        """Do something that a client might do."""
        chance, name = self.chance, self.chance.choice(NAMES)
        busy = {job.name for job in self.jobs.values()}
        what = chance.random()
        if what < 0.12 and name not in self.loaded and name not in busy:
            pinned = chance.random() < 0.15
            self.begin(LoadAdapter(next(self.ids), name, chance.choice(self.forms), pinned))
        elif what < 0.155 and name in self.loaded and name not in busy:
            self.begin(UnloadAdapter(next(self.ids), name, chance.choice([0, 0.02, 60])))
        elif what < 0.5:
            own = chance.choice([*self.loaded, name])
            self.request(chance.choice([None, own, own, own]), busy)
        elif what < 0.53:
            open_ = [one for one in self.expected if self.found.get(one, ("", None))[1] is None]
            if open_:
                gone = chance.choice(open_)
                self.core.abort(gone)
                del self.expected[gone]
                self.counts["aborted"] += 1

    def begin(self, job):
        self.core.adapters.begin(job)
        self.jobs[job.job_id] = job

    def request(self, name, busy):
        form = None if name is None else self.loaded.get(name)
        request_id = f"request-{next(self.ids)}"
        prompt, tokens = self.chance.choice(self.cases[form])
        params = SamplingParams(temperature=0, max_tokens=len(tokens), ignore_eos=True)
        try:
            self.core.add(NewRequest(request_id, prompt, params, name))
        except AdapterNotFoundError:
            assert name is not None
            assert form is None or name in busy, "it is loaded, and stays so"
            self.counts["not found"] += 1
            return
        assert name is None or form is not None, "it is not loaded"
        self.expected[request_id] = tokens

    def step(self):
        ended = self.core.adapters.end()
        for job_id, error in ended:
            self.end(self.jobs.pop(job_id), error)
        for output in self.core.step() if self.core.has_work else ():
            tokens, _ = self.found.get(output.request_id, ([], None))
            self.found[output.request_id] = (tokens + output.token_ids, output.finish_reason)
        in_use = {own.name for own in self.slots.loaded if own.running}
        assert len(in_use) <= 3

    def end(self, job, error):
        loads = isinstance(job, LoadAdapter)
        if error is None:
            self.counts["loaded" if loads else "unloaded"] += 1
            if loads:
                self.loaded[job.name] = job.path
            else:
                del self.loaded[job.name]
        elif loads:  # pinned ones in the way, or in its own
            assert isinstance(error, AdapterError | AdapterBusyError)
            assert "pinned" in str(error)
        else:
            assert isinstance(error, AdapterBusyError)
            self.counts["busy"] += 1

    def finish(self):
        while self.core.has_work or self.jobs:
            self.step()
        for name in list(self.loaded):
            self.begin(UnloadAdapter(next(self.ids), name, 0))
        while self.jobs:
            self.step()


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.usefixtures("poisoned")
def test_random_life(made, answers, seed):
    life = Life(made("llama"), answers("llama"), seed)
    for _ in range(NUM_STEPS // 2):
        for _ in range(2):
            life.act()
        life.step()
    life.finish()
    for request_id, tokens in life.expected.items():
        assert life.found[request_id] == (tokens, "length"), request_id
    store = life.core.runner.adapter_store
    assert store.sizes == {}
    assert not store.pool.ranks.any()
    assert life.slots.loaded == []
    assert bool(store.pool.values.isnan().any())
    assert life.core.scheduler.kv.pool.num_held == 0
    # Every kind of event must have happened. How often depends on how fast adapters load compared
    # with the steps: there were 24 to 43 evictions on an idle machine, and once 4 on a busy one.
    counts = life.counts
    assert len(life.expected) > 100
    assert min(counts[what] for what in ("loaded", "unloaded", "not found", "aborted")) > 5
    assert counts["busy"] > 0
    assert life.slots.num_evictions > 0
    assert life.core.scheduler.num_preemptions > 0
