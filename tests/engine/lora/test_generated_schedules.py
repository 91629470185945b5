"""Requests of every kind get the same answers, whatever may change the order of the work.

One engine runs ahead in emulated graphs, with prefix caching and drafts; the other has none of
these. Both get the same generated schedules.
"""

from __future__ import annotations

import random

import pytest
import torch
from depth import at_depth

from kiln.engine.config import (
    EngineConfig,
    GraphConfig,
    KVConfig,
    LoRAConfig,
    LoRAModule,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from kiln.engine.core import EngineCore
from kiln.engine.requests.adapter_job import LoadAdapter, UnloadAdapter
from kiln.engine.requests.request import NewRequest
from kiln.engine.requests.sampling_params import SamplingParams

VOCABULARY = 400
ADAPTERS = ("rank-1", "head", "embedding-and-head")  # two fit at once
CHANGING, FORMS = "changing", ("rank-1", "rank-64")  # each is loaded under this name in turn
GRAPHS = {"KILN_CPU_GRAPHS": "emulate", "KILN_GRAPH_STRICT": "1", "KILN_GRAPH_VERIFY": "off"}


def made_core(model, world=1, *, everything):
    """Return an engine with all that may change the order of the work, or with nothing of it."""
    drafts = {"prompt_lookup_min": 1, "prompt_lookup_max": 3} if everything else {}
    root = str(model.adapters["rank-1"].parent)
    modules = tuple(LoRAModule(name, str(model.adapters[name])) for name in ADAPTERS)
    config = EngineConfig(
        ModelConfig(str(model.folder), dtype="float32", device="cpu", max_model_len=64),
        KVConfig(block_size=4, num_blocks=20, enable_prefix_caching=everything),
        SchedulerConfig(
            max_num_seqs=5,
            max_num_batched_tokens=24,
            overlap=everything,
            scheduling_policy="priority",
        ),
        GraphConfig(garbage_collection=True, bs=(5,)),
        LoRAConfig(modules, max_loras=2, root=root),
        ParallelConfig(world),
        SpeculativeConfig(
            "ngram" if everything else None,
            num_speculative_tokens=3 if everything else 0,
            **drafts,
        ),
    )
    return EngineCore(config, eos=frozenset())


def some(chance, share, value):
    return value if chance.random() < share else None


def random_params(chance):
    """Settings of every kind that a step treats in its own way."""
    tokens = lambda count: [chance.randrange(VOCABULARY) for _ in range(count)]  # noqa: E731
    few = chance.random() < 0.2  # tokens are allowed: such a text repeats itself
    return SamplingParams(
        temperature=chance.choice([0, 0, 0.7]),
        seed=chance.randrange(100),
        max_tokens=chance.randint(1, 12),
        min_tokens=0 if few else chance.choice([0, 0, 1]),
        ignore_eos=True,
        stop_token_ids=some(chance, 0.4, tokens(60)),
        logprobs=some(chance, 0.3, chance.randint(0, 3)),
        prompt_logprobs=some(chance, 0.2, chance.randint(0, 2)),
        repetition_penalty=chance.choice([1.0, 1.0, 1.5]),
        frequency_penalty=chance.choice([0, 0, 0.7]),
        logit_bias=some(chance, 0.2, {chance.randrange(VOCABULARY): 4.0}),
        bad_words_token_ids=None if few else some(chance, 0.2, [tokens(1), tokens(2)]),
        allowed_token_ids=tokens(3) if few else some(chance, 0.15, tokens(90)),
    )


STEMS = [random.Random(seed).choices(range(VOCABULARY), k=36) for seed in range(2)]
STEMS.append([5, 6, 7] * 12)


def schedule(seed):
    """Requests, each with the step at which it arrives, and when it is aborted, if it is."""
    chance = random.Random(seed)
    made = []
    for index in range(chance.randint(2, 7)):
        stem = chance.choice(STEMS)[: chance.choice([0, 7, 12, 20, 36])]
        prompt = stem + chance.choices(range(VOCABULARY), k=chance.randint(1, 40 - len(stem)))
        new = NewRequest(
            f"{seed}-{index}",
            prompt,
            random_params(chance),
            some(chance, 0.6, chance.choice([*ADAPTERS, CHANGING])),
            priority=chance.choice([0, 0, 1, -2]),
            cache_salt=some(chance, 0.2, "salt"),
        )
        made.append((chance.randint(0, 12), some(chance, 0.15, chance.randint(0, 20)), new))
    return made


def answers(core, requests):
    """Each request's tokens, log-probabilities of output and prompt, and why it ended."""
    found = {new.request_id: ([], [], [], None) for *_, new in requests}
    step = 0
    while core.has_work or step <= 12:
        for arrival, abort, new in requests:
            if arrival == step:
                core.add(new)
            if abort is not None and arrival + abort == step:
                core.abort(new.request_id)
        for output in core.step():
            tokens, logprobs, prompt, _ = found[output.request_id]
            logprobs = [*logprobs, *(one.logprob for one in output.logprobs or ())]
            prompt = [*prompt, *(one.logprob for one in output.prompt_logprobs or ())]
            ended = output.message or output.finish_reason
            found[output.request_id] = ([*tokens, *output.token_ids], logprobs, prompt, ended)
        step += 1
    assert core.stats().kv_blocks_used == 0
    return found


def load(core, form):
    """Load an adapter as ``CHANGING``, in the place of the one of before."""
    jobs = []
    if any(info.name == CHANGING for info in core.adapters.infos):
        jobs.append(UnloadAdapter("u", CHANGING, 10.0))
    for job in (*jobs, LoadAdapter("l", CHANGING, form, False)):
        core.adapters.begin(job)
        while core.adapters.are_pending:
            for ended in core.adapters.end():
                assert ended.error is None


def compare(full, plain, seeds):
    for seed in seeds:
        requests = schedule(seed)
        if seed % 3 == 0 or seed == seeds[0]:
            for core in (full, plain):
                load(core, FORMS[seed // 3 % 2])
        found, wanted = answers(full, requests), answers(plain, requests)
        aborted = {new.request_id for _, abort, new in requests if abort is not None}
        for name, (tokens, *logprobs, reason) in wanted.items():
            if name in aborted:
                continue
            assert found[name][0] == tokens, (seed, name)
            assert found[name][3] == reason, (seed, name)
            assert reason in ("stop", "length"), (seed, name)
            for own, other in zip(found[name][1:3], logprobs, strict=True):
                assert own == pytest.approx(other, abs=1e-4), (seed, name)


@pytest.mark.parametrize("part", range(at_depth(1, 10)))
def test_with_everything_or_nothing(made, environment, part):
    plain = made_core(made("llama"), everything=False)
    environment(**GRAPHS)
    full = made_core(made("llama"), everything=True)
    count = at_depth(50, 100)
    compare(full, plain, range(part * count, (part + 1) * count))
    stats = full.stats()
    assert stats.graph_replays, "some steps run in graphs"
    assert stats.preemptions
    assert stats.adapter_evictions
    assert stats.prefix_cache_hits
    assert stats.spec_decode_num_accepted_tokens
    assert stats.steps_not_ahead < 0.2 * stats.steps  # the first one of each burst
    for core in (full, plain):
        core.close()


def test_prompts_are_reported_under_their_adapters(made):
    """An adapter of the LM head changes the logits of every token of a prompt."""
    model = made("llama")
    core = made_core(model, everything=True)
    prompt, params = list(range(7, 36)), SamplingParams(max_tokens=1, prompt_logprobs=0)
    forms = [None, *ADAPTERS]
    requests = [(0, None, NewRequest(str(form), prompt, params, form)) for form in forms]
    found = answers(core, requests)
    core.close()
    for form in forms:
        logprobs = model.logits(form, torch.tensor([prompt]))[0].log_softmax(-1)
        wanted = [logprobs[at, token].item() for at, token in enumerate(prompt[1:])]
        assert found[str(form)][2] == pytest.approx(wanted, abs=1e-4), form


@pytest.mark.parametrize("part", range(at_depth(1, 5)))
def test_over_ranks(made, part):
    full = made_core(made("llama"), 2, everything=True)
    plain = made_core(made("llama"), everything=False)
    count = at_depth(3, 20)
    compare(full, plain, range(part * count, (part + 1) * count))
    for core in (full, plain):
        core.close()
