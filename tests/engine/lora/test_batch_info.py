"""The segments of a step, and those of the rows that need logits."""

from __future__ import annotations

import torch

from kiln.engine.lora.batch_info import make_batch_info
from kiln.engine.requests.batch import Batch, ScheduledRequest
from kiln.engine.requests.sampling_params import SamplingParams


def expanded(info):
    """The adapter slot of each token."""
    ends = zip(info.starts, info.starts[1:], strict=False)
    return [slot for slot, (a, b) in zip(info.adapters, ends, strict=True) for _ in range(a, b)]


def test_every_token_has_the_adapter_of_its_request():
    for _ in range(50):
        count = int(torch.randint(1, 9, ()))
        slots = torch.randint(-1, 3, (count,)).tolist()
        lengths = torch.randint(1, 4, (count,)).tolist()
        samples = torch.randint(0, 2, (count,)).bool().tolist()
        info = make_batch_info(slots, lengths, samples)
        tokens = [slot for slot, length in zip(slots, lengths, strict=True) for _ in range(length)]
        assert expanded(info) == tokens
        assert expanded(info.pruned) == [
            s for s, sampled in zip(slots, samples, strict=True) if sampled
        ]
        for own in (info, info.pruned):
            assert all(a != b for a, b in zip(own.adapters, own.adapters[1:], strict=False))
        covered = [-1] * info.num_tokens
        for slot, part in info.adapted():
            covered[part] = [slot] * (part.stop - part.start)
        assert covered == tokens


def test_in_a_decode_step_the_lm_head_sees_every_row():
    info = make_batch_info([0, 0, -1, 2], [1] * 4, [True] * 4)
    assert info.pruned.adapters == info.adapters == (0, -1, 2)
    assert info.starts == info.pruned.starts == (0, 2, 3, 4)


def test_no_row_needs_logits():
    info = make_batch_info([1], [5], [False])
    assert info.pruned.num_tokens == 0
    assert list(info.pruned.adapted()) == []


def test_a_batch_knows_whether_it_has_adapters():
    row = ScheduledRequest("a", 0, 1, 0, [1], 0, [0], True, 0, SamplingParams(), 0)
    assert not Batch((row, row)).has_adapters
    assert Batch((row, row._replace(adapter_slot=0))).has_adapters
