"""The specs of the kernels that propose drafts and verify them."""

from __future__ import annotations

from kiln.jit_kernels.declare.parameters import (
    Arguments,
    declare,
    derived,
    in_outs,
    inputs,
    values,
)
from kiln.jit_kernels.declare.spec import (
    Bound,
    Cost,
    Gpu,
    KernelSpec,
    LaunchGeometry,
    Sizes,
    Variant,
)
from kiln.jit_kernels.ops.shared.row_geometry import thread_for_each
from kiln.jit_kernels.ops.speculative import cases
from kiln.jit_kernels.ops.speculative.reference import (
    propose_ngram_reference,
    verify_chain_reference,
)
from kiln.jit_kernels.torch_ops import define

MAX_LOOKUP = 31  # kMaxNgram of propose_ngram.cu
_THREADS = 512


def _verify_bind(a: Arguments) -> Bound:
    requests = a.rejected.numel()  # a step has no more
    return Bound({}, {"requests": requests}, {"requests": requests})


def _verify_cost(variant: Variant, sizes: Sizes) -> Cost:
    return Cost(cases.verified_bytes(sizes), 0)


VERIFY_CHAIN = KernelSpec(
    name="verify_chain",
    source="speculative/verify_chain.cu",
    entry="verify_chain",
    parameters=declare(
        in_outs("rejected"),
        inputs("message", "token_ids", "sampled"),
        derived("int32", "requests"),
    ),
    params={},
    bind=_verify_bind,
    geometry=thread_for_each("requests"),
    cost=_verify_cost,
    reference=verify_chain_reference,
    make_inputs=cases.verify_chain_inputs,
    sizes=cases.VERIFY_SIZES,
    bench_sizes=cases.VERIFY_BENCH_SIZES,
    tolerance=0.0,
    bench_needs={},
    paper="https://arxiv.org/abs/2211.17192",
)


def _ngram_bind(a: Arguments) -> Bound:
    numbers = {"drafts_row": a.drafts.stride(0), "tables_row": a.tables.stride(0)}
    return Bound({}, {"requests": a.seq_lens.numel()}, numbers)


def _ngram_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    return LaunchGeometry((max(sizes["requests"], 1), 1, 1), (_THREADS, 1, 1))


def _ngram_cost(variant: Variant, sizes: Sizes) -> Cost:
    return Cost(cases.looked_up_bytes(sizes), 0)


PROPOSE_NGRAM = KernelSpec(
    name="propose_ngram",
    source="speculative/propose_ngram.cu",
    entry="propose_ngram",
    parameters=declare(
        in_outs("drafts", "num_drafts"),
        inputs("message", "seq_lens", "rejected", "sampled", "token_pool", "tables"),
        derived("int64", "drafts_row", "tables_row"),
        values("int32", "block_size", "prompt_lookup_max", "prompt_lookup_min"),
    ),
    params={},
    bind=_ngram_bind,
    geometry=_ngram_geometry,
    cost=_ngram_cost,
    reference=propose_ngram_reference,
    make_inputs=cases.propose_ngram_inputs,
    sizes=cases.NGRAM_SIZES,
    bench_sizes=cases.NGRAM_BENCH_SIZES,
    tolerance=0.0,
    bench_needs={},
    paper="https://github.com/apoorvumang/prompt-lookup-decoding",
)
SPECS = [VERIFY_CHAIN, PROPOSE_NGRAM]
define(SPECS)
