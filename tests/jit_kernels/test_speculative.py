"""Drafts by n-gram lookup: which match counts, which tokens follow, and which rows get any."""

from __future__ import annotations

import random

import numpy as np
import pytest
from depth import at_depth

from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.ops.speculative import functions
from kiln.jit_kernels.ops.speculative.cases import ngram_step
from kiln.jit_kernels.ops.speculative.functions import propose_ngram
from kiln.jit_kernels.ops.speculative.spec import MAX_LOOKUP
from kiln.jit_kernels.ops.step.message import records_of
from kiln.jit_kernels.toolchains import host

UNTOUCHED = -9


@pytest.fixture(params=["reference", "kernel"], autouse=True)
def form(request, monkeypatch):
    """Run the operator as its reference, or through the kernel's own source on the CPU."""

    def run_kernel(spec, **named):
        host.run(spec, spec.parameters.Arguments(**named), env=settings())

    if request.param == "kernel":
        monkeypatch.setattr(functions, "call", run_kernel)


def proposed(histories, most=3, lookup=(4, 2), block_size=4, **own):
    """The drafts of each history, and their numbers; all other rows must be left alone."""
    count = len(histories)
    given = {"samples": [1] * count, "rejected": [0] * count, "wanted": [most] * count, **own}
    made = ngram_step(
        [np.array(tokens, np.int32) for tokens in histories],
        *(np.array(given[name]) for name in ("samples", "rejected", "wanted")),
        most=most,
        block_size=block_size,
        pad=3,
    )
    propose_ngram(**made, prompt_lookup_max=lookup[0], prompt_lookup_min=lookup[1])
    rows = records_of(made["message"].numpy(), count)["row"].tolist()
    for row in set(range(len(made["drafts"]))) - set(rows):
        assert made["drafts"][row].tolist() == [UNTOUCHED] * most
        assert made["num_drafts"][row] == UNTOUCHED
    return made["drafts"][rows].tolist(), made["num_drafts"][rows].tolist()


def following(tokens, most, longest, shortest):
    """What the documentation says, token by token; None without a match."""
    for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for behind in range(len(tokens) - 1, n - 1, -1):
            if tokens[behind - n : behind] == tokens[-n:]:
                more = list(tokens)
                for at in range(behind, behind + most):
                    more.append(more[at])
                return more[len(tokens) :]
    return None


@pytest.mark.parametrize(
    ("tokens", "lookup", "drafts"),
    {
        "what followed": ([1, 2, 3, 4, 5, 1, 2], (4, 2), [3, 4, 5]),
        "the longest match": ([1, 2, 3, 7, 7, 2, 3, 8, 8, 1, 2, 3], (4, 2), [7, 7, 2]),
        "of at most so many tokens": ([1, 2, 3, 7, 7, 2, 3, 8, 8, 1, 2, 3], (2, 2), [8, 8, 1]),
        "the last of them": ([1, 2, 3, 1, 2, 4, 0, 1, 2], (4, 2), [4, 0, 1]),
        "none that is too short": ([1, 2, 3, 4, 2], (4, 2), None),
        "unless it is long enough": ([1, 2, 3, 4, 2], (4, 1), [3, 4, 2]),
        "tokens end before all drafts": ([0, 5, 6, 5, 6], (4, 2), [5, 6, 5]),
        "a match overlaps the end": ([7, 7, 7, 7], (4, 2), [7, 7, 7]),
        "no more than one token again": ([3, 7, 7], (4, 1), [7, 7, 7]),
        "fewer tokens than a match": ([9, 9], (4, 2), None),
        "the fewest there are": ([9, 9], (1, 1), [9, 9, 9]),
        "the match is the start": ([1, 2, 3, 1, 2, 3], (MAX_LOOKUP, 3), [1, 2, 3]),
        "large ids": ([2**31 - 1, 0, 151935, 2**31 - 1, 0], (2, 2), [151935, 2**31 - 1, 0]),
    }.values(),
)
def test_drafts_are_what_followed_the_last_of_the_longest_matches(tokens, lookup, drafts):
    assert following(tokens, 3, *lookup) == drafts
    wanted = ([tokens[-1]] * 3, 0) if drafts is None else (drafts, 3)
    for block_size in (1, 3, 4, 16):
        ((got,), (number,)) = proposed([tokens], lookup=lookup, block_size=block_size)
        assert (got, number) == wanted


def test_each_row_gets_as_many_drafts_as_it_wants():
    drafts, numbers = proposed([[1, 2, 3, 1, 2]] * 4, wanted=[3, 0, 1, 2])
    assert drafts == [[3, 1, 2], [UNTOUCHED] * 3, [3] + [UNTOUCHED] * 2, [3, 1, UNTOUCHED]]
    assert numbers == [3, 0, 1, 2]


def test_a_row_that_samples_nothing_gets_no_drafts():
    assert proposed([[1, 2, 1, 2]], samples=[0]) == ([[UNTOUCHED] * 3], [0])


def test_rejected_drafts_are_not_part_of_a_row():
    own = {"samples": [4, 4, 2], "rejected": [3, 1, 1]}
    drafts, numbers = proposed([[1, 2, 3, 1, 2], [5] * 9, [5, 6, 7]], **own)
    assert drafts == [[3, 1, 2], [5, 5, 5], [7, 7, 7]]
    assert numbers == [3, 3, 0]


def test_without_wanted_drafts_in_the_message_there_are_none():
    assert proposed([[1, 2, 1, 2]] * 2, most=0) == ([[], []], [0, 0])
    assert proposed([]) == ([], [])


@pytest.mark.parametrize("seed", range(at_depth(3, 60)))
def test_as_token_by_token_for_random_rows(seed):
    chance = random.Random(seed)
    shortest = chance.randint(1, 4)
    longest = chance.randint(shortest, chance.choice([4, 8, MAX_LOOKUP]))
    most, ids = chance.randint(1, 15), chance.randint(1, 5)
    histories = [
        [chance.randrange(ids) for _ in range(chance.choice([2, 5, 17, 60, 300]))]
        for _ in range(25)
    ]
    block_size = chance.choice([1, 2, 3, 4, 5, 8, 16, 256])
    drafts, numbers = proposed(histories, most, (longest, shortest), block_size)
    for tokens, own, number in zip(histories, drafts, numbers, strict=True):
        wanted = following(tokens, most, longest, shortest)
        assert (own, number) == (([tokens[-1]] * most, 0) if wanted is None else (wanted, most))


def test_a_match_is_found_anywhere_in_a_long_row():
    length = 40_000  # several rounds of all threads of a block
    places = [0, 1, 3, 4, 8191, 8192, length - 8, *random.Random(0).sample(range(length), 5)]
    histories = []
    for place in places:
        tokens = np.arange(length)
        tokens[place : place + 3] = tokens[-3:]
        histories.append(tokens.tolist())
    drafts, numbers = proposed(histories, block_size=16)
    for tokens, place, own in zip(histories, places, drafts, strict=True):
        assert own == tokens[place + 3 : place + 6]
    assert numbers == [3] * len(places)


@pytest.mark.parametrize("lookup", [(0, 0), (4, 0), (2, 3), (MAX_LOOKUP + 1, 1)])
def test_impossible_lengths_of_a_match_are_refused(lookup):
    longest, shortest = lookup
    with pytest.raises(ValueError, match=f"prompt_lookup_min={shortest} and .*max={longest}: want"):
        proposed([[1, 2, 1, 2]], lookup=lookup)
