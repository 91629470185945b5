"""What is compared before graphs serve, and what becomes of a graph that differs."""

from __future__ import annotations

import logging
from contextlib import nullcontext

import pytest
import torch
from depth import at_depth

from kiln.cache.env import EnvError
from kiln.engine.errors import DeviceError, ModelError
from kiln.engine.graphs import runner as graphs_runner
from kiln.engine.graphs.emulator import EmulatedGraphs
from kiln.engine.graphs.runner import GraphKey, decode_key
from kiln.engine.graphs.verify import Verification
from kiln.engine.requests.batch import Batch, ScheduledRequest
from kiln.engine.requests.sampling_params import SamplingParams
from kiln.engine.runner.graph_check import GraphCheck

DECODE = [decode_key(rows) for rows in (1, 2, 4, 8, 16)]
PREFILL = [GraphKey(tokens, rows, is_decode=False) for rows in (2, 8) for tokens in (8, 12, 16)]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("off", Verification("off")),
        ("fast", Verification("fast")),
        ("full", Verification("full")),
        ("shadow:1", Verification("fast", 1)),
        ("shadow:250", Verification("fast", 250)),
    ],
)
def test_every_form_is_read(text, wanted):
    assert Verification.parse(text) == wanted


@pytest.mark.parametrize(
    "text", ["", "on", "FULL", "shadow", "shadow:", "shadow:0", "shadow:-1", "shadow:x", "fast:2"]
)
def test_another_form_is_refused(text):
    with pytest.raises(EnvError, match=r"KILN_GRAPH_VERIFY=.*off, fast, full, or shadow:N"):
        Verification.parse(text)


def test_off_compares_nothing():
    assert list(Verification("off").cases([*DECODE, *PREFILL])) == []


def test_full_tries_every_size_full_nearly_full_and_as_empty_as_it_can_be():
    cases = list(Verification("full").cases(DECODE))
    assert cases == [
        (decode_key(1), 1),
        (decode_key(2), 2),
        *((decode_key(4), tokens) for tokens in (3, 4)),
        *((decode_key(8), tokens) for tokens in (5, 7, 8)),
        *((decode_key(16), tokens) for tokens in (9, 15, 16)),
    ]


def test_fast_tries_the_smallest_the_middle_and_the_largest_of_each_kind():
    cases = list(Verification("fast").cases([*DECODE, *PREFILL]))
    assert {key for key, _ in cases if key.is_decode} == {DECODE[0], DECODE[2], DECODE[-1]}
    assert {key for key, _ in cases if not key.is_decode} == set(PREFILL), "three sizes each"
    assert [tokens for key, tokens in cases if key == PREFILL[-2]] == [9, 12]
    assert set(cases) <= set(Verification("full").cases([*DECODE, *PREFILL]))


def test_every_case_runs_in_its_own_graph():
    """A step of so many tokens would run in no smaller one."""
    for mode in ("fast", "full"):
        for key, tokens in Verification(mode).cases([*DECODE, *PREFILL]):
            same = [one for one in (*DECODE, *PREFILL) if one.is_decode == key.is_decode]
            kind = [one for one in same if key.is_decode or one.rows == key.rows]
            assert min(one for one in kind if one.tokens >= tokens) == key


def decode(rows, start=3, **params):
    """A decode step of new requests in blocks of their own."""
    params = SamplingParams(**{"temperature": 0, **params})
    return Batch(
        tuple(
            ScheduledRequest(
                f"r{row}", row, 1, start, [7 + row], 0, [row], True, 0, params, row, is_plain=True
            )
            for row in range(rows)
        )
    )


def test_graphs_that_are_right_pass_every_comparison(make_runner, environment):
    environment(KILN_GRAPH_VERIFY="full", KILN_GRAPH_STRICT="1")
    runner = make_runner()
    counts = runner.graph_counts()
    assert not counts.fallbacks
    assert not counts.replays, "those of the comparison do not count"


