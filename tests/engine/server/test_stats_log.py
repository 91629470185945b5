"""The line of statistics comes while requests run, once after the last one, and never when idle."""

from __future__ import annotations

import asyncio
import logging

import pytest

from kiln.engine.server.periodic import repeated
from kiln.engine.server.stats_log import StatsLog
from kiln.engine.server.token_metrics import TokenMetrics

IDLE = {"running": 0, "waiting": 0, "kv_blocks_used": 0, "kv_blocks_total": 64}
BUSY = {**IDLE, "running": 2, "waiting": 1, "kv_blocks_used": 16}


class Server:
    """A StatsLog, and what it reads."""

    def __init__(self):
        self.tokens, self.stats, self.now = TokenMetrics(), dict(IDLE), 0.0
        self.log = StatsLog(self.tokens, lambda: self.stats, lambda: self.now)

    def later(self, **stats):
        """Let ten seconds pass, after which the engine's counts are these."""
        self.now += 10.0
        self.stats = {**self.stats, **stats}
        self.log.look()


@pytest.fixture
def records(caplog):
    caplog.set_level(logging.INFO, logger="kiln")
    return lambda: caplog.records


def test_an_idle_server_logs_nothing(records):
    server = Server()
    for _ in range(3):
        server.later()
    assert not records()


def test_a_line_has_the_words_of_vllms(records):
    server = Server()
    server.tokens.add_prompt(505)
    server.tokens.first(1)
    server.tokens.next(1999, 0.01)
    server.later(**BUSY, prefix_cache_queries=505, prefix_cache_hits=101)
    (record,) = records()
    assert record.getMessage() == (
        "Avg prompt throughput: 50.5 tokens/s, Avg generation throughput: 200.0 tokens/s, "
        "Running: 2 reqs, Waiting: 1 reqs, GPU KV cache usage: 25.0%, "
        "Prefix cache hit rate: 20.0%"
    )
    assert record.fields == {
        "prompt_tokens_per_second": 50.5,
        "generation_tokens_per_second": 200.0,
        "running": 2,
        "waiting": 1,
        "kv_cache_usage": 0.25,
        "prefix_cache_hit_rate": 0.2,
    }


def test_lines_end_with_one_that_says_that_nothing_runs(records):
    server = Server()
    server.later(**BUSY)
    server.later()
    server.later(**IDLE)
    server.later()
    server.later()
    assert [record.fields["running"] for record in records()] == [2, 2, 0]


def test_a_request_between_two_looks_is_one_line(records):
    server = Server()
    server.tokens.add_prompt(5)
    server.tokens.first(1)
    server.later()
    server.later()
    assert [record.fields["running"] for record in records()] == [0]


def test_rates_are_those_of_the_time_since_the_last_line(records):
    server = Server()
    server.tokens.first(100)
    server.later(**BUSY, prefix_cache_queries=10, prefix_cache_hits=10)
    server.later(prefix_cache_queries=20)
    server.later()  # no prompt began: the hit rate stays that of the last ones
    assert [record.fields["generation_tokens_per_second"] for record in records()] == [10, 0, 0]
    assert [record.fields["prefix_cache_hit_rate"] for record in records()] == [1, 0, 0]


def test_drafts_have_their_acceptance_rate(records):
    server = Server()
    server.later(**BUSY, spec_decode_num_draft_tokens=40, spec_decode_num_accepted_tokens=10)
    server.later()
    with_drafts, without = records()
    assert with_drafts.getMessage().endswith(", Draft acceptance rate: 25.0%")
    assert with_drafts.fields["draft_acceptance_rate"] == 0.25
    assert "draft_acceptance_rate" not in without.fields


def test_counts_of_a_restarted_engine_begin_again(records):
    server = Server()
    server.later(**BUSY, prefix_cache_queries=1000, prefix_cache_hits=0)
    server.later(prefix_cache_queries=40, prefix_cache_hits=10)
    assert records()[-1].fields["prefix_cache_hit_rate"] == 0.25


def test_what_is_repeated_survives_its_errors_and_ends_with_the_block(caplog):
    calls = []

    def call():
        calls.append(1)
        if len(calls) == 1:
            raise ZeroDivisionError

    async def run():
        async with repeated(call, 0.001):
            while len(calls) < 3:
                await asyncio.sleep(0.001)
        before = len(calls)
        await asyncio.sleep(0.02)
        return len(calls) - before

    assert asyncio.run(run()) == 0
    assert [record.levelname for record in caplog.records] == ["ERROR"]
