"""MoE routing and alignment: against independent code, on hostile rows, alone and batched."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kiln.jit_kernels.declare.settings import settings as environment
from kiln.jit_kernels.ops.moe.functions import align_tokens, moe_experts, route_tokens
from kiln.jit_kernels.ops.moe.reference import align_capacity, scores_and_choice
from kiln.jit_kernels.ops.moe.routing_error import decidable_rows, route_error, wide
from kiln.jit_kernels.ops.moe.spec import ALIGN_TOKENS, ROUTE_TOKENS
from kiln.jit_kernels.toolchains import host

SOFTMAX = {"groups": (1, 1), "scoring": "softmax", "biased": False}
DEEPSEEK = {"groups": (8, 4), "scoring": "sigmoid", "biased": True}
ALL_FLOATS = st.integers(0, 2**32 - 1)


def on_host(logits, top_k, scoring="softmax", bias=None, groups=(1, 1), **more):
    """route_tokens through the kernel's own source."""
    a = routing(
        logits, top_k, bias=bias, num_groups=groups[0], top_groups=groups[1],
        sigmoid=scoring == "sigmoid", **more,
    )  # fmt: skip
    host.run(ROUTE_TOKENS, a, env=environment())
    return a.weights, a.ids


def routing(logits, top_k, **changed):
    """The operator's arguments, with invalid values in the outputs."""
    given = {
        "weights": torch.full((logits.shape[0], top_k), float("nan")),
        "ids": torch.full((logits.shape[0], top_k), -7, dtype=torch.int32),
        "logits": logits, "bias": None, "num_groups": 1, "top_groups": 1,
        "by_largest": False, "sigmoid": False, "renormalise": True, "least_sum": 0.0, "factor": 1.0,
    }  # fmt: skip
    return ROUTE_TOKENS.parameters.Arguments(**given | changed)


def mixtral(logits, top_k):
    """Mixtral's router: softmax over all, the largest k, weights that sum to 1."""
    weights, ids = torch.topk(F.softmax(logits.double(), dim=-1), top_k, dim=-1)
    return weights / weights.sum(-1, keepdim=True), ids


def deepseek(logits, top_k, bias, num_groups, top_groups, factor):
    """DeepSeek-V3's router: sigmoid, groups by their two best, biased choice, unbiased weights."""
    scores = logits.double().sigmoid()
    choice = scores + bias.double()
    tokens, experts = logits.shape
    grouped = choice.view(tokens, num_groups, experts // num_groups)
    group_score = grouped.topk(2, dim=-1)[0].sum(-1)
    kept = torch.zeros_like(group_score).scatter_(1, group_score.topk(top_groups)[1], 1)
    mask = kept.unsqueeze(-1).expand_as(grouped).reshape(tokens, experts).bool()
    ids = choice.masked_fill(~mask, -1e9).topk(top_k, dim=-1)[1]
    weights = scores.gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * factor, ids


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (64, 8), (128, 8), (300, 4), (512, 10)])
def test_softmax_routing_is_mixtrals(experts, top_k):
    torch.manual_seed(experts)
    logits = torch.randn(40, experts) * 3
    want_weights, want_ids = mixtral(logits, top_k)
    for weights, ids in (on_host(logits, top_k), route_tokens(logits, top_k)):
        assert torch.equal(ids.long(), want_ids)
        assert torch.allclose(weights.double(), want_weights, rtol=1e-6, atol=1e-7)


def test_sigmoid_routing_with_groups_is_deepseeks():
    torch.manual_seed(3)
    logits, bias = torch.randn(60, 256), torch.randn(256) * 0.1
    want_weights, want_ids = deepseek(logits, 8, bias, 8, 4, 2.5)
    a = wide(routing(logits, 8, bias=bias, num_groups=8, top_groups=4, sigmoid=True))
    clear = decidable_rows(scores_and_choice(a)[1], a)
    assert clear.float().mean() > 0.95, "or the test says nothing"
    named = {"scoring": "sigmoid", "bias": bias, "groups": (8, 4), "factor": 2.5}
    for weights, ids in (on_host(logits, 8, **named), route_tokens(logits, 8, **named)):
        assert torch.equal(ids.long()[clear], want_ids[clear])
        error = (weights.double() - want_weights).abs()[clear]
        assert error.max() < 1e-6