@pytest.mark.quick(2)
@pytest.mark.parametrize("num_blocks", [1, 2, 3, 5])
def test_a_pool_too_small_for_the_requests_is_compared_with_fewer(
    make_runner, environment, num_blocks
):
    environment(KILN_GRAPH_VERIFY=at_depth("fast", "full"), KILN_GRAPH_STRICT="1")
    runner = make_runner(num_blocks=num_blocks, max_model_len=16)
    assert not runner.graph_counts().fallbacks


@pytest.mark.quick(1)
@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_many_requests_of_a_short_context_fit_in_a_message(make_runner, environment, mode):
    """A message has room for the blocks of one context, and for those of the step's tokens."""
    environment(KILN_GRAPH_VERIFY=at_depth("fast", "full"), KILN_GRAPH_STRICT="1")
    environment(KILN_GRAPH_PREFILL=mode)
    runner = make_runner(rows=12, tokens=18, max_model_len=20, bs=(12,))
    assert not runner.graph_counts().fallbacks


@pytest.mark.quick(1)
@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_graphs_of_rows_with_drafts_are_compared_too(make_runner, environment, mode):
    environment(KILN_GRAPH_VERIFY="full", KILN_GRAPH_STRICT="1", KILN_GRAPH_PREFILL=mode)
    runner = make_runner(drafts=3, bs=(1, 3), tokens=16)
    graphs = runner.executor.graphs
    assert {str(key) for key in graphs.keys if key.row_tokens > 1} == {
        "4 tokens, 1 rows", "12 tokens, 3 rows",
    }  # fmt: skip
    wrong = decode_key(3, drafts=3)
    break_graph(runner, wrong, lambda logits, inputs, count: inputs.rejected[0].add_(1))
    assert "its tokens differ" in difference(runner, wrong, 3)


def test_the_pool_is_left_without_nan(make_runner):
    runner = make_runner(bs=(4,))
    for layer in range(2):
        for part in runner.pool.views(layer):
            assert not part.isnan().any()


class Broken:
    """A graph that runs, and then does harm."""

    def __init__(self, graph, harm):
        self.graph, self.harm, self.replays = graph, harm, 0

    def replay(self):
        self.graph.replay()
        self.replays += 1
        self.harm(self.replays)


def break_graph(runner, key, harm):
    """Replace a captured graph; ``harm`` gets the logits, the inputs and the number of replays."""
    graphs = runner.executor.graphs
    captured = graphs._captured[key]
    spoil = lambda count: harm(captured.logits, runner.loaded.inputs, count)  # noqa: E731
    graphs._captured[key] = captured._replace(graph=Broken(captured.graph, spoil))


def difference(runner, key, tokens=4):
    with torch.inference_mode():
        check = GraphCheck(runner.executor, runner.pool)
        return check.difference(key, tokens)


@pytest.fixture(scope="module")
def kept():
    """The runner of ``unchecked``, once it is made."""
    return []


@pytest.fixture
def unchecked(make_runner, environment, kept):
    """A runner with few graphs, which nothing has compared yet; tests may replace them."""
    environment(KILN_GRAPH_VERIFY="off")
    if not kept:
        kept.append(make_runner(bs=(4,), tokens=16))
    (runner,) = kept
    with torch.inference_mode():
        for part in (part for layer in range(2) for part in runner.pool.views(layer)):
            part.zero_()
    graphs = runner.executor.graphs._captured
    whole = dict(graphs)
    yield runner
    graphs.update(whole)


HARMS = {
    "its logits differ": lambda logits, inputs, count: logits[0].add_(0.01),
    "its tokens differ": lambda logits, inputs, count: inputs.sampled[:1].add_(1),
    "two replays differ": lambda logits, inputs, count: logits[0].add_(0.01 * (count - 1)),
}


