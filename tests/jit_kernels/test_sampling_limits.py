"""The sampler if its first pass does not suffice: low numbers, close cutoffs, large logits."""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from depth import at_depth

from kiln.jit_kernels.ops.sampling.cases import top_p_at_an_edge
from kiln.jit_kernels.ops.sampling.functions import Edits, sample_tokens
from kiln.jit_kernels.ops.sampling.noise import masses, weights


def spans_of(rows, edited):
    """So many edits for each row, one row after the other."""
    firsts = torch.arange(rows, dtype=torch.int32) * edited
    return torch.stack([firsts, firsts + edited], dim=1)


sampler = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("test_sampling.py"))))


def test_more_low_numbers_than_fit_give_the_same_tokens():
    vocab = 40_000  # 32 threads find about 156 low numbers and have room for 112
    logits = torch.stack((torch.randn(vocab), torch.zeros(vocab), torch.randn(vocab) * 4))
    rows = sampler.rows_of(
        [sampler.Asked(), sampler.Asked(), sampler.Asked(1.0, 0, 0.9999)], [3, 4, 5]
    )
    wanted = sample_tokens(logits, *rows)
    samples = sampler.kernel(sampler.narrower(32))(logits, *rows)
    assert torch.equal(samples.tokens, wanted.tokens)
    assert torch.equal(samples.cutoffs, wanted.cutoffs)