@pytest.mark.parametrize(("groups", "experts"), [((8, 3), 160), ((20, 6), 20)])
def test_groups_by_their_best_are_deepseek_v2s(groups, experts):
    """Its group_limited_greedy: groups ranked by their largest score, weights as they are."""
    torch.manual_seed(5)
    logits = torch.randn(40, experts)
    scores = logits.double().softmax(-1)
    grouped = scores.view(40, groups[0], -1)
    kept = torch.zeros(40, groups[0]).scatter_(1, grouped.amax(-1).topk(groups[1])[1], 1)
    masked = (grouped * kept[..., None]).flatten(1)
    want_weights, want_ids = masked.topk(6, dim=-1)
    named = {"groups": groups, "renormalise": False, "factor": 16.0, "by_largest": True}
    for weights, ids in (on_host(logits, 6, **named), route_tokens(logits, 6, **named)):
        assert torch.equal(ids.long(), want_ids)
        assert torch.allclose(weights.double(), want_weights * 16, atol=1e-6)


def test_a_sum_of_weights_counts_as_the_least_at_least():
    """Ernie-4.5: the choice bias picks experts whose scores are nearly zero."""
    logits = torch.tensor([[40.0, 0.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0]])
    bias = torch.tensor([0.0, 9.0, 9.0, 0.0])
    scores = logits.double().softmax(-1)[:, 1:3]
    want = scores / scores.sum(-1, keepdim=True).clamp(min=1e-12)
    assert want[0].sum() < 1e-4
    named = {"bias": bias, "least_sum": 1e-12}
    for weights, ids in (on_host(logits, 2, **named), route_tokens(logits, 2, **named)):
        found = torch.zeros(2, 4, dtype=torch.float64).scatter_(1, ids.long(), weights.double())
        assert torch.allclose(found[:, 1:3], want, rtol=1e-5, atol=1e-10)


def test_nearly_every_row_of_the_test_cases_is_decidable():
    clear = []
    for variant in ROUTE_TOKENS.variants():
        for sizes in ROUTE_TOKENS.sizes:
            a = wide(ROUTE_TOKENS.make_arguments(variant, sizes, "cpu"))
            clear.append(decidable_rows(scores_and_choice(a)[1], a))
    assert torch.cat(clear).float().mean() > 0.9


def test_the_error_of_routing_sees_what_is_wrong_with_ids():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    wanted = {"weights": torch.zeros(1, 2), "ids": torch.tensor([[1, 3]], dtype=torch.int32)}
    weights = torch.softmax(torch.tensor([[3.0, 2.0]]), 1)

    def error(ids, weights=weights):
        ids = torch.tensor([ids], dtype=torch.int32)
        return route_error(routing(logits, 2, weights=weights, ids=ids), wanted)

    assert error([1, 3]) < 1e-7
    assert error([1, 3], weights + 0.1) > 0.09
    for wrong in ([1, 1], [1, 4], [-1, 3], [3, 1], [1, 2]):
        assert error(wrong) == float("inf"), wrong
    assert error([1, 3], weights * float("nan")) != error([1, 3])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(ALL_FLOATS, min_size=8, max_size=40),
    st.integers(1, 8),
    st.sampled_from(["softmax", "sigmoid"]),
    st.booleans(),
)
def test_ids_are_distinct_and_in_range_whatever_the_bits(bits, top_k, scoring, biased):
    row = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)[None]
    bias = row[0].flip(0).contiguous() if biased else None
    weights, ids = on_host(row, top_k, scoring, bias)
    assert len(set(ids[0].tolist())) == top_k
    assert ids.min() >= 0
    assert ids.max() < len(bits)
    assert weights.isfinite().all()
    again, same = route_tokens(row, top_k, scoring, bias)
    assert torch.allclose(again, weights, atol=1e-6) or not torch.equal(ids, same)


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 0.0, float("inf")])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_equal_rows_take_the_lowest_ids(value, scoring):
    weights, ids = on_host(torch.full((1, 20), value), 4, scoring)
    assert ids.tolist() == [[0, 1, 2, 3]]
    expected = 0.0 if value != value or value < 0 else 0.25
    assert torch.allclose(weights, torch.full((1, 4), expected), atol=1e-7)


