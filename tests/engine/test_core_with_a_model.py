"""The core over a real model: a request that fails ends alone, and the engine goes on."""

from __future__ import annotations

import json
import math

import pytest
import torch

from kiln.engine.config import EngineConfig, KVConfig, ModelConfig
from kiln.engine.core import EngineCore
from kiln.engine.errors import RequestError
from kiln.engine.requests.request import NewRequest
from kiln.engine.requests.sampling_params import SamplingParams

VOCABULARY = 20
TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture
def core(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    model = ModelConfig(str(tmp_path), device="cpu", load_format="dummy")
    return EngineCore(EngineConfig(model, KVConfig(block_size=4, num_blocks=32)))


def answers(core, *requests):
    """Step to the end and return each request's tokens, and its error or why it ended."""
    for new in requests:
        core.add(new)
    found = {}
    while core.has_work:
        for output in core.step():
            tokens, _ = found.get(output.request_id, ([], None))
            ended = output.message or output.finish_reason
            found[output.request_id] = ([*tokens, *output.token_ids], ended)
    assert core.stats().kv_blocks_used == 0
    return found


def test_a_request_that_bans_every_token_is_refused_and_one_token_is_enough(core):
    stops = list(range(VOCABULARY))
    settings = {"max_tokens": 4, "min_tokens": 2}
    bad = NewRequest("bad", [1, 2], SamplingParams(**settings, stop_token_ids=stops))
    with pytest.raises(RequestError, match="ban all 20 tokens"):
        core.add(bad)
    good = NewRequest("good", [1, 2], SamplingParams(**settings, stop_token_ids=stops[:-1]))
    tokens, _ = answers(core, good)["good"]
    assert tokens[:2] == [VOCABULARY - 1] * 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_weight_ends_the_requests_that_read_it(core, value):
    with torch.inference_mode():
        core.runner.loaded.model.embedding.weight[3] = value
    bad = [NewRequest(name, [1, 3], GREEDY) for name in ("bad", "worse")]
    assert {"NaN" in ended for _, ended in answers(core, *bad).values()} == {True}
    good = NewRequest("good", [4, 5], GREEDY)
    tokens, ended = answers(core, good)["good"]
    assert (len(tokens), ended) == (4, "length")  # though its blocks held NaN before
    assert answers(core, *bad, good)["good"] == (tokens, ended)


def test_the_step_behind_does_not_overwrite_results_that_are_not_read_yet(core):
    """Both steps are launched, and run, before the first is collected."""
    requests = [NewRequest(str(index), [5 + index], GREEDY) for index in range(4)]
    alone = [answers(core, request) for request in requests]
    launch = core.runner.launch

    def launch_and_run(batch):
        step = launch(batch)
        step.exception()  # waits for it
        return step

    core.runner.launch = launch_and_run
    assert [answers(core, request) for request in requests] == alone
