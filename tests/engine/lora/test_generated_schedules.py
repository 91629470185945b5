"""One step ahead or not, requests of every kind get the same answers, on generated schedules."""

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
)
from kiln.engine.core import EngineCore
from kiln.engine.requests.request import NewRequest
from kiln.engine.requests.sampling_params import SamplingParams

VOCABULARY = 400
ADAPTERS = ("rank-1", "head", "embedding-and-head")  # two fit at once
GRAPHS = {"KILN_CPU_GRAPHS": "emulate", "KILN_GRAPH_STRICT": "1", "KILN_GRAPH_VERIFY": "off"}


def made_core(model, overlap, world=1):
    modules = tuple(LoRAModule(name, str(model.adapters[name])) for name in ADAPTERS)
    config = EngineConfig(
        ModelConfig(str(model.folder), dtype="float32", device="cpu", max_model_len=64),
        KVConfig(block_size=4, num_blocks=20),
        SchedulerConfig(
            max_num_seqs=5,
            max_num_batched_tokens=24,
            overlap=overlap,
            scheduling_policy="priority",
        ),
        GraphConfig(garbage_collection=True, bs=(5,)),
        LoRAConfig(modules, max_loras=2),
        ParallelConfig(world),
    )
    return EngineCore(config, eos=frozenset())


def some(chance, share, value):
    return value if chance.random() < share else None


def random_params(chance):
    """Settings of every kind that a step treats in its own way."""
    tokens = lambda count: [chance.randrange(VOCABULARY) for _ in range(count)]  # noqa: E731
    return SamplingParams(
        temperature=chance.choice([0, 0, 0.7]),
        seed=chance.randrange(100),
        max_tokens=chance.randint(1, 12),
        min_tokens=chance.choice([0, 0, 1]),
        ignore_eos=True,
        stop_token_ids=some(chance, 0.4, tokens(60)),
        logprobs=some(chance, 0.3, chance.randint(0, 3)),
        prompt_logprobs=some(chance, 0.2, chance.randint(0, 2)),
        repetition_penalty=chance.choice([1.0, 1.0, 1.5]),
        frequency_penalty=chance.choice([0, 0, 0.7]),
        logit_bias=some(chance, 0.2, {chance.randrange(VOCABULARY): 4.0}),
        bad_words_token_ids=some(chance, 0.2, [tokens(1), tokens(2)]),
        allowed_token_ids=some(chance, 0.15, tokens(90)),
    )


def schedule(seed):
    """Requests, each with the step at which it arrives."""
    chance = random.Random(seed)
    made = []
    for index in range(chance.randint(2, 7)):
        prompt = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 40))]
        new = NewRequest(
            f"{seed}-{index}",
            prompt,
            random_params(chance),
            some(chance, 0.6, chance.choice(ADAPTERS)),
            priority=chance.choice([0, 0, 1, -2]),
        )
        made.append((chance.randint(0, 12), new))
    return made


def answers(core, requests):
    """Each request's tokens, log-probabilities of output and prompt, and why it ended."""
    found = {new.request_id: ([], [], [], None) for _, new in requests}
    step = 0
    while core.has_work or step <= 12:
        for _, new in (one for one in requests if one[0] == step):
            core.add(new)
        for output in core.step():
            tokens, logprobs, prompt, _ = found[output.request_id]
            logprobs = [*logprobs, *(one.logprob for one in output.logprobs or ())]
            prompt = [*prompt, *(one.logprob for one in output.prompt_logprobs or ())]
            ended = output.message or output.finish_reason
            found[output.request_id] = ([*tokens, *output.token_ids], logprobs, prompt, ended)
        step += 1
    assert core.stats().kv_blocks_used == 0
    return found


def compare(ahead, behind, seeds):
    for seed in seeds:
        requests = schedule(seed)
        found, wanted = answers(ahead, requests), answers(behind, requests)
        for name, (tokens, *logprobs, reason) in wanted.items():
            assert found[name][0] == tokens, (seed, name)
            assert found[name][3] == reason, (seed, name)
            assert reason in ("stop", "length"), (seed, name)
            for own, other in zip(found[name][1:3], logprobs, strict=True):
                assert own == pytest.approx(other, abs=1e-4), (seed, name)


def test_ahead_in_graphs_or_not(made, environment):
    """The engine ahead runs in emulated graphs, the other one without."""
    behind = made_core(made("llama"), overlap=False)
    environment(**GRAPHS)
    ahead = made_core(made("llama"), overlap=True)
    compare(ahead, behind, range(at_depth(12, 1000)))
    stats = ahead.stats()
    assert stats.graph_replays, "some steps run in graphs"
    assert stats.preemptions
    assert stats.adapter_evictions
    for core in (ahead, behind):
        core.close()


def test_prompts_are_reported_under_their_adapters(made):
    """An adapter of the LM head changes the logits of every token of a prompt."""
    model = made("llama")
    core = made_core(model, overlap=True)
    prompt, params = list(range(7, 36)), SamplingParams(max_tokens=1, prompt_logprobs=0)
    forms = [None, *ADAPTERS]
    requests = [(0, NewRequest(str(form), prompt, params, form)) for form in forms]
    found = answers(core, requests)
    core.close()
    for form in forms:
        logprobs = model.logits(form, torch.tensor([prompt]))[0].log_softmax(-1)
        wanted = [logprobs[at, token].item() for at, token in enumerate(prompt[1:])]
        assert found[str(form)][2] == pytest.approx(wanted, abs=1e-4), form


def test_over_ranks(made):
    ahead, behind = made_core(made("llama"), True, 2), made_core(made("llama"), False)
    compare(ahead, behind, range(at_depth(3, 100)))
    for core in (ahead, behind):
        core.close()
