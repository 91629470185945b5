"""The tiles of a step's tokens: against a slow loop, on random adapters."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kiln.jit_kernels.ops.lora.tiles import (
    LARGE,
    MOST_SMALL,
    SMALL,
    fill_tiles,
    num_elements,
    num_tiles,
    tile_of,
    tiles_in,
)


def filled(slots, tokens, num_slots):
    """The tiles of a step, written over what another step has left."""
    numbers = np.random.randint(0, 100, num_elements(tokens, num_slots), np.int32)
    fill_tiles(numbers, np.array(slots, np.int32), tokens, num_slots)
    return tiles_in(torch.from_numpy(numbers), tokens, num_slots)


def slow_tiles(slots, tokens, num_slots):
    """The same, token by token: slots, and rows of tokens."""
    tile, made = tile_of(tokens), []
    for slot in range(num_slots):
        own = [token for token, of_token in enumerate(slots) if of_token == slot]
        made += [(slot, own[i : i + tile]) for i in range(0, len(own), tile)]
    made += [(-1, [])] * (num_tiles(tokens, num_slots) - len(made))
    rows = [row + [-1] * (tile - len(row)) for _, row in made]
    return [slot for slot, _ in made], rows


def test_tiles_are_those_of_a_slow_loop():
    sizes = np.random.default_rng(0)
    for case in range(200):
        used = int(sizes.integers(0, MOST_SMALL * (3 if case % 4 == 0 else 1) // 2))
        tokens = used + int(sizes.integers(0, 20))  # of a graph: the rest is padding
        num_slots = int(sizes.choice([1, 2, 8, 40, 600]))
        slots = sizes.integers(-1, min(num_slots, int(sizes.choice([1, 4, 600]))), used)
        tiles = filled(slots, tokens, num_slots)
        want_slots, want_tokens = slow_tiles(slots.tolist(), tokens, num_slots)
        assert tiles.slots.tolist() == want_slots
        assert tiles.tokens.tolist() == want_tokens
        assert tiles.slots.dtype == tiles.tokens.dtype == torch.int32


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 100, MOST_SMALL, MOST_SMALL + 1, 1000])
@pytest.mark.parametrize("num_slots", [1, 2, 8, 300])
def test_every_token_has_one_place_even_if_each_adapter_fills_one_more_tile(tokens, num_slots):
    """The worst case: every adapter but the first has a tile with a single token."""
    tile, slots = tile_of(tokens), list(range(min(num_slots, tokens)))
    slots += [0] * (tokens - len(slots))
    np.random.default_rng(tokens).shuffle(slots)
    tiles = filled(slots, tokens, num_slots)
    places = [
        (token, slot)
        for slot, row in zip(tiles.slots.tolist(), tiles.tokens.tolist(), strict=True)
        for token in row
        if token >= 0
    ]
    assert sorted(places) == list(enumerate(slots))
    used = int((tiles.slots >= 0).sum())
    assert used == sum(-(-slots.count(slot) // tile) for slot in set(slots))
    for row, slot in zip(tiles.tokens, tiles.slots.tolist(), strict=True):
        count = int((row >= 0).sum())
        assert bool((row[:count] >= 0).all()), "tokens are in front"
        assert (count > 0) == (slot >= 0), "a tile without a token has no adapter"
    assert bool((tiles.slots[used:] == -1).all()), "empty tiles are behind the others"


def test_steps_without_tokens_or_adapters():
    assert num_tiles(0, 8) == num_elements(0, 8) == 0
    assert filled([], 0, 8).tokens.shape == (0, SMALL)
    for used in (0, 3):
        tiles = filled([-1] * used, 40, 8)
        assert bool((tiles.slots == -1).all())
        assert bool((tiles.tokens == -1).all())


def test_the_number_of_tiles_grows_with_adapters_only_as_far_as_there_are_tokens():
    assert [num_tiles(tokens, 64) for tokens in (0, 1, 2, 64, 256)] == [0, 1, 2, 64, 76]
    assert [tile_of(tokens) for tokens in (MOST_SMALL, MOST_SMALL + 1)] == [SMALL, LARGE]
    assert num_elements(2048, 8) == num_tiles(2048, 8) * (LARGE + 1)
    for num_slots in (1, 3, 64):
        for tokens in range(600):
            tile = tile_of(tokens)
            single = min(num_slots, tokens)  # adapters with a token in a tile that is not full
            most = single + (tokens - single) // tile
            assert num_tiles(tokens, num_slots) >= most
