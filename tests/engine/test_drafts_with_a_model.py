"""Drafts and late masks over a real model: in graphs, chunks, preempted, over ranks."""

from __future__ import annotations

import random

import pytest
from depth import at_depth
from late_sources import LateSource

from kiln.engine.config import (
    EngineConfig,
    GraphConfig,
    KVConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from kiln.engine.core import EngineCore
from kiln.engine.requests.drafts import Draft
from kiln.engine.requests.request import NewRequest
from kiln.engine.requests.sampling_params import SamplingParams

VOCABULARY, DRAFTS, NUM_TOKENS = 300, 3, 14
PROMPTS = [[5, 9, 5, 11], [7] * 19, list(range(20, 55))]
GRAPHS = {"KILN_CPU_GRAPHS": "emulate", "KILN_GRAPH_STRICT": "1", "KILN_GRAPH_VERIFY": "shadow:2"}
SETTINGS = [
    {},
    {"repetition_penalty": 1.8, "logprobs": 2},
    {"frequency_penalty": 1.2, "min_tokens": 4, "stop_token_ids": [*range(0, 300, 9)]},
    {"bad_words_token_ids": [[index, index + 1] for index in range(0, 298, 2)]},
    {"allowed_token_ids": [*range(0, 300, 7)], "presence_penalty": 0.5},
    {"temperature": 1.0, "seed": 5, "top_p": 0.9},
]


def requests(late=False):
    made = []
    for number, prompt in enumerate(PROMPTS):
        for index, own in enumerate(SETTINGS):
            settings = {"temperature": 0, "ignore_eos": True, "max_tokens": NUM_TOKENS, **own}
            name = f"{'late' if late and index % 2 else 'own'} {number} {index}"
            made.append(NewRequest(name, prompt, SamplingParams(**settings)))
    return made


def Source(**settings):
    """Allows a seventh of the vocabulary, by the sum of all tokens."""

    def bits(tokens):
        allowed = sum(1 << token for token in range(sum(tokens) % 7, VOCABULARY, 7))
        return allowed.to_bytes(4 * -(-VOCABULARY // 32), "little")

    return LateSource(bits, **settings)


def made(folder, drafts, source=None, world=1, **flags):
    scheduler = {
        name: flags.pop(name)
        for name in ("max_num_seqs", "max_num_batched_tokens", "overlap")
        if name in flags
    }
    config = EngineConfig(
        ModelConfig(str(folder), dtype="float32", device="cpu", max_model_len=64),
        KVConfig(block_size=4, num_blocks=flags.pop("num_blocks", 512)),
        SchedulerConfig(**{"max_num_seqs": 6, **scheduler}),
        GraphConfig(garbage_collection=True, **flags),
        speculative=SpeculativeConfig("ngram" if drafts else None, num_speculative_tokens=drafts),
        parallel=ParallelConfig(tensor_parallel_size=world),
    )
    return EngineCore(config, masks=source, eos=frozenset())


def answers(core, requests):
    """Each request's tokens, log-probabilities and reason."""
    for new in requests:
        core.add(new)
    found = {new.request_id: ([], [], None) for new in requests}
    while core.has_work:
        for output in core.step():
            tokens, logprobs, _ = found[output.request_id]
            logprobs = [*logprobs, *(one.logprob for one in output.logprobs or ())]
            reason = output.message or output.finish_reason
            found[output.request_id] = ([*tokens, *output.token_ids], logprobs, reason)
    return found


class Drafter:
    """Proposes what will be answered, and often a token that will not."""

    def __init__(self, core, whole, by_host):
        self.whole, self.by_host, self.chance = whole, by_host, random.Random(1)
        self.inputs = core.runner.executor.step.inputs
        if not by_host:
            core.runner.executor.propose = self.propose_after

    wanted = num_tokens = DRAFTS  # of the device; those of the host need none

    def begin(self, num_rows, *, with_prompts):
        pass

    def observe(self, batch, sampled):
        pass

    def following(self, request_id, known, most):
        tokens = self.whole[request_id][known : known + most]
        return [token if self.chance.random() < 0.8 else 3 for token in tokens]

    def propose(self, request, most):
        if not self.by_host:
            return Draft(min(most, DRAFTS))
        if request.num_pending:
            return Draft(0)
        own = self.following(request.request_id, len(request.token_ids), min(most, DRAFTS))
        return Draft(len(own), tuple(own))

    def propose_after(self, batch):
        lengths, first = self.inputs.lengths(batch.num_samples).tolist(), 0
        for row in batch.requests:
            if row.num_samples:
                last = first + row.num_samples - 1 - int(self.inputs.rejected[row.row])
                own = self.following(row.request_id, lengths[last] + 1, DRAFTS)
                for place, token in enumerate(own):
                    self.inputs.drafts[row.row, place] = token
            first += row.num_samples


def check(found, wanted):
    for name, (tokens, logprobs, reason) in wanted.items():
        assert found[name][0] == tokens, name
        assert found[name][1] == pytest.approx(logprobs, abs=1e-4), name
        assert found[name][2] == reason, name


@pytest.fixture(scope="module")
def wanted(random_llama):
    """Answers without drafts, which other tests compare with transformers."""
    found = {}
    for late in (False, True):
        core = made(random_llama[1], 0, Source())
        found[late] = answers(core, requests(late))
        core.close()
    return found


FLAGS = {
    "ahead": ({}, {}),
    "chunks": ({"max_num_batched_tokens": 16}, {}),
    "preempted": ({"num_blocks": 18}, {}),
    "not ahead": ({"overlap": False}, {}),
    "graphs": ({"bs": (4, 6), "max_num_batched_tokens": 32}, GRAPHS),
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("by_host", [False, True])
@pytest.mark.parametrize("flags", FLAGS)
def test_drafts_and_late_masks_change_no_token(random_llama, wanted, environment, flags, by_host):
    own, variables = FLAGS[flags]
    environment(**variables)
    for late in (False, True):
        whole = {
            new.request_id: [*new.prompt_token_ids, *wanted[late][new.request_id][0]]
            for new in requests(late)
        }
        core = made(
            random_llama[1], DRAFTS, Source(seed=1, answers=whole if by_host else None), **own
        )
        core.scheduler.drafter = Drafter(core, whole, by_host)
        check(answers(core, requests(late)), wanted[late])
        stats = core.stats()
        core.close()
        assert bool(stats.preemptions) == ("num_blocks" in own)
        if flags == "graphs" and not by_host:
            assert any("rows" in size for size in stats.graph_replays)


@pytest.mark.parametrize("world", at_depth([2], [2, 4]))
def test_over_several_ranks_too(random_llama, wanted, world):
    whole = {
        new.request_id: [*new.prompt_token_ids, *wanted[True][new.request_id][0]]
        for new in requests(late=True)
    }
    core = made(random_llama[1], DRAFTS, Source(seed=2, answers=whole), world, overlap=False)
    core.scheduler.drafter = Drafter(core, whole, by_host=True)
    check(answers(core, requests(late=True)), wanted[True])
    core.close()


def test_late_masks_one_step_ahead_over_ranks(random_llama, wanted):
    core = made(random_llama[1], 0, Source(), 2)
    check(answers(core, requests(late=True)), wanted[True])
    assert core.stats().steps_not_ahead <= 2
    core.close()


def test_the_masks_act(wanted):
    late = {name: own for name, own in wanted[True].items() if name.startswith("late")}
    for name, (tokens, _, _) in late.items():
        known = list(PROMPTS[int(name.split()[1])])
        for token in tokens:
            assert token % 7 == sum(known) % 7
            known.append(token)
    assert len(late) == 9
