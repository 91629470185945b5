"""The sampler where its first pass gives up: too many low numbers, and logits of any size."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kiln.jit_kernels.ops.sampling import sample_tokens

sampler = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("test_sampling.py"))))


def test_more_low_numbers_than_there_is_room_for_run_all_the_same():
    vocab = 40_000  # of 32 threads: 156 low numbers, where 112 have room
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