@pytest.mark.parametrize("size", [1e6, 1e30], ids=str)
def test_logits_of_any_size_and_any_temperature(size):
    logits = torch.randn(6, 1500) * size
    logits[3:] /= size
    temperatures = (1.0, float(size), 0.3, 1e-5, 1e30, 2e-4)
    rows = sampler.rows_of(
        [sampler.Asked(one, 0, 0.8) for one in temperatures], list(range(6)), report=2
    )
    samples, wanted = (
        sampler.kernel()(logits, *rows, width=2),
        sample_tokens(logits, *rows, width=2),
    )
    for name in ("tokens", "cutoffs", "ranks", "top_tokens", "errors"):
        assert torch.equal(getattr(samples, name), getattr(wanted, name)), name
    torch.testing.assert_close(samples.logprobs, wanted.logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("spread", "vocab"),
    [(3, 3000), (0.4, 3000), (0.4, 60_000)],
    ids=["in-the-list", "more-than-the-list-has", "in-more-units-than-there-is-room-for"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_top_p_that_is_just_the_share_of_some_tokens_where_others_are_edited(
    dtype, spread, vocab
):
    """The approximate sum of the first pass does not decide which tokens are kept."""
    rows, edited = at_depth(10, 28), 50
    logits = (torch.randn(rows, vocab) * spread).to(dtype)
    tokens = torch.cat([torch.randperm(vocab)[:edited] for _ in range(rows)]).int()
    biases = torch.randn(edited * rows) * (spread + 1)
    spans = spans_of(rows, edited)
    edits = Edits(spans, tokens, torch.full_like(tokens, -1), biases)
    of_rows = torch.arange(rows).repeat_interleave(edited)
    full = logits.float().index_put((of_rows, tokens.long()), biases, accumulate=True)
    settings, keys = sampler.rows_of([sampler.Asked(0.8)] * rows, list(range(rows)))
    settings[:, 1] = torch.tensor([top_p_at_an_edge(full[row], 0.8, row) for row in range(rows)])
    samples, wanted = (
        run(logits, settings, keys, edits=edits) for run in (sampler.kernel(), sample_tokens)
    )
    assert torch.equal(samples.cutoffs, wanted.cutoffs)
    assert torch.equal(samples.tokens, wanted.tokens)


@pytest.mark.parametrize("full", [16, 64], ids="{}-threads-full".format)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_list_that_is_slightly_too_short_is_rebuilt(dtype, full):
    """300 of 512 threads have one of the largest logits; the first list takes the bound from 288.

    The second takes it from 384; with 64 threads that have only large logits, it overflows.
    """
    logits = torch.full((6, 16384), -20.0)
    for row in logits:
        units = torch.randperm(512)[:, None] * 16
        row[units[:300]] = 2 + torch.rand(300, 1) / 8
        row[units[300 : 300 + full] + torch.arange(16)] = 1.5 + torch.rand(full, 16) / 8
        row[units[300 + full :]] = 1.2 + torch.rand(212 - full, 1) / 16
    mass = torch.softmax(logits, 1).where(logits >= 2, 0).sum(1)
    rows = sampler.rows_of(
        [sampler.Asked(1.0, 0, 1.02 * p + 0.01 * p * i) for i, p in enumerate(mass.tolist())]
    )
    logits = logits.to(dtype)
    samples, wanted = (run(logits, *rows) for run in (sampler.kernel(), sample_tokens))
    assert torch.equal(samples.cutoffs, wanted.cutoffs)
    assert torch.equal(samples.tokens, wanted.tokens)


def test_edits_count_if_more_tokens_are_kept_than_the_list_holds():
    vocab, edited = 3000, 50
    logits = torch.randn(4, vocab) * 0.05
    spans = spans_of(4, edited)
    tokens = torch.cat([torch.randperm(vocab)[:edited] for _ in range(4)]).int()
    counts, biases = torch.full_like(tokens, -1), 1 + torch.rand(4 * edited)
    edits = Edits(spans, tokens, counts, biases)
    rows = sampler.rows_of([sampler.Asked(1.0, 0, top_p) for top_p in (0.5, 0.8, 0.9, 0.99)])
    samples, wanted = (run(logits, *rows, edits=edits) for run in (sampler.kernel(), sample_tokens))
    assert torch.equal(samples.cutoffs, wanted.cutoffs)
    assert torch.equal(samples.tokens, wanted.tokens)


@pytest.mark.quick(3)
@pytest.mark.parametrize("edited", [0, 200], ids="{}-edits".format)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_cut_among_thousands_of_tokens_wherever_zero_lies(dtype, edited):
    """More tokens than the list holds. Keys of numbers near zero are far apart; some are equal."""
    base = torch.randn(6, 3000)
    logits = [base[0] * 2, base[1] - 20, base[2].clamp(min=0), base[3] - base[3].max() + 0.01]
    logits = torch.stack([*logits, base[4] * 0.01, (base[5] * 4).round() / 4]).to(dtype)
    rows = len(logits)
    edits = None
    if edited:
        tokens = torch.cat([torch.randperm(3000)[:edited] for _ in range(rows)]).int()
        spans = spans_of(rows, edited)
        biases = torch.randn(len(tokens)) * 0.5
        edits = Edits(spans, tokens, torch.full_like(tokens, -1), biases)
    asked = [(1500, 1.0), (2900, 1.0), (0, 0.8), (0, 0.999), (2000, 0.9), (2900, 0.9999)]
    for top_k, top_p in asked:
        how = sampler.rows_of([sampler.Asked(1.0, top_k, top_p)] * rows, list(range(rows)))
        samples, wanted = (
            run(logits, *how, edits=edits) for run in (sampler.kernel(), sample_tokens)
        )
        assert torch.equal(samples.cutoffs, wanted.cutoffs), (top_k, top_p)
        assert torch.equal(samples.tokens, wanted.tokens), (top_k, top_p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [40, 3000])
def test_where_fewer_tokens_are_left_than_top_k_the_cutoff_is_the_lowest_number(vocab, dtype):
    logits = torch.full((4, vocab), -torch.inf)
    logits[:, :5] = torch.randn(4, 5)
    logits = logits.to(dtype)
    tokens = torch.tensor([1, 3] * 4).int()
    spans = spans_of(4, 2)
    biases = torch.tensor([0.3, -torch.inf] * 4)
    edits = Edits(spans, tokens, torch.full_like(tokens, -1), biases)
    rows = sampler.rows_of([sampler.Asked(1.0, 20, p) for p in (1.0, 0.9, 1.0, 0.5)])
    for some in (None, edits):
        samples, wanted = (
            run(logits, *rows, edits=some) for run in (sampler.kernel(), sample_tokens)
        )
        assert torch.equal(samples.cutoffs, wanted.cutoffs)
        assert torch.equal(samples.tokens, wanted.tokens)


def test_the_error_of_a_rows_mass():
    """The kernel allows for four rounding errors of 2^-22; a single weight has one."""
    worst = 0.0
    for top, exponent, small, step in itertools.product(
        (16.0, 17.0, 33.0, 65.0), (11, 13, 15, 17), range(-28, -11), (1.0, 1.75, -1.25)
    ):
        scale = torch.tensor(exponent / top)
        pair = torch.tensor([top, step * 2.0**small])  # exact in bf16; the second many times over
        own, others = masses(weights(pair, torch.tensor(top), scale)).double() * 2.0**-40
        many = 2.0 ** float(scale * (top - pair[1]))  # together as much as the largest
        power = 2.0 ** (float(scale) * (float(pair[1]) - top))
        for count in (many, 8 * many):
            worst = max(worst, float(abs((own + count * others) / (1 + count * power) - 1)))
    assert 2.0**-22 < worst < 4 * 2.0**-22