def test_a_nan_is_chosen_last_and_weighs_nothing():
    logits = torch.tensor([[float("nan"), 1.0, float("-inf"), 0.5, float("nan")]])
    weights, ids = on_host(logits, 4)
    assert ids.tolist() == [[1, 3, 0, 2]]
    assert weights[0, 2:].tolist() == [0.0, 0.0]


def test_experts_past_the_kept_groups_are_never_chosen():
    torch.manual_seed(0)
    logits = torch.randn(50, 64)
    _, ids = on_host(logits, 8, "sigmoid", torch.randn(64), (8, 2))
    for row in ids // 8:
        assert len(set(row.tolist())) <= 2


@pytest.mark.parametrize("mode", [SOFTMAX, DEEPSEEK])
def test_a_tokens_bits_do_not_depend_on_the_batch(mode):
    torch.manual_seed(1)
    logits = torch.randn(37, 256).bfloat16()
    bias = torch.randn(256) * 0.1 if mode["biased"] else None
    more = (mode["scoring"], bias, mode["groups"])
    weights, ids = on_host(logits, 8, *more)
    order = torch.randperm(37)
    mixed_weights, mixed_ids = on_host(logits[order], 8, *more)
    assert torch.equal(mixed_ids, ids[order])
    assert torch.equal(mixed_weights, weights[order])
    for row in (0, 5, 36):
        alone_weights, alone_ids = on_host(logits[row : row + 1], 8, *more)
        assert torch.equal(alone_ids[0], ids[row])
        assert torch.equal(alone_weights[0], weights[row])


def test_fp16_logits_and_strided_rows_are_taken():
    torch.manual_seed(2)
    wide = torch.randn(6, 40)
    half, part = wide.half(), wide[:, 3:19]
    assert torch.equal(route_tokens(half, 3)[1], route_tokens(half.float(), 3)[1])
    assert torch.equal(route_tokens(part, 3)[1], route_tokens(part.contiguous(), 3)[1])
    assert torch.equal(route_tokens(wide.t(), 2)[1], route_tokens(wide.t().contiguous(), 2)[1])


@pytest.mark.parametrize(
    ("error", "words", "change"),
    [
        (ValueError, "top_k 0", {"top_k": 0}),
        (ValueError, "want 1 to 2", {"top_k": 3, "groups": (4, 1)}),
        (ValueError, "3 groups", {"groups": (3, 1)}),
        (ValueError, "keep 5 of 4", {"groups": (4, 5)}),
        (ValueError, "groups of 2 or more", {"groups": (8, 8)}),
        (ValueError, "keep 9 of 8", {"groups": (8, 9), "by_largest": True}),
        (ValueError, "softplus", {"scoring": "softplus"}),
        (ValueError, "bias is [7]", {"bias": torch.zeros(7)}),
        (TypeError, "float64", {"bias": torch.zeros(8).double()}),
        (TypeError, "int64", {"logits": torch.zeros(2, 8).long()}),
        (ValueError, "513 experts", {"logits": torch.zeros(2, 513)}),
    ],
)
def test_wrong_arguments_of_routing_are_named(error, words, change):
    given_ = {"logits": torch.zeros(2, 8), "top_k": 2} | change
    with pytest.raises(error, match=words.replace("[", r"\[").replace("]", r"\]")):
        route_tokens(**given_)


