"""Which tokens end a request, and why it is said to have ended."""

from __future__ import annotations

import pytest

from kiln.engine.config import EngineConfig, KVConfig, ModelConfig
from kiln.engine.core import EngineCore
from kiln.engine.errors import RequestError
from kiln.engine.requests.batch import SampledTokens, StepOutput
from kiln.engine.requests.finish import stop_token_ids
from kiln.engine.requests.request import NewRequest
from kiln.engine.requests.sampling_params import SamplingParams

EOS = frozenset({7, 11})


class Scripted:
    """A model that draws the tokens a test lists, one after the other."""

    device_type, num_blocks, max_model_len, vocab_size = "cpu", 16, 64, 50
    image_token_ids = frozenset()
    adapter_store = limits = host_blocks = embedder = None
    long_start = 0

    def __init__(self, tokens):
        self.tokens = iter(tokens)
        self.banned = []

    def launch(self, batch):
        (row,) = batch.requests
        self.banned.append(row.banned_token_ids)
        return StepOutput((SampledTokens(row.request_id, [next(self.tokens)]),))

    def collect(self, launched):
        return launched


def generate(runner, **params):
    settings = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, **params}
    config = EngineConfig(ModelConfig("scripted"), KVConfig(block_size=4))
    core = EngineCore(config, runner=runner, eos=EOS)
    core.add(NewRequest("a", [1, 2], SamplingParams(**settings)))
    outputs = []
    while core.has_work:
        outputs += core.step()
    return outputs


@pytest.mark.parametrize(
    ("params", "tokens", "reason", "stop_reason"),
    [
        ({"ignore_eos": False}, [1, 7], "stop", None),
        ({"ignore_eos": False}, [1, 11], "stop", None),
        ({}, [7, 11, 1, 2, 3, 4, 5, 6], "length", None),
        ({"stop_token_ids": [5]}, [1, 5], "stop", 5),
        ({"stop_token_ids": [7]}, [1, 7], "stop", 7),
        ({"stop_token_ids": [7], "ignore_eos": False}, [1, 7], "stop", None),
        ({"max_tokens": 1}, [1], "length", None),
        ({"max_tokens": 2, "stop_token_ids": [5]}, [1, 5], "stop", 5),
        ({"min_tokens": 3, "stop_token_ids": [5]}, [5, 5, 5], "stop", 5),
    ],
)
def test_a_request_ends_at_its_stop_token_or_length(params, tokens, reason, stop_reason):
    outputs = generate(Scripted([*tokens, 0, 0]), **params)
    assert [token for output in outputs for token in output.token_ids] == tokens
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (reason, stop_reason)
    assert all(output.finish_reason is None for output in outputs[:-1])


def test_stop_tokens_are_banned_until_min_tokens():
    runner = Scripted([1] * 8)
    generate(runner, min_tokens=2, stop_token_ids=[5], ignore_eos=False)
    assert runner.banned == [EOS | {5}] * 2 + [frozenset()] * 6


def test_listed_stop_tokens_count_even_when_the_models_own_are_ignored():
    def stops(*strings, **params):
        return stop_token_ids(NewRequest("a", [1], SamplingParams(**params), None, strings), EOS)

    assert stops() == EOS
    assert stops(stop_token_ids=[5]) == EOS | {5}
    assert stops(stop_token_ids=[5], ignore_eos=True) == {5}
    assert stops(ignore_eos=True) == frozenset()
    assert stops(8, 9, ignore_eos=True) == {8, 9}


@pytest.mark.parametrize(
    "params",
    [
        {"stop_token_ids": list(range(50))},
        {"stop_token_ids": [t for t in range(50) if t not in EOS], "ignore_eos": False},
        {"stop_token_ids": list(range(25)), "logit_bias": dict.fromkeys(range(25, 50), -100)},
        {"logit_bias": {t: -100 for t in range(50) if t not in EOS}, "ignore_eos": False},
    ],
)
def test_min_tokens_with_every_token_banned_is_refused(params):
    core = EngineCore(EngineConfig(ModelConfig("x")), runner=Scripted([]), eos=EOS)
    settings = {"ignore_eos": True, **params}
    with pytest.raises(RequestError, match="ban all 50 tokens") as caught:
        core.check(NewRequest("a", [1], SamplingParams(min_tokens=1, **settings)))
    assert caught.value.param == "min_tokens"
    core.check(NewRequest("a", [1], SamplingParams(**settings)))
    biases = {t: bias / 2 for t, bias in params.get("logit_bias", {}).items()}
    fewer = {**settings, "stop_token_ids": params.get("stop_token_ids", [0])[1:]}
    core.check(NewRequest("a", [1], SamplingParams(min_tokens=1, **fewer | {"logit_bias": biases})))


def refused(**params):
    core = EngineCore(EngineConfig(ModelConfig("x")), runner=Scripted([]), eos=EOS)
    with pytest.raises(RequestError) as caught:
        core.check(NewRequest("a", [1], SamplingParams(**params)))
    return caught.value


def test_allowed_tokens_that_may_not_be_drawn_are_refused():
    words = [[7], [8], [9, 9]]
    both = refused(allowed_token_ids=[7, 8], bad_words_token_ids=words)
    assert (both.param, "each of them is one of bad_words" in str(both)) == ("allowed_token_ids", 1)
    stops = refused(
        allowed_token_ids=[6, 7], stop_token_ids=[6], min_tokens=2, bad_words_token_ids=words
    )
    assert (stops.param, "ban all 2 tokens that are allowed" in str(stops)) == ("min_tokens", True)
    core = EngineCore(EngineConfig(ModelConfig("x")), runner=Scripted([]), eos=EOS)
    fine = SamplingParams(
        allowed_token_ids=[6, 9], stop_token_ids=[6], min_tokens=2, bad_words_token_ids=words
    )
    core.check(NewRequest("a", [1], fine))


@pytest.mark.parametrize(
    "params", [{"allowed_token_ids": [3, 50]}, {"bad_words_token_ids": [[1], [2, 50]]}]
)
def test_tokens_outside_the_vocabulary_are_refused_by_name(params):
    error = refused(**params)
    assert (error.param, "has token id 50" in str(error)) == (next(iter(params)), True)
