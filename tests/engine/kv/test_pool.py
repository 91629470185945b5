"""The KV pool's tensors and their size."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from kiln.engine.config import KVConfig
from kiln.engine.errors import ConfigError
from kiln.engine.kv.pool import KVPool, KVShape
from kiln.engine.kv.shape import AttentionShape
from kiln.engine.kv.sizing import size_pool
from kiln.engine.kv.zeros import zeros

CPU = torch.device("cpu")
SHAPE = KVShape(AttentionShape(4, 2, 8, (None,) * 3), torch.float16)


def test_a_token_takes_keys_and_values_in_every_layer():
    assert SHAPE.bytes_per_token == 2 * 3 * 2 * 8 * 2 + 4  # the token's id


def test_slots_and_blocks_are_two_views_of_zeroed_memory():
    pool = KVPool(SHAPE, 5, 4, CPU)
    key, value = torch.randn(2, 2, 2, 8).half().unbind()
    pool.store(1, torch.tensor([6, 19]), key, value)
    for index, blocks in enumerate(pool.blocks(1)):
        assert blocks.shape == (5, 4, 2, 8)
        assert torch.equal(blocks[1, 2], (key, value)[index][0])
        assert torch.equal(blocks[4, 3], (key, value)[index][1])
        assert blocks.count_nonzero() == 2 * 2 * 8
    assert not pool.layer(0)[0].any()
    assert not pool.layer(2)[1].any()


def test_a_set_number_of_blocks_is_taken():
    assert size_pool(KVConfig(block_size=4, num_blocks=7), SHAPE, CPU, 28) == 7


def test_memory_on_a_cpu_becomes_blocks():
    config = KVConfig(block_size=4, kv_memory_gib=1.0)
    assert size_pool(config, SHAPE, CPU, 100) == 2**30 // (4 * SHAPE.bytes_per_token)


@pytest.mark.parametrize(
    ("config", "flag"),
    [
        (KVConfig(block_size=4, num_blocks=7), "raise num_kv_blocks"),
        (KVConfig(block_size=4, kv_memory_gib=0.000006), "raise kv_memory_gib"),
    ],
)
def test_a_pool_too_small_for_one_request_says_which_length_fits(config, flag):
    with pytest.raises(ConfigError, match=flag) as caught:
        size_pool(config, SHAPE, CPU, 1000)
    blocks = config.num_blocks or int(config.kv_memory_gib * 2**30) // (4 * SHAPE.bytes_per_token)
    assert f"set max_model_len to {4 * blocks} or less" in str(caught.value)


@pytest.mark.parametrize(
    ("share", "blocks"), [(0.9, (0.9 * 1000 - 400)), (1.0, 600)], ids=["most", "all"]
)
def test_memory_on_a_gpu_is_the_share_less_what_is_taken(monkeypatch, share, blocks):
    block_bytes = 4 * SHAPE.bytes_per_token
    free, total = 600 * block_bytes, 1000 * block_bytes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    config = KVConfig(block_size=4, gpu_memory_utilization=share)
    assert size_pool(config, SHAPE, torch.device("cuda", 0), 100) == int(blocks)


def test_what_a_step_takes_on_a_gpu_is_left_free(monkeypatch):
    block_bytes = 4 * SHAPE.bytes_per_token
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (600 * block_bytes,) * 2)
    config, cuda = KVConfig(block_size=4, gpu_memory_utilization=1.0), torch.device("cuda", 0)
    assert size_pool(config, SHAPE, cuda, 100, 50 * block_bytes) == 550
    with pytest.raises(ConfigError, match="or lower max_num_batched_tokens: a step needs"):
        size_pool(config, SHAPE, cuda, 100, 590 * block_bytes)


def test_weights_that_leave_no_room_are_a_config_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 1000))
    with pytest.raises(ConfigError, match=r"use a smaller model, or raise gpu_memory_utilization"):
        size_pool(KVConfig(), SHAPE, torch.device("cuda", 0), 100)


def test_a_pool_by_head_holds_the_same_and_each_head_of_a_block_in_one_piece():
    key, value = torch.randn(2, 3, 2, 8).half().unbind()
    slots = torch.tensor([6, 19, 0])
    by_token, by_head = (KVPool(SHAPE, 5, 4, CPU, by_head=choice) for choice in (False, True))
    for pool in (by_token, by_head):
        pool.store(1, slots, key, value)
    for index in (0, 1):
        views = [pool.views(1)[index] for pool in (by_token, by_head)]
        assert views[0].shape == (5, 2, 4, 8)
        assert torch.equal(*views)
        assert torch.equal(by_token.blocks(1)[index], by_head.blocks(1)[index])
        assert views[1][3, 1].is_contiguous()
        assert views[1].stride(0) == 2 * 2 * 4 * 8
    assert not by_head.views(0)[0].any()
    with pytest.raises(IndexError):
        by_head.layer(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_pool_takes_memory_only_where_it_is_written(dtype):
    before = _resident()
    large = zeros([1 << 18, 1 << 10], dtype, CPU)
    assert _resident() - before < 16 << 20
    large[7, 5:9] = 1
    assert large[7].float().sum() == 4
    assert not large[::4096].float().any()
    with pytest.raises(RuntimeError, match="no memory for"):
        zeros([1 << 62], dtype, CPU)


def _resident():
    """The bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
