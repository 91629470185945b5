"""The data sets of the serving benchmark, and files of recorded conversations."""

from __future__ import annotations

import json

import pytest

from kiln.engine.bench.datasets import PrefixRepetition, RandomTokens, Sample, ShareGPT
from kiln.engine.bench.sharegpt import read_turns
from kiln.engine.errors import ConfigError

VOCAB = 900
RANDOM = RandomTokens(VOCAB, 40, 10, range_ratio=0.5, prefix_tokens=7)
PREFIX = PrefixRepetition(VOCAB, 12, 5, 3, 9)
TURNS = ShareGPT([Sample(f"question {index}", 5, 4 + index) for index in range(6)])


@pytest.mark.parametrize("data", [RANDOM, PREFIX, TURNS], ids=lambda data: type(data).__name__)
def test_a_seed_fixes_the_requests(data):
    drawn = data.draw(20, 1)
    assert len(drawn) == 20
    assert drawn == data.draw(20, 1) != data.draw(20, 2)
    assert max(one.prompt_tokens + one.output_tokens for one in drawn) <= data.longest


def test_random_lengths_are_around_the_given_ones_behind_the_same_prefix():
    drawn = RANDOM.draw(400, 0)
    assert {one.prompt_tokens for one in drawn} == set(range(7 + 20, 7 + 61))
    assert {one.output_tokens for one in drawn} == set(range(5, 16))
    assert all(len(one.prompt) == one.prompt_tokens for one in drawn)
    assert len({tuple(one.prompt[:7]) for one in drawn}) == 1
    assert len({tuple(one.prompt[7:20]) for one in drawn}) == 400
    assert all(3 <= token < VOCAB for one in drawn for token in one.prompt)
    assert RANDOM.longest == 7 + 60 + 15
    fixed = RandomTokens(VOCAB, 40, 10).draw(5, 0)
    assert {(one.prompt_tokens, one.output_tokens) for one in fixed} == {(40, 10)}
    assert str(RANDOM) == "7 shared and 20 to 60 random tokens in, 5 to 15 out"


def test_each_prefix_begins_as_many_prompts_as_the_others():
    drawn = PREFIX.draw(20, 5)
    begins = [tuple(one.prompt[:12]) for one in drawn]
    assert sorted(begins.count(one) for one in set(begins)) == [6, 7, 7]
    assert begins != sorted(begins, key=begins.index)  # they are mixed
    assert len({tuple(one.prompt[12:]) for one in drawn}) == 20
    assert {(one.prompt_tokens, one.output_tokens) for one in drawn} == {(17, 9)}
    others = {tuple(one.prompt[:12]) for one in PREFIX.draw(20, 6)}
    assert not others & set(begins)


def test_turns_are_drawn_once_each_before_one_is_drawn_again():
    questions = [one.prompt for one in TURNS.draw(8, 3)]
    assert len(set(questions[:6])) == 6
    assert set(questions[6:]) <= set(questions[:6])


@pytest.mark.parametrize(
    ("prompt", "answer", "asked", "kept"),
    [
        (4, 4, None, True),
        (3, 4, None, False),
        (4, 3, None, False),
        (4, 3, 20, True),
        (1024, 1024, None, True),
        (1025, 4, None, False),
        (1000, 1049, None, False),
        (1000, 1049, 20, True),
    ],
)
def test_turns_have_the_lengths_that_vllm_keeps(prompt, answer, asked, kept):
    found = ShareGPT.of([Sample("x", prompt, answer)], asked)
    assert [one.output_tokens for one in found.turns] == [asked or answer] * kept


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_file_gives_the_first_two_turns_of_each_conversation(tmp_path):
    say = [{"from": who, "value": text} for who, text in (("human", "a b"), ("gpt", "c"))]
    entries = [
        {"id": "1", "conversations": [*say, {"from": "human", "value": "more"}]},
        {"id": "2", "conversations": say[:1]},
        {"id": "3", "conversations": []},
    ]
    found = read_turns(write(tmp_path / "f.json", entries), lambda text: len(text.split()))
    assert found == [Sample("a b", 2, 1)]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[{", "is not JSON"),
        ({"a": 1}, r'is not a list, but \{"a": 1\}; want \[\{"conversations"'),
        ([{}, 1], r"entry 0 has no list of conversations: \{\}"),
        ([{"conversations": "x"}], "entry 0 has no list of conversations"),
        ([{"conversations": [{"value": "a"}, {"from": "gpt"}]}], "entry 0, turn 1 has no value"),
        ([{"conversations": [7, 8]}], "entry 0, turn 0 has no value: 7"),
    ],
)
def test_a_file_of_another_form_is_named(tmp_path, content, says):
    with pytest.raises(ConfigError, match=rf"--dataset-path .*f.json: {says}"):
        read_turns(write(tmp_path / "f.json", content), len)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.json: cannot be read: No such file"):
        read_turns(tmp_path / "none.json", len)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe[")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_turns(tmp_path / "bytes", len)
