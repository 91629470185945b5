"""The index of prefixes: it finds what was added and not forgotten, and nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kiln.engine.kv.prefix_index import PrefixIndex
from kiln.engine.requests.prefix import Tail

NUM_BLOCKS = 6
ROOTS = [(0, None), (1, None), (0, "a")]
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
                # What follows a forgotten block is not found either.
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


def test_the_first_block_with_some_contents_stays_the_one():
    index = PrefixIndex(3)
    root = Tail(0, -1, (0, None))
    first = index.add(root, [b"x"], [2])
    assert index.add(root, [b"x"], [1]) == first
    assert (2 in index, 1 in index, len(index)) == (True, False, 1)


def test_a_block_is_not_indexed_behind_one_that_is_forgotten():
    index = PrefixIndex(3)
    first = index.add(Tail(0, -1, (0, None)), [b"x"], [2])
    index.forget(2)
    assert index.add(first, [b"y"], [1]) is None
    index.add(Tail(0, -1, (0, None)), [b"z"], [2])  # the same block has other contents now
    assert index.add(first, [b"y"], [1]) is None
    index.clear()
    index.add(Tail(0, -1, (0, None)), [b"x"], [2])
    assert index.add(first, [b"y"], [1]) is None
    assert index.find((0, None), [b"x", b"y"])[0] == [2]
