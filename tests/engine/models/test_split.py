"""Which part of a dimension belongs to which rank."""

from __future__ import annotations

import pytest

from kiln.engine.errors import ConfigError
from kiln.engine.models.split import Split


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("size", [3, 10, 301])
def test_the_shares_of_a_vocabulary_are_the_whole_in_order(world, size):
    shares = [Split(rank, world).vocabulary(size) for rank in range(world)]
    places = [place for share in shares for place in range(size)[share.place]]
    assert places == list(range(size))
    assert len({share.room for share in shares}) == 1


def test_ranks_that_share_a_kv_head_have_the_one_of_their_queries():
    heads = [Split(rank, 8).kv_heads(2, 16, "k_proj").start // 16 for rank in range(8)]
    assert heads == [0] * 4 + [1] * 4
    with pytest.raises(ConfigError, match="tensor_parallel_size=4: k_proj has 6 heads"):
        Split(0, 4).kv_heads(6, 16, "k_proj")