@pytest.mark.parametrize("what", HARMS)
@pytest.mark.parametrize("key", [decode_key(4), GraphKey(16, 4, is_decode=False)])
def test_what_differs_is_named(unchecked, what, key):
    runner = unchecked
    assert difference(runner, key) == ""
    break_graph(runner, key, HARMS[what])
    assert what in difference(runner, key)


@pytest.mark.parametrize("key", [decode_key(4), GraphKey(16, 4, is_decode=False)])
def test_keys_and_values_are_compared(unchecked, key):
    runner = unchecked
    keys, values = runner.pool.views(1)
    for part in (keys, values):
        break_graph(runner, key, lambda *_, part=part: part[0, 0].add_(1))
        assert "keys and values differ" in difference(runner, key)


@pytest.mark.quick(2)
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_write_behind_the_requests_is_found(unchecked, part, layer):
    """The canary is the block behind those of the requests: four with two blocks each."""
    runner, key = unchecked, decode_key(4)
    view = runner.pool.views(layer)[part]
    break_graph(runner, key, lambda *_: view[8, 0, 3].zero_())
    assert difference(runner, key) == "padding wrote to a block of the KV pool"


@pytest.mark.parametrize("key", [decode_key(4), GraphKey(16, 4, is_decode=False)])
def test_a_graph_that_stores_nothing_does_not_profit_from_what_the_eager_step_stored(
    unchecked, key
):
    parts = [part for layer in range(2) for part in unchecked.pool.views(layer)]
    graphs = unchecked.executor.graphs
    captured = graphs._captured[key]

    class StoresNothing:
        def replay(self):
            before = [part.clone() for part in parts]
            captured.graph.replay()
            for part, own in zip(parts, before, strict=True):
                part.copy_(own)

    graphs._captured[key] = captured._replace(graph=StoresNothing())
    assert difference(unchecked, key) == "its keys and values differ from an eager step's"


def test_each_case_has_the_same_context_whatever_was_compared_before(unchecked, monkeypatch):
    """A prompt takes the blocks of requests that decode: their context is computed again."""
    runner = unchecked
    seen, run = [], GraphCheck._run

    def note(self, key, *rest):
        seen.append((key, run(self, key, *rest)))
        return seen[-1][1]

    monkeypatch.setattr(GraphCheck, "_run", note)
    with torch.inference_mode():
        check = GraphCheck(runner.executor, runner.pool)
        for key, tokens in [(decode_key(4), 4), (GraphKey(16, 4, is_decode=False), 16)] * 2:
            assert check.difference(key, tokens) == ""
    for key in {key for key, _ in seen}:
        first, *others = [logits for other, (logits, _, _) in seen if other == key]
        assert len(others) == 5
        assert all(torch.equal(first, logits) for logits in others)


def test_a_graph_that_differs_is_not_used_and_counted(make_runner, monkeypatch, caplog):
    monkeypatch.setattr(
        GraphCheck, "difference", lambda self, key, tokens: "wrong" if key.tokens == 3 else ""
    )
    runner = make_runner()
    assert "the CUDA graph of 3 is not used: wrong" in caplog.text
    assert runner.graph_counts().fallbacks == {"3: wrong": 1}
    runner.run(decode(3))
    assert runner.graph_counts().replays == {"4": 1}


def test_strict_makes_a_difference_an_error(make_runner, environment, monkeypatch):
    environment(KILN_GRAPH_STRICT="1")
    monkeypatch.setattr(GraphCheck, "difference", lambda self, key, tokens: "wrong")
    with pytest.raises(ModelError, match=r"the CUDA graph of 1: wrong \(KILN_GRAPH_STRICT=1\)"):
        make_runner()


def test_off_compares_no_step(make_runner, environment, monkeypatch):
    environment(KILN_GRAPH_VERIFY="off")
    monkeypatch.setattr(GraphCheck, "difference", None)
    assert make_runner().graph_counts().fallbacks == {}


