"""The sizes of graphs: every step has one, and little of it is padding."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

import pytest

from kiln.cache.env import Env
from kiln.engine.config import GraphConfig
from kiln.engine.errors import ConfigError
from kiln.engine.graphs.buckets import decode_buckets, token_buckets
from kiln.engine.runner.capture import FEW_ROWS, MOST_PREFILL_TOKENS, graph_keys
from kiln.jit_kernels.ops.linear.checks import MOST_ROWS
from kiln.jit_kernels.ops.quantized_linear import cases

MOST = range(1, 1025)
TILES = {MOST_ROWS, cases.FEW_ROWS, cases.MANY_ROWS, 2 * cases.MANY_ROWS}


def test_at_most_an_eighth_of_a_decode_step_is_padding():
    for most in MOST:
        sizes = decode_buckets(most)
        for rows in range(1, most + 1):
            size = sizes[bisect_left(sizes, rows)]
            assert rows <= size, (most, rows)
            assert 8 * (size - rows) <= size, (most, rows, size)


def test_the_largest_decode_bucket_is_the_largest_step():
    for most in MOST:
        sizes = decode_buckets(most)
        assert sizes[-1] == most
        assert all(a < b for a, b in pairwise((0, *sizes)))


def test_there_are_no_more_decode_buckets_than_the_bound_needs():
    """A bucket one row larger would waste more than an eighth for the first batch in it."""
    sizes = decode_buckets(1024)
    assert len(decode_buckets(256)) == 32
    for before, size in pairwise((0, *sizes[:-1])):
        assert 8 * (size - before) > size + 1 or size in TILES


def test_tiles_of_rows_that_kernels_multiply_have_a_bucket_each():
    for most in range(1, 1025):
        assert {rows for rows in TILES if rows <= most} <= {*decode_buckets(most)}


def test_token_buckets_ascend_and_cover_every_step():
    for most in MOST:
        sizes = token_buckets(most)
        assert sizes[-1] == most
        assert all(a < b for a, b in pairwise((0, *sizes)))
        for before, size in pairwise(sizes):
            assert size <= 2 * before, "at most half of a step is padding"
    for before, size in pairwise(token_buckets(8192)):
        assert before < 512 or size - before - 1 <= size / 8, "less of a large one"
    assert len(token_buckets(8192)) < 48


def test_decode_graphs_are_captured_up_to_the_rows_of_a_step():
    config = GraphConfig()
    keys = graph_keys(config, rows=9, tokens=64, prefill="off")
    assert [key.rows for key in keys] == list(decode_buckets(9))
    assert all(key.is_decode and key.tokens == key.rows for key in keys)
    few_tokens = graph_keys(config, rows=9, tokens=5, prefill="off")
    assert few_tokens[-1].rows == 5, "a step has no more rows than tokens"


def test_steps_with_prefills_are_captured_for_few_rows_and_for_all():
    keys = graph_keys(GraphConfig(), rows=40, tokens=4096, prefill=Env().graph_prefill)
    prefills = [key for key in keys if not key.is_decode]
    assert {key.rows for key in prefills} == {FEW_ROWS, 40}
    for rows in (FEW_ROWS, 40):
        sizes = [key.tokens for key in prefills if key.rows == rows]
        assert sizes == list(token_buckets(MOST_PREFILL_TOKENS))
    longer = graph_keys(GraphConfig(), rows=40, tokens=2000, prefill="full", most_prefill=4096)
    assert max(key.tokens for key in longer) == 2000
    alone = graph_keys(GraphConfig(), rows=1, tokens=64, prefill="full")
    assert all(key.is_decode for key in alone), "its plan would lack a kernel"
    short = graph_keys(GraphConfig(), rows=99, tokens=48, prefill="full")
    assert max(key.rows for key in short) == 48, "a step has no more rows than tokens"


def test_sizes_that_are_given_are_captured_once_each():
    keys = graph_keys(GraphConfig(bs=(8, 2, 8, 3)), rows=8, tokens=64, prefill="off")
    assert [key.rows for key in keys] == [2, 3, 8]
    limited = graph_keys(GraphConfig(max_bs=4), rows=8, tokens=64, prefill="off")
    assert [key.rows for key in limited] == list(decode_buckets(4))


@pytest.mark.parametrize(
    ("config", "name"),
    [(GraphConfig(max_bs=9), "cuda_graph_max_bs"), (GraphConfig(bs=(1, 9)), "cuda_graph_bs")],
)
@pytest.mark.parametrize(("rows", "tokens"), [(8, 64), (64, 8)])
def test_a_size_that_no_step_can_have_is_refused(config, name, rows, tokens):
    with pytest.raises(ConfigError, match=rf"{name}: 9 rows.*at most 8.*max_num_seqs"):
        graph_keys(config, rows=rows, tokens=tokens, prefill="off")
