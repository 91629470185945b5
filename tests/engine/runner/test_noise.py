"""Noise is exponential, and depends on seed, position and token id alone."""

from __future__ import annotations

import pytest
import torch

from kiln.engine.runner.noise import exponential_noise

CPU = torch.device("cpu")


def splitmix(key, count):
    """Vigna's reference generator, on Python's integers."""
    mask, outputs = 2**64 - 1, []
    for _ in range(count):
        key = (key + 0x9E3779B97F4A7C15) & mask
        z = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        outputs.append(z ^ (z >> 31))
    return outputs


def test_a_row_is_the_splitmix_stream_of_its_key():
    assert splitmix(1234567, 2) == [6457827717110365317, 3203168211198807973]  # published values
    (first,) = splitmix(-7 & (2**64 - 1), 1)
    (key,) = splitmix((first + 3) & (2**64 - 1), 1)
    uniform = torch.tensor([((bits >> 11) + 0.5) / 2**53 for bits in splitmix(key, 1000)])
    noise = exponential_noise([-7], [3], 1000, CPU)
    assert noise.dtype == torch.float64
    torch.testing.assert_close(noise[0], -uniform.log().double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("seeds", "positions"), [(range(200), [0] * 200), ([5] * 200, range(200))], ids=["seed", "step"]
)
def test_neighbouring_keys_give_independent_exponentials(seeds, positions):
    noise = exponential_noise(list(seeds), list(positions), 500, CPU)
    assert (noise > 0).all()
    assert noise.mean().item() == pytest.approx(1, abs=0.015)  # five sigmas of 100,000 draws
    assert noise.var().item() == pytest.approx(1, abs=0.05)
    # Kolmogorov and Smirnov's distance from Exp(1): 1.95 / sqrt(n) is one in a thousand.
    ordered = (1 - (-noise.flatten()).exp()).sort().values
    ranks = torch.arange(1, ordered.numel() + 1) / ordered.numel()
    assert (ordered - ranks).abs().max() < 1.95 / ordered.numel() ** 0.5
    between_rows = torch.corrcoef(noise)[0, 1:]
    between_columns = torch.corrcoef(noise.T)[0, 1:]
    assert between_rows.abs().max() < 5 / 500**0.5
    assert between_columns.abs().max() < 5 / 200**0.5


def test_a_row_does_not_depend_on_the_others():
    together = exponential_noise([1, 2, 2, 2**63 - 1], [0, 5, 6, 9], 50, CPU)
    assert torch.equal(together[2:3], exponential_noise([2], [6], 50, CPU))
    assert torch.equal(
        together[:, :20], exponential_noise([1, 2, 2, 2**63 - 1], [0, 5, 6, 9], 20, CPU)
    )
    assert len({row.sum().item() for row in together}) == 4