def test_capture_and_comparison_report_their_progress(make_runner):
    heard = []
    runner = make_runner(capture=False, bs=(1, 4))
    runner.capture_graphs(lambda *progress: heard.append(progress))
    stages = list(dict.fromkeys(stage for stage, _, _ in heard))
    assert stages == ["CUDA graphs", "verifying graphs"]
    for stage in stages:
        own = [(done, total) for name, done, total in heard if name == stage]
        total = own[0][1]
        assert own == [(done, total) for done in range(total + 1)]


def test_a_shadow_step_is_compared_every_so_often(make_runner, environment, monkeypatch):
    environment(KILN_GRAPH_VERIFY="shadow:3", KILN_GRAPH_STRICT="1")
    runner = make_runner(bs=(2,))
    eager = []
    whole = type(runner.executor.step).whole
    monkeypatch.setattr(
        type(runner.executor.step),
        "whole",
        lambda self, key: eager.append(key) or whole(self, key),
    )
    wanted = runner.run(decode(2)).tokens
    assert all(runner.run(decode(2)).tokens == wanted for _ in range(8))
    assert eager == [decode_key(2)] * 3
    assert runner.graph_counts().replays == {"2": 9}


def test_a_shadow_step_that_differs_answers_with_eager_tokens_and_drops_the_graph(
    make_runner, environment, caplog
):
    environment(KILN_GRAPH_VERIFY="shadow:1")
    runner = make_runner(bs=(4,))
    wanted = runner.run(decode(4)).tokens
    break_graph(runner, decode_key(4), lambda logits, inputs, count: inputs.sampled[:4].zero_())
    with caplog.at_level(logging.WARNING):
        assert runner.run(decode(4)).tokens == wanted
    reason = "4: its results differ from an eager step's"
    assert runner.graph_counts().fallbacks == {reason: 1}
    assert runner.run(decode(4)).tokens == wanted
    assert runner.graph_counts().fallbacks == {reason: 2}, "and the step without a graph"


def test_under_strict_a_shadow_step_that_differs_ends_the_process(make_runner, environment):
    """An error of another kind would be that of a request, and the engine would go on."""
    environment(KILN_GRAPH_VERIFY="shadow:1", KILN_GRAPH_STRICT="1")
    runner = make_runner(bs=(1,))
    break_graph(runner, decode_key(1), lambda logits, inputs, count: logits.add_(1))
    with pytest.raises(DeviceError, match=r"graph of 1: its results differ.*KILN_GRAPH_STRICT=1"):
        runner.run(decode(1))


def test_a_capture_without_memory_serves_without_those_graphs(make_runner, monkeypatch):
    """Lack of memory drops sizes, never the server."""
    works, captured = EmulatedGraphs.capture, []

    def no_memory(self, function):
        captured.append(1)
        if len(captured) % 2:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return works(self, function)

    monkeypatch.setattr(EmulatedGraphs, "capture", no_memory)
    runner = make_runner()
    assert runner.graph_counts().fallbacks
    assert all("out of memory" in reason for reason in runner.graph_counts().fallbacks)
    assert len(runner.run(decode(4)).tokens) == 4


def test_a_comparison_without_memory_drops_the_graph_and_not_the_server(make_runner, monkeypatch):
    def no_memory(self, key, tokens):
        if key.tokens == 4:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return ""

    monkeypatch.setattr(GraphCheck, "difference", no_memory)
    runner = make_runner()
    assert runner.graph_counts().fallbacks == {"4: out of memory": 1}
    assert len(runner.run(decode(4)).tokens) == 4


@pytest.mark.parametrize("collects", [False, True])
def test_the_flag_keeps_garbage_collection_on_during_the_capture(
    make_runner, environment, monkeypatch, collects
):
    environment(KILN_GRAPH_VERIFY="off")
    frozen = []
    monkeypatch.setattr(
        graphs_runner, "frozen_garbage", lambda on: frozen.append(on) or nullcontext()
    )
    make_runner(garbage_collection=collects)
    assert frozen == [not collects]
