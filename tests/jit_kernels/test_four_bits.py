"""The order of codes of 4 bits: every code comes back, and is where kernels look for it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kiln.jit_kernels.ops.shared.four_bits import CHUNK, pack_codes, unpack_codes


@pytest.mark.parametrize("inputs", [1, 8, 128, 130, 360, 2880])
def test_every_code_comes_back_with_zeros_behind(inputs: int) -> None:
    codes = torch.randint(0, 16, (2, 3, inputs), dtype=torch.uint8)
    packed = pack_codes(codes)
    padded = -(-inputs // CHUNK) * CHUNK
    assert packed.shape == (2, 3, padded // 2)
    back = unpack_codes(packed)
    assert torch.equal(back[..., :inputs], codes)
    assert not back[..., inputs:].any()


def test_a_code_is_where_a_thread_of_four_looks_for_it() -> None:
    codes = torch.randint(0, 16, (2 * CHUNK,), dtype=torch.uint8)
    words = pack_codes(codes).numpy().view(np.uint32)
    for place, code in enumerate(codes.tolist()):
        chunk, j, t, i = place // 128, place // 32 % 4, place // 8 % 4, place % 8
        word = int(words[16 * chunk + 4 * t + j])
        assert word >> (4 * (i // 2) + 16 * (i % 2)) & 15 == code
