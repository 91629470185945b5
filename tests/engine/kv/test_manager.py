"""The KV manager: a request gets the blocks that its tokens need, or none."""

from __future__ import annotations

from kiln.engine.kv.block_pool import BlockPool
from kiln.engine.kv.manager import KVManager
from kiln.engine.requests.request import Request
from kiln.engine.requests.sampling_params import SamplingParams


def request(name="r"):
    return Request(name, [1], 1, SamplingParams(), 0, 1, 100, frozenset(), is_plain=True)


def test_blocks_are_taken_only_where_tokens_need_them():
    kv, one = KVManager(BlockPool(3), 4), request()
    assert kv.capacity == kv.room(one) == 12
    assert [kv.extend(one, tokens) for tokens in (1, 4, 5, 3)] == [True] * 4
    assert len(one.block_ids) == kv.pool.num_held == 2


def test_what_does_not_fit_takes_nothing():
    kv, one, other = KVManager(BlockPool(3), 4), request("a"), request("b")
    assert kv.extend(one, 5)
    assert not kv.extend(other, 5)
    assert (other.block_ids, kv.pool.num_free) == ([], 1)
    assert (kv.room(one), kv.room(other)) == (12, 4)
    assert kv.extend(other, 4)


def test_a_new_request_fits_where_its_blocks_and_the_spare_ones_are_free():
    kv = KVManager(BlockPool(3), 4)
    assert kv.fits(8, spare_blocks=1)
    assert not kv.fits(9, spare_blocks=1)
    assert not kv.fits(8, spare_blocks=2)


def test_a_released_request_holds_nothing_and_a_batch_still_reads_what_it_held():
    kv, one = KVManager(BlockPool(2), 4), request()
    kv.extend(one, 8)
    seen_by_the_batch = one.block_ids
    kv.release(one)
    assert (one.block_ids, kv.pool.num_held, len(seen_by_the_batch)) == ([], 0, 2)
    kv.pool.check_integrity()
