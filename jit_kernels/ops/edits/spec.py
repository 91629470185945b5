"""The specs of the kernels that list the logit edits of rows and ban words."""

from __future__ import annotations

import torch

from kiln.jit_kernels.declare.parameters import (
    Arguments,
    declare,
    derived,
    in_outs,
    inputs,
    outputs,
    values,
)
from kiln.jit_kernels.declare.spec import (
    Bound,
    Cost,
    Gpu,
    KernelSpec,
    LaunchGeometry,
    Results,
    Sizes,
    Variant,
)
from kiln.jit_kernels.ops.edits import cases
from kiln.jit_kernels.ops.edits.reference import ban_words_reference, token_edits_reference
from kiln.jit_kernels.ops.shared.row_geometry import thread_for_each
from kiln.jit_kernels.torch_ops import define

_THREADS = 512


def _bind(a: Arguments) -> Bound:
    blocks, vocab = a.count_table.shape
    numbers = {"rows": a.jobs.shape[0], "vocab": vocab, "tables_row": a.tables.stride(0)}
    return Bound({}, {"blocks": blocks}, numbers)


def _geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    return LaunchGeometry((sizes["blocks"], 1, 1), (_THREADS, 1, 1))


def _cost(variant: Variant, sizes: Sizes) -> Cost:
    """Count two reads of each history, four accesses of the counts, and the lists."""
    lists = 12 * min(sizes["length"], sizes["vocab"]) + 20 * sizes["fixed"]
    return Cost(sizes["rows"] * (40 + 24 * sizes["length"] + lists), 0)


def _error(a: Arguments, wanted: Results) -> float:
    """Return 0 if each row has the wanted edits, in any order, else infinity."""
    same = torch.equal(a.spans, wanted["spans"]) and not a.count_table.any()
    for first, end in a.spans.tolist() if same else ():
        got, want = (
            sorted(zip(*(part[first:end].tolist() for part in lists), strict=True))
            for lists in (
                (a.tokens, a.counts, a.biases),
                (wanted["tokens"], wanted["counts"], wanted["biases"]),
            )
        )
        same = same and got == want
    return 0.0 if same else float("inf")


TOKEN_EDITS = KernelSpec(
    name="token_edits",
    source="edits/token_edits.cu",
    entry="token_edits",
    parameters=declare(
        outputs("spans", "tokens", "counts", "biases"),
        in_outs("count_table"),
        inputs("jobs", "lengths", "fixed_tokens", "fixed_biases", "token_pool", "tables"),
        derived("int32", "rows", "vocab"),
        derived("int64", "tables_row"),
        values("int32", "block_size"),
    ),
    params={},
    bind=_bind,
    geometry=_geometry,
    cost=_cost,
    reference=token_edits_reference,
    make_inputs=cases.token_edits_inputs,
    sizes=cases.SIZES,
    bench_sizes=cases.BENCH_SIZES,
    tolerance=0.0,
    bench_needs={},
    error=_error,
    any_order=True,
    paper="https://arxiv.org/abs/1909.05858",
)


def _ban_bind(a: Arguments) -> Bound:
    words = a.words.shape[0]
    numbers = {
        "num_words": words,
        "mask_words": a.mask.stride(0),
        "tables_row": a.tables.stride(0),
    }
    return Bound({}, {"words": words}, numbers)


def _ban_cost(variant: Variant, sizes: Sizes) -> Cost:
    """Count the words, up to five tokens of each, and what it compares and bans."""
    mask = 2 * 4 * sizes["rows"] * -(-sizes["vocab"] // 32)
    return Cost(sizes["words"] * (16 + 2 * 5 * 4 + 8) + 8 * sizes["rows"] + mask, 0)


BAN_WORDS = KernelSpec(
    name="ban_words",
    source="edits/ban_words.cu",
    entry="ban_words",
    parameters=declare(
        in_outs("mask"),
        inputs("words", "lengths", "word_tokens", "token_pool", "tables"),
        derived("int32", "num_words", "mask_words"),
        derived("int64", "tables_row"),
        values("int32", "block_size"),
    ),
    params={},
    bind=_ban_bind,
    geometry=thread_for_each("words"),
    cost=_ban_cost,
    reference=ban_words_reference,
    make_inputs=cases.ban_words_inputs,
    sizes=cases.BAN_SIZES,
    bench_sizes=cases.BAN_BENCH_SIZES,
    tolerance=0.0,
    bench_needs={},
    paper="https://arxiv.org/abs/1909.05858",
)
SPECS = [TOKEN_EDITS, BAN_WORDS]
define(SPECS)