def aligned_by_hand(flat, experts, block_size, capacity):
    """moe_experts in Python, one expert after the other."""
    runs, blocks, ends = [], [], []
    for expert in range(experts):
        mine = [place for place, one in enumerate(flat) if one == expert]
        mine += [len(flat)] * (-len(mine) % block_size)
        runs += mine
        blocks += [expert] * (len(mine) // block_size)
        ends.append(len(runs))
    rest = [len(flat)] * (capacity - len(runs))
    return runs + rest, blocks + [-1] * (capacity // block_size - len(blocks)), [len(runs)], ends


def align_on_host(ids, experts, block_size):
    capacity = align_capacity(ids.numel(), experts, block_size)
    names = ALIGN_TOKENS.parameters.outputs
    counts = (capacity, capacity // block_size, 1, experts)
    outs = {name: ids.new_full((n,), -99) for name, n in zip(names, counts, strict=True)}
    a = ALIGN_TOKENS.parameters.Arguments(**outs, ids=ids, block_size=block_size)
    host.run(ALIGN_TOKENS, a, env=environment())
    return list(outs.values())


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 40), st.integers(1, 20), st.integers(0, 700))
def test_alignment_is_what_one_expert_after_the_other_gives(data, experts, block_size, pairs):
    seed = data.draw(st.integers(0, 1000))
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, experts + 1, (pairs, 1), generator=draw, dtype=torch.int32)
    capacity = align_capacity(pairs, experts, block_size)
    want = aligned_by_hand(ids.flatten().tolist(), experts, block_size, capacity)
    for got in (align_on_host(ids, experts, block_size), align_tokens(ids, experts, block_size)):
        assert [one.tolist() for one in got] == list(want)


@pytest.mark.parametrize("experts", [1, 2, 37])
def test_the_capacity_holds_the_worst_case_and_no_more_blocks_than_that(experts):
    for pairs in range(1, 60):
        worst = torch.arange(pairs, dtype=torch.int32).remainder(experts)[:, None]
        capacity = align_capacity(pairs, experts, 16)
        needed = int(align_tokens(worst, experts, 16).num_tokens_post_padded)
        assert needed <= capacity <= needed + 16 * experts


def test_pairs_of_one_expert_stay_in_the_order_of_tokens_in_many_pairs():
    ids = torch.randint(0, 5, (3000, 1), dtype=torch.int32)
    sorted_ids, _, _, ends = align_on_host(ids, 5, 1)
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        mine = sorted_ids[begin:end]
        assert (mine[1:] > mine[:-1]).all()
        assert (ids.flatten()[mine.long()] == expert).all()
        begin = end
    assert begin == 3000


def test_wrong_arguments_of_alignment_are_named():
    with pytest.raises(TypeError, match="int64"):
        align_tokens(torch.zeros(2, 2).long(), 4, 16)
    with pytest.raises(ValueError, match="blocks of 0"):
        align_tokens(torch.zeros(2, 2, dtype=torch.int32), 4, 0)
    with pytest.raises(ValueError, match="513 experts"):
        align_tokens(torch.zeros(2, 2, dtype=torch.int32), 513, 16)


def experts_one_by_one(x, w1, w2, weights, ids):
    out = torch.zeros_like(x).double()
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            if 0 <= expert < w1.shape[0]:
                gate, up = (w1[expert].double() @ x[token].double()).chunk(2)
                out[token] += weight * (w2[expert].double() @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("holes", [False, True])
def test_experts_together_give_what_each_gives_alone(holes):
    torch.manual_seed(4)
    x, w1, w2 = torch.randn(19, 16), torch.randn(6, 24, 16) / 4, torch.randn(6, 16, 12) / 4
    weights, ids = route_tokens(torch.randn(19, 6), 2)
    if holes:
        ids[::3, 1], ids[1, 0], ids[2] = -1, 6, -1
    got = moe_experts(x, w1, w2, weights, ids)
    assert torch.allclose(got.double(), experts_one_by_one(x, w1, w2, weights, ids), atol=2e-5)
    if holes:
        assert (got[2] == 0).all()


def test_experts_of_no_token_are_nothing():
    w1, w2 = torch.randn(3, 8, 16), torch.randn(3, 16, 4)
    weights, ids = route_tokens(torch.empty(0, 3), 2)
    assert moe_experts(torch.empty(0, 16), w1, w2, weights, ids).shape == (0, 16)
    with pytest.raises(ValueError, match="w2"):
        moe_experts(torch.empty(0, 16), w1, w2[:2], weights, ids)
