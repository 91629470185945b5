"""The index of prefixes: it finds what was added and not forgotten, and nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kiln.engine.kv.prefix_index import PrefixIndex
from kiln.engine.requests.prefix import Tail

NUM_BLOCKS = 6
ROOTS = [(0, None, 0), (1, None, 0), (0, "a", 0), (0, None, 32)]
_words = st.lists(st.sampled_from([b"x", b"y"]), min_size=1, max_size=4)
_moves = st.lists(
    st.tuples(st.sampled_from(["add", "forget"]), st.sampled_from(ROOTS), _words), max_size=60
)


@given(_moves)
def test_it_finds_the_longest_run_of_what_is_indexed(moves):
    index = PrefixIndex(NUM_BLOCKS)
    known: dict[tuple, int] = {}  # (root, words of a whole run) to its last block
    for move, root, words in moves:
        run = (root, *words)
        if move == "forget":
            if run in known:
                index.forget(known[run])
                # A search stops at a forgotten block, so it does not find those behind it.
                known = {key: known[key] for key in known if key[: len(run)] != run}
        else:
            blocks, tail = index.find(root, words)
            free = [block for block in range(NUM_BLOCKS) if block not in index]
            for word in words[len(blocks) :]:
                if not free:
                    break
                tail = index.add(tail, [word], free[:1])
                known[(root, *words[: tail.length])] = free.pop(0)
        for other in ROOTS:
            for end in range(1, len(words) + 1):
                found, tail = index.find(other, words[:end])
                want = []
                while (other, *words[: len(want) + 1]) in known and len(want) < end:
                    want.append(known[(other, *words[: len(want) + 1])])
                assert found == want
                assert (tail.length, tail.block) == (len(want), want[-1] if want else -1)


NUM_SLOTS = 5
_tier_moves = st.lists(
    st.tuples(st.sampled_from(["add", "forget", "pair"]), st.integers(0, 10), _words), max_size=80
)


@given(_tier_moves)
def test_contents_are_known_while_they_are_in_a_block_or_in_a_slot(moves):
    """Against a model: the words of a run lead to its places, and a run that is lost ends there."""
    index, root = PrefixIndex(NUM_BLOCKS, NUM_SLOTS), ROOTS[0]
    runs: dict[int, tuple] = {}  # place to the whole run whose end it has
    for move, place, words in moves:
        places, tail = index.find(root, words)
        for length, found in enumerate(places, 1):
            assert runs[found] == tuple(words[:length])
        in_blocks = {run for place, run in runs.items() if place < NUM_BLOCKS}
        assert all(found < NUM_BLOCKS or runs[found] not in in_blocks for found in places)
        free = [other for other in range(NUM_BLOCKS) if other not in index]
        if move == "add" and free:
            start = len(places) - (bool(places) and places[-1] >= NUM_BLOCKS)
            tail = index.tail(root, places[:start])
            index.add(tail, words[start : start + 1], free[: len(words[start : start + 1])])
            if words[start:]:
                runs[free[0]] = tuple(words[: start + 1])
        elif move == "forget" and place in index:
            twin, run = index.twin(place), runs.pop(place)
            index.forget(place)
            if twin < 0:  # what follows it is not found any more, but stays until it is forgotten
                assert index.find(root, run)[1].length < len(run)
        elif move == "pair" and place in index and index.twin(place) < 0:
            others = range(NUM_BLOCKS, NUM_BLOCKS + NUM_SLOTS)
            others = range(NUM_BLOCKS) if place >= NUM_BLOCKS else others
            if absent := [other for other in others if other not in index]:
                index.pair(place, absent[0])
                runs[absent[0]] = runs[place]
                assert index.uid(absent[0]) == index.uid(place)
    for place in list(runs):
        index.forget(place)
    assert len(index) == 0


def test_the_first_block_with_some_contents_stays_the_one():
    index = PrefixIndex(3)
    root = Tail(0, -1, (0, None, 0))
    first = index.add(root, [b"x"], [2])
    assert index.add(root, [b"x"], [1]) == first
    assert (2 in index, 1 in index, len(index)) == (True, False, 1)


def test_a_block_is_not_indexed_behind_one_that_is_forgotten():
    index = PrefixIndex(3)
    first = index.add(Tail(0, -1, (0, None, 0)), [b"x"], [2])
    index.forget(2)
    assert index.add(first, [b"y"], [1]) is None
    index.add(Tail(0, -1, (0, None, 0)), [b"z"], [2])  # the same block has other contents now
    assert index.add(first, [b"y"], [1]) is None
    index.clear()
    index.add(Tail(0, -1, (0, None, 0)), [b"x"], [2])
    assert index.add(first, [b"y"], [1]) is None
    assert index.find((0, None, 0), [b"x", b"y"])[0] == [2]


def test_contents_that_are_computed_again_are_found_in_their_new_block():
    index, root = PrefixIndex(3, 2), Tail(0, -1, ROOTS[0])
    first = index.add(root, [b"x"], [2])
    index.pair(2, 3)
    assert index.find(ROOTS[0], [b"x"])[0] == [2]
    index.forget(2)
    assert index.find(ROOTS[0], [b"x"])[0] == [3]
    again = index.add(root, [b"x"], [1])
    assert (again.block, again.uid) == (1, first.uid)
    assert index.find(ROOTS[0], [b"x"])[0] == [1]
    assert (index.twin(1), index.twin(3)) == (3, 1)
    index.forget(3)
    assert (index.find(ROOTS[0], [b"x"])[0], index.twin(1)) == ([1], -1)
