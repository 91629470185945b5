"""An engine whose steps run in graphs gives the tokens of one without, whatever a step holds."""

from __future__ import annotations

from itertools import product

import pytest
from depth import at_depth

EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
FAMILIES = {
    "Llama": {},
    "Mistral": {"sliding_window": 18},
    "Qwen2": {"tie_word_embeddings": True},
    "Mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None},
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 56},
    "Qwen3Moe": {**EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [0]},
}
MODES = {mode: {"KILN_GRAPH_PREFILL": mode} for mode in ("full", "piecewise")}
WAYS = pytest.mark.parametrize(
    ("mode", "overlap"),
    at_depth([("full", False), ("piecewise", True)], list(product(MODES, (True, False)))),
)


@pytest.fixture
def compare(serve, environment):
    """Serve requests with graphs and without; return the counters of the first.

    ``graphs``: the environment of both.
    """

    def run(requests, graphs=None, **settings):
        environment(**{"KILN_GRAPH_VERIFY": "off", "KILN_GRAPH_STRICT": "1", **(graphs or {})})
        wanted = serve(requests, graphs=False, **settings)
        assert not wanted.stats.graph_replays
        found = serve(requests, **settings)
        assert found.answers == wanted.answers
        assert found.logprobs == pytest.approx(wanted.logprobs, abs=2e-3)
        assert found.stats.steps == wanted.stats.steps
        return found.stats

    return run


def by_kind(stats):
    """How many steps were replayed from graphs of decode steps, and of others."""
    others = sum(n for size, n in stats.graph_replays.items() if "tokens" in size)
    return sum(stats.graph_replays.values()) - others, others


@WAYS
def test_prompts_of_many_lengths_in_chunks(compare, requests, mode, overlap):
    """The token budget of 40 cuts the longer prompts."""
    stats = compare(requests, MODES[mode], disable_overlap_schedule=not overlap)
    decodes, others = by_kind(stats)
    assert decodes > 4 < others
    assert decodes + others == stats.steps
    assert not stats.graph_fallbacks


def test_prompts_without_chunks_run_in_graphs_of_every_size(compare, requests):
    stats = compare(requests, max_num_batched_tokens=96, max_num_seqs=8)
    assert {"8"} <= set(stats.graph_replays)
    assert not stats.graph_fallbacks


@WAYS
def test_with_so_few_blocks_that_requests_are_preempted(compare, requests, mode, overlap):
    longer = [(prompt, {**params, "max_tokens": 25}) for prompt, params in requests[:5]]
    sizes = {"num_kv_blocks": 6, "max_model_len": 96}
    stats = compare(longer, MODES[mode], disable_overlap_schedule=not overlap, **sizes)
    assert stats.preemptions > 0
    assert sum(stats.graph_replays.values()) == stats.steps


EDITS = [
    {"logit_bias": dict.fromkeys(range(20), 100.0)},
    {"repetition_penalty": 1.7, "presence_penalty": 0.5},
    {"frequency_penalty": 1.9, "temperature": 1.0},
    {"logprobs": 3},
    {"logprobs": 0, "temperature": 0.7, "top_k": 5, "min_p": 0.01},
    {"min_tokens": 3, "stop_token_ids": list(range(0, 400, 2)), "ignore_eos": True},
    {"top_p": 0.6, "temperature": 1.3},
    {},
]


@WAYS
def test_what_the_graph_cannot_sample_is_sampled_behind_it(compare, requests, mode, overlap):
    edited = [
        (prompt, {**own, **edit}) for (prompt, own), edit in zip(requests, EDITS, strict=True)
    ]
    stats = compare(edited, MODES[mode], disable_overlap_schedule=not overlap)
    assert sum(stats.graph_replays.values()) == stats.steps


@pytest.mark.quick(2)
@pytest.mark.parametrize("edit", EDITS[:4])
def test_one_request_that_edits_logits_among_others(compare, requests, edit):
    """The others' tokens are those of the sampling behind the graph, not of the one inside."""
    last, own = requests[2]
    compare([*requests[:2], (last, {**own, **edit}), *requests[3:5]])


def test_stop_strings_end_a_request_whose_next_step_is_on_its_way(compare, requests, serve):
    greedy = [(prompt, {"temperature": 0, "max_tokens": 12}) for prompt, _ in requests]
    texts = [answer[1] for answer in serve(greedy, graphs=False).answers]
    stops = [text[3:5] for text in texts]
    assert sum(map(bool, stops)) > 4
    stopping = [
        (prompt, {**params, "stop": [stop]} if stop else params)
        for (prompt, params), stop in zip(greedy, stops, strict=True)
    ]
    compare(stopping)


def test_prefills_run_eagerly_if_asked(compare, requests):
    stats = compare(requests, {"KILN_GRAPH_PREFILL": "off"})
    decodes, others = by_kind(stats)
    assert decodes > 0 == others
    assert stats.graph_fallbacks == {"a prefill of too many tokens or rows": stats.steps - decodes}


@pytest.mark.parametrize("mode", MODES)
def test_one_of_two_steps_is_compared_while_serving(compare, requests, mode):
    """Under KILN_GRAPH_STRICT=1 a difference would end the test."""
    stats = compare(requests, {**MODES[mode], "KILN_GRAPH_VERIFY": "shadow:2"})
    assert sum(stats.graph_replays.values()) == stats.steps


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [({"cuda_graph_bs": [2, 3]}, {"2", "3"}), ({"cuda_graph_max_bs": 2}, {"1", "2"})],
)
def test_steps_larger_than_the_graphs_run_eagerly(compare, requests, sizes, wanted):
    stats = compare(requests, {"KILN_GRAPH_PREFILL": "off"}, **sizes)
    assert set(stats.graph_replays) == wanted
    assert stats.graph_fallbacks["too many rows"] > 0
    assert sum([*stats.graph_replays.values(), *stats.graph_fallbacks.values()]) == stats.steps


@pytest.mark.quick(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(compare, requests, model_of, family):
    folder = model_of(family, **FAMILIES[family])
    stats = compare(requests[::2], folder=folder, max_num_seqs=3)
    assert sum(stats.graph_replays.values()) == stats.steps


@pytest.mark.quick(2)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_of_torch_runs_between_pieces(compare, requests, dtype, overlap):
    """It plans on the host, so that no graph can contain it, not even of a decode step."""
    environ = {"KILN_CPU_KERNELS": "torch"}
    stats = compare(requests, environ, dtype=dtype, disable_overlap_schedule=not overlap)
    assert sum(stats.graph_replays.values()) == stats.steps


def test_keys_and_values_of_eight_bits(compare, requests):
    stats = compare(requests, kv_cache_dtype="fp8", max_num_seqs=3)
    assert sum(stats.graph_replays.values()) == stats.steps


def test_one_request_at_a_time(compare, requests):
    """Then steps with prompts have no graph: its plan would lack a kernel."""
    stats = compare(requests[:3], max_num_seqs=1)
    assert set(stats.graph_replays) == {"1"}
    assert set(stats.graph_fallbacks) == {"a prefill of too many tokens or rows"}
