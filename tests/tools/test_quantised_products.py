"""The rows of gpu_check about products of quantised weights, on the CPU."""

from __future__ import annotations

import pytest
import torch
from gpu import quantised

from kiln.engine.layers.channel_weight import TokenWeight


@pytest.mark.parametrize("form", quantised.FORMS)
def test_a_product_is_right_within_the_rounding_of_its_dtype(form, monkeypatch):
    monkeypatch.setattr(quantised, "ROWS", (1, 5))
    for size in [(96, 136), (20, 256)]:
        row = quantised.product_row(form, size, torch.bfloat16, "cpu")
        assert row["ok"], row
        assert row["error"] > 1e-4, "16-bit sums are rounded"


def test_a_product_with_another_scale_is_wrong(monkeypatch):
    class Wrong(TokenWeight):
        __slots__ = ()

        def product(self, x, out, bias):
            TokenWeight(self.codes, 1.02 * self.scales).product(x, out, bias)

    def wrong(values):
        right = quantised.FORMS["fp8 channel, token"](values)
        return Wrong(right.codes, right.scales)

    monkeypatch.setattr(quantised, "ROWS", (5,))
    monkeypatch.setattr(quantised, "FORMS", {**quantised.FORMS, "wrong": wrong})
    assert not quantised.product_row("wrong", (32, 64), torch.bfloat16, "cpu")["ok"]
