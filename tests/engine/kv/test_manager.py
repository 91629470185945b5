"""The KV manager: a request gets the blocks that its tokens need, or none."""

from __future__ import annotations

from kiln.engine.kv.block_pool import BlockPool
from kiln.engine.kv.manager import KVManager, Prefix
from kiln.engine.requests.request import Request
from kiln.engine.requests.sampling_params import SamplingParams

NOTHING = Prefix([], None)


def request(name="r", tokens=(1,)):
    return Request(
        name, [*tokens], len(tokens), SamplingParams(), 0, 1, 100, frozenset(), is_plain=True
    )


def test_blocks_are_taken_only_where_tokens_need_them():
    kv, one = KVManager(BlockPool(3), 4), request()
    assert kv.capacity == kv.room(one) == 12
    assert [kv.extend(one, tokens) for tokens in (1, 4, 5, 3)] == [True] * 4
    assert len(one.block_ids) == kv.pool.num_held == 2


def test_what_does_not_fit_takes_nothing():
    kv, one, other = KVManager(BlockPool(3), 4), request("a"), request("b")
    assert kv.extend(one, 5)
    assert not kv.extend(other, 5)
    assert (other.block_ids, kv.pool.num_available) == ([], 1)
    assert (kv.room(one), kv.room(other)) == (12, 4)
    assert kv.extend(other, 4)


def test_a_new_request_fits_where_its_blocks_and_the_spare_ones_are_free():
    kv = KVManager(BlockPool(3), 4)
    assert kv.fits(request(tokens=[1] * 8), NOTHING, spare_blocks=1)
    assert not kv.fits(request(tokens=[1] * 9), NOTHING, spare_blocks=1)
    assert not kv.fits(request(tokens=[1] * 8), NOTHING, spare_blocks=2)


def test_a_released_request_holds_nothing_and_a_batch_still_reads_what_it_held():
    kv, one = KVManager(BlockPool(2), 4), request()
    kv.extend(one, 8)
    seen_by_the_batch = one.block_ids
    kv.release(one)
    assert (one.block_ids, kv.pool.num_held, len(seen_by_the_batch)) == ([], 0, 2)
    kv.pool.check_integrity()


def begin(kv, one):
    """Let a request run as the scheduler does, with blocks for all of its tokens."""
    prefix = kv.prefix(one)
    kv.begin(one, prefix)
    assert kv.extend(one, len(one.token_ids))
    return prefix


def test_known_blocks_are_shared_and_the_last_token_is_always_computed():
    kv, one, same = KVManager(BlockPool(9), 4, caching=True), *map(request, "ab")
    one.token_ids = same.token_ids = [*range(8)]
    assert begin(kv, one).blocks == []
    kv.index(one, 7)  # the second block lacks a token
    assert kv.prefix(same).blocks == one.block_ids[:1]
    kv.index(one, 8)
    assert begin(kv, same).blocks == one.block_ids[:1]  # not the block with the last token
    assert same.num_computed_tokens == same.num_cached_tokens == 4
    assert kv.pool.num_held == 3
    kv.index(same, 8)  # a second block with known contents is not indexed
    kv.release(same)
    assert (kv.pool.num_held, kv.pool.num_idle) == (2, 0)
    kv.release(one)
    assert (kv.pool.num_held, kv.pool.num_idle) == (0, 2)
    kv.pool.check_integrity()


def test_blocks_that_are_shared_count_once_for_who_wants_to_run():
    kv, one = KVManager(BlockPool(4), 4, caching=True), request(tokens=range(12))
    begin(kv, one)
    kv.index(one, 12)
    same = request(tokens=range(13))
    assert kv.fits(same, kv.prefix(same), spare_blocks=0)
    assert not kv.fits(same, kv.prefix(same), spare_blocks=1)
    kv.release(one)  # its idle blocks are available, but not to those who share them
    assert kv.fits(same, kv.prefix(same), spare_blocks=0)
    assert not kv.fits(same, kv.prefix(same), spare_blocks=1)


def test_the_least_recently_used_block_goes_first_and_ends_before_beginnings():
    kv, one, two = KVManager(BlockPool(4), 2, caching=True), *map(request, "ab")
    one.token_ids, two.token_ids = [1, 2, 3, 4], [5, 6, 7, 8]
    for each in (one, two):
        begin(kv, each)
        kv.index(each, 4)
        kv.release(each)
    begin(kv, third := request(tokens=[9, 9]))
    assert len(kv.prefix(request(tokens=[1, 2, 3, 4, 5])).blocks) == 1
    assert len(kv.prefix(request(tokens=[5, 6, 7, 8, 9])).blocks) == 2
    kv.release(third)
    kv.pool.check_integrity()


def test_a_request_waits_for_who_computes_most_of_what_it_needs():
    kv, first = KVManager(BlockPool(40), 4, caching=True), request(tokens=range(16))
    begin(kv, first)
    most, half, little = (
        request(name, [*range(shared), *[50] * (17 - shared)])
        for name, shared in (("most", 16), ("half", 12), ("little", 8))
    )
    assert kv.prefix(most) is kv.prefix(half) is None
    assert kv.prefix(little).blocks == []
    kv.index(first, 12)
    assert kv.prefix(most) is None
    assert len(kv.prefix(half).blocks) == 3
    kv.release(first)  # it ends before it has computed the rest
    assert len(kv.prefix(most).blocks) == 3


def test_nothing_is_found_under_another_root_nor_where_the_index_was_forgotten():
    kv, one = KVManager(BlockPool(9), 4, caching=True), request(tokens=range(8))
    begin(kv, one)
    kv.index(one, 4)
    for root in ((1, None), (0, "salt")):
        other = request(tokens=range(8))
        other.prefix.root = root
        assert kv.prefix(other).blocks == []
    kv.forget_prefixes()
    assert (kv.prefix(request(tokens=range(8))).blocks, kv.pool.num_held) == ([], 2)
    kv.index(one, 8)  # behind a block that is not indexed any more
    kv.release(one)
    assert (kv.pool.num_idle, kv.pool.num_available) == (0, 9)
    kv.pool.check_integrity()


def test_prompt_log_probabilities_are_computed_unless_they_are_known():
    kv, one = KVManager(BlockPool(9), 4, caching=True), request(tokens=range(8))
    begin(kv, one)
    kv.index(one, 8)
    other = request(tokens=range(8))
    other.params = SamplingParams(prompt_logprobs=0)
    assert kv.prefix(other).blocks == []
    other.prompt_logprobs = [None] * 5  # it was preempted after these
    assert len(kv.prefix(other).blocks) == 1
