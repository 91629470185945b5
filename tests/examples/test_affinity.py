"""The routing rules of examples/ray_serve, which need no Ray."""

from __future__ import annotations

import json
import math

import pytest
from kiln_affinity import MAX_PIECES, PrefixMemory, digests, rank, read_prompt

SYSTEM = {"role": "system", "content": "Be brief."}
HELLO = {"role": "user", "content": "Hello"}


def chain(model: str, *messages: dict[str, str]) -> tuple[bytes, ...]:
    body = json.dumps({"model": model, "messages": messages})
    return digests(*read_prompt(body.encode(), ("demo",)))


def first(loads: dict[str, int], matches: dict[str, int] | None = None, **tiers: int) -> str:
    zero = dict.fromkeys(loads, 0)
    return rank(loads, zero | tiers, matches or {}, 2)[0][0]


@pytest.mark.parametrize(
    ("model", "adapter"),
    [
        *[("demo", ""), ("also", ""), ("", ""), (None, ""), (7, "")],
        *[("sql", "sql"), ("demo:sql", "sql"), ("also:sql", "sql")],
    ],
)
def test_the_model_names_the_adapter_as_in_kiln(model, adapter):
    assert read_prompt(json.dumps({"model": model}).encode(), ("demo", "also"))[0] == adapter


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"3", b"[" * 100_000, b"\xff\xfe\x00"])
def test_a_body_that_cannot_be_read_has_no_affinity(body):
    assert read_prompt(body, ("demo",)) == ("", [])


@pytest.mark.parametrize("prompt", ["x" * 600, [1, 2, 3] * 200, ["a", "b"], None, {"a": [1]}])
def test_prompts_of_every_form_are_cut_into_pieces(prompt):
    for field in ("prompt", "messages"):
        _, pieces = read_prompt(json.dumps({field: prompt}).encode(), ("demo",))
        assert pieces
        assert all(0 < len(piece) <= 256 for piece in pieces)


def test_a_long_prompt_has_a_bounded_number_of_pieces():
    _, pieces = read_prompt(json.dumps({"prompt": "x" * 10**6}).encode(), ("demo",))
    assert len(pieces) == MAX_PIECES


def test_a_conversation_extends_the_digests_of_its_earlier_turns():
    short = chain("demo", SYSTEM, HELLO)
    longer = chain("demo", SYSTEM, HELLO, {"role": "assistant", "content": "Hi"})
    assert longer[: len(short)] == short
    assert len(longer) == len(short) + 1


def test_digests_differ_after_the_first_difference_and_between_adapters():
    same = chain("demo", SYSTEM, HELLO)
    other = chain("demo", {**SYSTEM, "content": "Be long."}, HELLO)
    assert not set(same) & set(other)
    assert not set(same) & set(chain("sql", SYSTEM, HELLO))
    assert digests("", ["ab", "c"])[-1] != digests("", ["a", "bc"])[-1]


def test_lone_surrogates_have_digests():
    assert len(digests("\ud800", ["\udfff"])) == 2


def test_the_memory_counts_the_pieces_that_each_replica_saw():
    memory = PrefixMemory()
    memory.remember((b"1", b"2", b"3"), "a")
    memory.remember((b"1", b"9"), "b")
    assert memory.matches((b"1", b"2", b"8")) == {"a": 2, "b": 1}
    assert memory.matches((b"8", b"1")) == {}


def test_the_memory_forgets_replicas_that_are_gone():
    memory = PrefixMemory()
    memory.remember((b"1", b"2"), "a")
    memory.remember((b"1",), "b")
    memory.forget_all_but(["b"])
    assert memory.matches((b"1", b"2")) == {"b": 1}


def test_the_memory_is_bounded_and_keeps_what_is_in_use():
    memory = PrefixMemory(max_digests=3)
    memory.remember((b"system",), "a")
    for number in range(10):
        memory.remember((b"system", b"%d" % number), "a")
    assert memory.matches((b"system", b"9")) == {"a": 2}
    assert memory.matches((b"system", b"0")) == {"a": 1}


def test_the_adapter_counts_before_the_prompt_and_the_prompt_before_the_load():
    assert first({"a": 2, "b": 0}, {"b": 5}, a=0, b=1) == "a"
    assert first({"a": 2, "b": 0}, {"a": 1}) == "a"
    assert first({"a": 2, "b": 0}, {"a": 3, "b": 4}) == "b"
    assert first({"a": 2, "b": 0}) == "b"


def test_a_replica_that_is_too_busy_comes_last_whatever_it_has():
    groups = rank({"a": 3, "b": 0, "c": 2}, {"a": 0, "b": 2, "c": 1}, {"a": 9}, 2)
    assert groups == [["c"], ["b"], ["a"]]


def test_equal_replicas_are_drawn_at_random():
    draws = iter((0.5, 0.1, 0.9))
    ranked = rank(dict.fromkeys("abc", 0), dict.fromkeys("abc", 0), {}, 0, draw=lambda: next(draws))
    assert ranked == [["b"], ["a", "c"]]


def test_every_replica_is_in_one_group():
    assert rank({}, {}, {}, 0) == []
    loads = {one: one % 7 for one in range(20)}
    groups = rank(loads, dict.fromkeys(loads, 0), {3: 1}, 3)
    assert sorted(one for group in groups for one in group) == list(loads)
    assert math.prod(map(len, groups)) > 0
