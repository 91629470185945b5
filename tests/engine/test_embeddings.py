"""Embeddings: how requests for them are scheduled, with a stand-in for the model."""

from __future__ import annotations

import random

import numpy as np
import pytest
from depth import at_depth

from kiln.engine import scheduler
from kiln.engine.config import EngineConfig, KVConfig, ModelConfig, SchedulerConfig
from kiln.engine.core import EngineCore
from kiln.engine.errors import RequestError
from kiln.engine.requests.pooling import Embedder, PoolingParams
from kiln.engine.requests.request import NewRequest
from kiln.engine.requests.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6)


def core_of(runner, *, caching=True, overlap=True, **limits):
    config = EngineConfig(
        ModelConfig("fake"),
        KVConfig(block_size=runner.block_size, enable_prefix_caching=caching),
        SchedulerConfig(overlap=overlap, **limits),
    )
    return EngineCore(config, runner=runner, eos=frozenset())


def ask(name, prompt, pooling="LAST", **more):
    return NewRequest(name, list(prompt), SamplingParams(), pooling=pooling, **more)


def run(core, requests=(), steps=10_000):
    for new in requests:
        core.add(new)
    outputs = {}
    for _ in range(steps):
        for output in core.step() if core.has_work else ():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def pooled(runner, prompt, pooling):
    states = [runner.state(prompt[: end + 1]) for end in range(len(prompt))]
    chosen = {"LAST": states[-1:], "MEAN": states, "CLS": states[:1]}[pooling]
    return np.mean(chosen, axis=0).astype(np.float32)


def check(runner, outputs, prompt, pooling):
    (output,) = outputs
    assert (output.token_ids, output.finish_reason) == ([], "stop")
    found = np.frombuffer(output.embedding, np.float32)
    np.testing.assert_allclose(found, pooled(runner, prompt, pooling), rtol=1e-6)


@pytest.fixture
def embedding_runner(fake_runner):
    def make(**sizes):
        runner = fake_runner(**sizes)
        runner.embedder = Embedder(2)
        return runner

    return make


@pytest.mark.parametrize("pooling", ["LAST", "MEAN", "CLS"])
@pytest.mark.parametrize("overlap", [True, False])
def test_each_prompt_is_pooled_whatever_runs_beside_it(embedding_runner, pooling, overlap):
    """Generated prompts with shared beginnings, in chunks, with too few blocks, and aborts."""
    for seed in range(at_depth(15, 400)):
        chance = random.Random(seed)
        runner = embedding_runner(num_blocks=chance.choice([12, 16, 30]), max_model_len=48)
        core = core_of(
            runner,
            overlap=overlap,
            caching=chance.random() < 0.8,
            max_num_seqs=chance.randint(1, 6),
            max_num_batched_tokens=chance.choice([6, 11, 40]),
        )
        stem = [chance.randrange(50) for _ in range(40)]
        prompts, outputs = {}, {}
        for index in range(14):
            size = chance.randint(1, 48)
            shared = chance.randint(0, min(size, 40))
            prompt = stem[:shared] + [chance.randrange(50) for _ in range(size - shared)]
            prompts[f"r{index}"] = prompt
            core.add(ask(f"r{index}", prompt, pooling))
            for name, found in run(core, steps=chance.randint(0, 2)).items():
                outputs.setdefault(name, []).extend(found)
            if chance.random() < 0.1:
                core.abort(f"r{index}")
                if f"r{index}" not in outputs:
                    del prompts[f"r{index}"]
        for name, found in run(core, steps=300).items():
            outputs.setdefault(name, []).extend(found)
        assert not core.has_work
        assert outputs.keys() == prompts.keys()
        for name, prompt in prompts.items():
            check(runner, outputs[name], prompt, pooling)
        assert core.stats().kv_blocks_used == 0
        assert core.stats().generated_tokens == 0


def test_embeddings_share_steps_with_generation(embedding_runner):
    """The scheduler makes no difference between them; a model that did both would need none."""
    alone = core_of(embedding_runner())
    alone.runner.embedder = None
    wanted = run(alone, [NewRequest("g", [1, 2, 3], GREEDY)], 30)["g"]
    core = core_of(embedding_runner(), max_num_batched_tokens=8)
    requests = [ask("mean", range(20), "MEAN"), ask("last", range(5))]
    core.runner.embedder = None
    core.add(NewRequest("g", [1, 2, 3], GREEDY))
    core.runner.embedder = Embedder(2)
    outputs = run(core, requests, 30)
    tokens = [token for output in outputs["g"] for token in output.token_ids]
    assert tokens == [token for output in wanted for token in output.token_ids]
    check(core.runner, outputs["mean"], list(range(20)), "MEAN")
    check(core.runner, outputs["last"], list(range(5)), "LAST")
    mixed = [len(batch.requests) for batch in core.runner.batches if batch.reports_hidden]
    assert max(mixed) > 1


