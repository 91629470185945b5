"""Hostile grammars end their own process, and are refused by name."""

from __future__ import annotations

import asyncio

import pytest
from depth import at_depth

from kiln.engine.errors import RequestError
from kiln.engine.grammar.grammar import grammar_of
from kiln.engine.requests.structured_outputs import StructuredOutputsParams
from kiln.engine.server import grammars
from kiln.engine.server.errors import ApiError
from kiln.engine.server.grammars import GrammarGuard

ENDLESS = {"json": {"type": "integer", "multipleOf": 99_999_999}}


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def doubled(times):
    schema = {"type": "string"}
    for _ in range(times):
        schema = {"anyOf": [schema, schema]}
    return schema


FINE = [
    {"json": {"type": "object"}},
    {"json": {"properties": {f"p{index}": {"type": "string"} for index in range(1000)}}},
    {"json": {"enum": [f"value {index}" for index in range(20_000)]}},
    {"regex": "^.*a.{20}$"},
]
HOSTILE = [
    {"json": {"enum": [f"value {index}" for index in range(100_000)]}},
    {"json": nested(10_000)},
    {"json": doubled(14)},
    {"choice": [str(index) for index in range(2**20)]},
    {"grammar": "start: " + " | ".join(f'"{index}"' for index in range(2**20))},
    {"regex": "(a|aa|aaa){500}b"},
    {"regex": "(a{1000}){1000}"},
    {"regex": "(" * 20_000 + "a" + ")" * 20_000},
    {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
    {"json": {"description": "x" * 10_000_000}},
    ENDLESS,
]


@pytest.fixture
def make_guard(tokenizer):
    vocabulary = {
        "tokenizer": tokenizer.backend.to_str(),
        "vocab_size": tokenizer.vocab_size,
        "eos_token_ids": [2],
    }
    return lambda max_answer: GrammarGuard(lambda: vocabulary, max_answer)


@pytest.fixture
def guard(make_guard):
    return make_guard(120.0)  # however busy the machine is


def verdict(guard, form):
    """Why a form is refused; "" if it is not."""
    try:
        asyncio.run(guard.check(grammar_of(StructuredOutputsParams(**form)).text))
    except RequestError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("index", at_depth([0, 3], range(len(FINE))))
def test_a_fine_grammar_is_let_through(guard, index):
    assert verdict(guard, FINE[index]) == ""


@pytest.mark.parametrize("index", at_depth([1, 6, 10], range(len(HOSTILE))))
def test_a_hostile_grammar_is_refused_by_name(guard, index):
    assert verdict(guard, HOSTILE[index]).startswith("structured_outputs")
    assert verdict(guard, FINE[0]) == "", "the next one is tried as before"


def test_a_verdict_comes_within_five_seconds():
    assert grammars._MAX_WAIT + grammars._MAX_ANSWER < 5


def test_a_verdict_is_remembered_and_a_process_that_ended_is_replaced(guard):
    assert "more than 1 s" in verdict(guard, ENDLESS)
    assert verdict(guard, FINE[0]) == ""
    guard._threads.shutdown()
    assert "more than 1 s" in verdict(guard, ENDLESS)
    assert verdict(guard, FINE[0]) == ""


def test_one_that_finds_no_process_free_may_try_again(guard, monkeypatch):
    monkeypatch.setattr("kiln.engine.server.grammars._MAX_WAIT", 0.05)
    forms = [{"json": {**ENDLESS["json"], "minimum": index}} for index in range(3)]

    async def together():
        texts = [grammar_of(StructuredOutputsParams(**form)).text for form in forms]
        return await asyncio.gather(*map(guard.check, texts), return_exceptions=True)

    assert [type(one) for one in asyncio.run(together())] == [RequestError, RequestError, ApiError]


def test_one_that_a_busy_machine_does_not_compile_in_time_may_try_again(make_guard):
    with pytest.raises(ApiError, match="try again") as error:
        verdict(make_guard(0.2), ENDLESS)
    assert error.value.status == 503
