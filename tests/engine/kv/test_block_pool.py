"""The block pool: every block is free or held, once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiln.engine.kv.block_pool import BlockPool


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_blocks_are_never_lost_nor_given_twice(num_blocks, moves):
    pool, held = BlockPool(num_blocks), []
    for allocates, count in moves:
        if allocates:
            taken = pool.allocate(count)
            assert (taken is None) == (count > num_blocks - len(held))
            held += taken or []
        else:
            pool.free(held[:count])
            del held[:count]
        assert len(set(held)) == len(held)
        assert set(held) <= set(range(num_blocks))
        assert (pool.num_held, pool.num_available) == (len(held), num_blocks - len(held))
        pool.check_integrity()


def test_an_allocation_that_does_not_fit_takes_nothing():
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert pool.num_available == 3
    assert pool.allocate(0) == []


@pytest.mark.parametrize("block", [0, 2, 7, -1])
def test_a_double_free_raises(block):
    pool = BlockPool(3)
    taken = pool.allocate(1)
    assert taken is not None
    pool.free(taken)
    with pytest.raises(RuntimeError, match=f"block {block} was freed but is not held"):
        pool.free([block])
    pool.check_integrity()


def test_integrity_finds_a_block_that_is_free_twice_or_in_no_place():
    pool = BlockPool(3)
    pool._free.append(0)
    with pytest.raises(RuntimeError, match="each once"):
        pool.check_integrity()
    pool = BlockPool(3)
    pool._free.pop()
    with pytest.raises(RuntimeError, match="each once"):
        pool.check_integrity()