def test_nothing_is_sampled_and_a_last_token_uses_the_cache(embedding_runner):
    core, prompt = core_of(embedding_runner()), list(range(18))
    first = run(core, [ask("a", prompt)], 5)["a"]
    again = run(core, [ask("b", prompt)], 5)["b"]
    mean = run(core, [ask("c", prompt, "MEAN")], 5)["c"]
    assert [one[0].num_cached_tokens for one in (first, again, mean)] == [0, 16, 0]
    assert [batch.num_samples for batch in core.runner.batches] == [0, 0, 0]
    assert [batch.num_tokens for batch in core.runner.batches] == [18, 2, 18]
    assert first[0].embedding == again[0].embedding
    assert core.stats().prompt_tokens == 3 * 18


def test_a_preempted_request_goes_on_behind_what_it_has_summed_up(embedding_runner):
    """Two grow until only one fits: the second restarts, with the states that it has."""
    runner = embedding_runner(num_blocks=13, max_model_len=48)
    core = core_of(runner, max_num_batched_tokens=5, caching=False)
    core.runner.embedder = None
    core.add(NewRequest("g", [1, 2, 3], SamplingParams(temperature=0, max_tokens=25)))
    core.runner.embedder = Embedder(2)
    prompt = list(range(44))
    outputs = run(core, [ask("mean", prompt, "MEAN")], 80)
    check(runner, outputs["mean"], prompt, "MEAN")
    assert core.scheduler.num_preemptions
    parts = [row for batch in runner.batches for row in batch.requests if row.request_id == "mean"]
    assert sum(row.hidden.num_tokens for row in parts if row.hidden) == 44
    assert sum(row.num_tokens for row in parts) > 44


@pytest.mark.parametrize("place", ["note_reports", "embedding_output"])
def test_a_request_whose_output_is_lost_to_ctrl_c_gives_it_again(
    embedding_runner, monkeypatch, place
):
    """The interrupt comes right behind the call that has completed a sum, or read it."""
    real, prompt = getattr(scheduler, place), list(range(30))
    for number in range(1, 5):
        core, calls = core_of(embedding_runner(), max_num_batched_tokens=8), []

        def interrupted(request, *arguments, calls=calls, number=number):
            result = real(request, *arguments)
            calls.append(request)
            if len(calls) == number:
                raise KeyboardInterrupt
            return result

        monkeypatch.setattr(scheduler, place, interrupted)
        core.add(ask("mean", prompt, "MEAN"))
        with pytest.raises(KeyboardInterrupt):
            run(core, steps=9)
        core.runner.collected = core.runner.launched  # what was in flight is dropped
        check(core.runner, run(core, steps=20)["mean"], prompt, "MEAN")
        assert not core.has_work


def test_a_step_that_raises_ends_only_its_own_request(embedding_runner):
    for late in (False, True):
        runner = embedding_runner()
        runner.raise_late, runner.raise_for = late, {"bad": RuntimeError("broken")}
        core = core_of(runner, max_num_batched_tokens=8)
        prompts = {name: [len(name), *range(19)] for name in ("a", "bad", "other")}
        asked = [ask(name, prompt, "MEAN") for name, prompt in prompts.items()]
        outputs = run(core, asked, 40)
        assert "broken" in outputs["bad"][-1].message
        for name in ("a", "other"):
            check(runner, outputs[name], prompts[name], "MEAN")


def test_an_error_of_a_row_is_the_requests(embedding_runner):
    runner = embedding_runner()
    runner.fail_with["bad"] = "NaN"
    outputs = run(core_of(runner), [ask("bad", [1, 2]), ask("good", [3])], 5)
    assert (outputs["bad"][0].finish_reason, outputs["bad"][0].message) == ("error", "NaN")
    check(runner, outputs["good"], [3], "LAST")


def test_a_prompt_may_fill_the_context(embedding_runner):
    runner = embedding_runner(num_blocks=12, max_model_len=48)
    core = core_of(runner)
    with pytest.raises(RequestError, match=r"maximum context length is 48 tokens.* has 49 tokens$"):
        core.add(ask("long", range(49)))
    check(runner, run(core, [ask("full", range(48))], 5)["full"], list(range(48)), "LAST")


def test_a_model_does_what_it_was_loaded_for(embedding_runner):
    core = core_of(embedding_runner())
    with pytest.raises(RequestError, match="was loaded for embeddings"):
        core.add(NewRequest("g", [1], GREEDY))
    core.runner.embedder = None
    with pytest.raises(RequestError, match="--task embed"):
        core.add(ask("e", [1]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dimensions", 0),
        ("dimensions", True),
        ("dimensions", 1.5),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("use_activation", 1),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(RequestError, match=f"^{field} must be") as caught:
        PoolingParams(**{field: value})
    assert caught.value.param == field
