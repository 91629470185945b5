"""Sampling: exact filters, the right distribution, and draws that ignore their neighbours."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import pytest
import torch

from kiln.engine.requests.batch import Batch, ScheduledRequest
from kiln.engine.requests.request import TokenLogprobs
from kiln.engine.requests.sampling_params import SamplingParams
from kiln.engine.runner import sampler
from kiln.engine.runner.inputs import StepInputs
from kiln.engine.runner.masks import Masks

INF, NAN = math.inf, math.nan


def request(name="r", seed=0, position=0, banned=(), **params):
    settings = SamplingParams(**params)
    return ScheduledRequest(
        name, 0, 1, 0, [1], 0, [0], True, position, settings, seed, frozenset(banned)
    )


class Sampled(NamedTuple):
    request_id: str
    token_id: int | None
    logprobs: TokenLogprobs | None
    error: str | None


def sample(logits, requests):
    """Sample a token for each row as a step does."""
    cpu = torch.device("cpu")
    requests = [one._replace(row=row, new_block_ids=[row]) for row, one in enumerate(requests)]
    size = max(len(requests), 1)
    inputs = StepInputs(
        max_requests=size,
        max_tokens=8 * size,
        max_model_len=8,
        block_size=8,
        vocab_size=logits.shape[1],
        device=cpu,
    )
    inputs.use_pool(torch.zeros(8 * size, dtype=torch.int32))
    batch = Batch(tuple(requests))
    inputs.send(batch)
    made = inputs.make(batch)
    lengths, masks = inputs.lengths(len(requests)), Masks(inputs.history)
    late = [None] * len(requests)
    rows = sampler.ToSample(logits, made.settings, made.keys, lengths, requests, late)
    samples = sampler.sample(rows, masks)
    return [
        Sampled(one.request_id, *(one.token_ids or [None]), *(one.logprobs or [None]), one.error)
        for one in sampler.HostCopies(size, size, cpu).begin(samples).wait(requests)
    ]


LOGITS = [0.0, 3.0, 1.0, 2.0, 3.0, -1.0]


@pytest.mark.parametrize(
    ("params", "shares"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.75}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"min_p": 0.6}, [4 / 7, 3 / 7, 0, 0]),
    ],
    ids=str,
)
@pytest.mark.parametrize("by", ["seed", "position"])
def test_draws_follow_the_filtered_distribution(params, shares, by):
    count = 4000
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(count, 4)
    requests = [request(**{by: number}, **params) for number in range(count)]
    drawn = torch.tensor([token.token_id for token in sample(logits, requests)])
    seen = drawn.bincount(minlength=4)
    wanted = torch.tensor(shares) * count
    assert seen[wanted == 0].sum() == 0
    chi_square = ((seen - wanted).square() / wanted)[wanted > 0].sum().item()
    assert chi_square < 20  # one in five thousand at three degrees of freedom


def test_a_draw_ignores_neighbours_order_and_batch_size():
    logits = torch.randn(6, 40) * 2
    settings = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0},
        {"temperature": 1.3, "top_k": 5, "logprobs": 2},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.0, "banned": range(1, 20)},
    ]
    rows = [request(str(i), seed=i * 7, position=i, **s) for i, s in enumerate(settings)]
    together = sample(logits, rows)
    backwards = sample(logits.flip(0), rows[::-1])[::-1]
    alone = [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(6)]
    ids = [token.token_id for token in together]
    assert ids == [token.token_id for token in backwards]
    assert ids == [token.token_id for token in alone]
    assert [token.request_id for token in together] == ["0", "1", "2", "3", "4", "5"]


def test_another_seed_or_position_draws_anew():
    logits = torch.zeros(1, 1000)
    base = sample(logits, [request()])[0].token_id
    assert sample(logits, [request()])[0].token_id == base
    assert sample(logits, [request(seed=1)])[0].token_id != base
    assert sample(logits, [request(position=1)])[0].token_id != base
    assert sample(logits, [request(seed=-1)])[0].token_id != base


def test_greedy_takes_the_lowest_id_among_equals_even_beside_random_rows():
    logits = torch.tensor([LOGITS, LOGITS, LOGITS])
    rows = [request(temperature=0), request(temperature=5.0), request(temperature=0)]
    drawn = sample(logits, rows)
    assert drawn[0].token_id == drawn[2].token_id == 1


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_banned_tokens_are_never_drawn(temperature):
    logits = torch.tensor([[9.0, 8.0, 0.0, 7.0]])
    for seed in range(20):
        rows = [request(seed=seed, temperature=temperature, banned=(0, 1, 3))]
        assert sample(logits, rows)[0].token_id == 2


def test_logprobs_are_of_the_raw_logits_before_bans_temperature_and_filters():
    logits = torch.tensor([[2.0, 1.0, 0.0, 1.5]])
    row = request(temperature=0.1, top_k=1, banned=(0,), logprobs=2)
    logprobs = sample(logits, [row])[0].logprobs
    wanted = logits[0].log_softmax(0)
    assert logprobs.token_id == 3
    assert logprobs.rank == 2
    assert logprobs.logprob == pytest.approx(wanted[3].item())
    assert [(token, rank) for token, _, rank in logprobs.top] == [(0, 1), (3, 2)]
    assert logprobs.top[0][1] == pytest.approx(wanted[0].item())


def test_each_row_gets_the_logprobs_it_asked_for():
    logits = torch.randn(4, 6)
    rows = [request(temperature=0, logprobs=wanted) for wanted in (None, 0, 3, 20)]
    found = [token.logprobs for token in sample(logits, rows)]
    assert found[0] is None
    assert [len(logprobs.top) for logprobs in found[1:]] == [0, 3, 6]


@pytest.mark.parametrize(
    ("broken", "word"),
    [([1.0, NAN, 2.0], "NaN"), ([-INF, -INF, -INF], "no finite"), ([1.0, INF, 2.0], r"\+inf")],
    ids=["nan", "none", "overflow"],
)
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_broken_row_is_an_error_and_its_neighbours_are_not(broken, word, temperature):
    logits = torch.tensor([[0.0, 5.0, 0.0], broken, [9.0, 0.0, 0.0]])
    rows = [request(str(i), seed=i, temperature=temperature, logprobs=1) for i in range(3)]
    first, error, last = sample(logits, rows)
    assert re.search(word, error.error)
    assert error.logprobs is None
    assert first.error is None
    assert last.error is None
    whole = sample(logits[[0, 2]], [rows[0], rows[2]])
    assert [first, last] == whole
    assert sample(logits[[1, 1]], [rows[1]] * 2) == [error, error]  # nobody is left to draw for


def test_banning_everything_is_an_error_of_that_row():
    banned = request(banned=(0, 1, 2))
    drawn = sample(torch.zeros(2, 3), [banned, request()])
    assert "only stop tokens can be sampled, but min_tokens" in drawn[0].error
    assert drawn[1].error is None
    assert sample(torch.zeros(1, 3), [banned]) == drawn[:1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_logits_are_sampled_in_float32(dtype):
    logits = torch.randn(3, 50).to(dtype)
    rows = [request(seed=i, top_p=0.9, logprobs=1) for i in range(3)]
    assert sample(logits, rows) == sample(logits.float(), rows)


def with_counts(row, counts):
    """A request whose output has each token so often; 0: the prompt has it instead."""
    prompt = [token for token, count in counts.items() if count == 0]
    output = [token for token, count in counts.items() for _ in range(count)]
    tokens = [*prompt, *output]
    return row._replace(token_ids=tokens, num_tokens=len(tokens), num_output_tokens=len(output))


def test_penalties_and_biases_act_through_the_tokens_of_the_request():
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0, -9.0]])
    nothing = {4: 0}

    def greedy(counts, **params):
        row = with_counts(request(temperature=0, **params), counts)
        return sample(logits, [row])[0].token_id

    assert greedy(nothing) == 0
    assert greedy({0: 2}, frequency_penalty=0.4) == 0
    assert greedy({0: 3}, frequency_penalty=0.4) == 1
    assert greedy({0: 0}, frequency_penalty=2.0, presence_penalty=2.0) == 0
    assert greedy({0: 1}, presence_penalty=1.5) == 1
    assert greedy({0: 0}, repetition_penalty=1.5) == 1
    assert greedy(nothing, logit_bias={2: 2.5}) == 2
    assert greedy(nothing, logit_bias={0: -100, 1: -100}) == 2
    banned = request(temperature=0, banned=(3,), logit_bias={3: 100})
    assert sample(logits, [banned])[0].token_id == 0
    mixed = [request(temperature=0), banned, with_counts(request(temperature=0), {0: 1})]
    assert [token.token_id for token in sample(logits.expand(3, 5), mixed)] == [0, 0, 0]


def test_a_bias_is_added_before_the_repetition_penalty_divides():
    logits = torch.tensor([[2.0, 3.0, -1.0, -9.0]])
    row = request(temperature=0, repetition_penalty=2.0, logit_bias={0: 6.0})

    def token(counts, *bias):
        params = row.params.replace(logit_bias=dict(bias))
        return sample(logits, [with_counts(row._replace(params=params), counts)])[0].token_id

    assert token({0: 1}, (0, 5.0)) == 0  # (2 + 5) / 2 = 3.5; 2 / 2 + 5 would win as well
    assert token({0: 1}, (0, 3.5)) == 1  # (2 + 3.5) / 2 = 2.75; 2 / 2 + 3.5 would win
    assert token({3: 0}, (0, 1.5)) == 0  # a biased token that was not seen is not penalised
    assert token({1: 0}, (0, 0.0)) == 0  # a token of the prompt is, without a bias too
    assert token({1: 0}, (0, 3.0)) == 0  # each bias goes to its own token
    assert token({2: 1, 1: 3}, (2, 2.5)) == 0  # 2 against 3 / 2 and (-1 + 2.5) / 2
    assert token({2: 0, 0: 0, 1: 0}, (2, 0.5)) == 1  # 1, 1.5 and -0.5 * 2


def test_logprobs_ignore_penalties():
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    row = request(temperature=0, presence_penalty=2.0, logprobs=1)
    row = with_counts(row, {0: 1, 1: 1})
    found = sample(logits, [row])[0]
    assert (found.token_id, found.logprobs.rank, found.logprobs.top[0][0]) == (0, 1, 0)
    assert found.logprobs.logprob == pytest.approx(logits[0].log_softmax(0)[0].item())
