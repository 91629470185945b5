"""The spec of the kernel that makes the inputs of a step."""

from __future__ import annotations

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
    Sizes,
    Variant,
)
from kiln.jit_kernels.ops.step import cases
from kiln.jit_kernels.ops.step.reference import step_inputs_reference
from kiln.jit_kernels.torch_ops import define

_THREADS = 128


def _bind(a: Arguments) -> Bound:
    requests = a.seq_lens.numel()
    numbers = {
        "requests": requests,
        "tokens": a.token_ids.numel(),
        "samples": a.sample_rows.numel(),
        "table_row": a.block_table.stride(0),
        "tables_row": a.tables.stride(0),
        "drafts_row": a.drafts.stride(0),
    }
    return Bound({}, {"requests": requests}, numbers)


def _geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    return LaunchGeometry((max(sizes["requests"], 1), 1, 1), (_THREADS, 1, 1))


def _cost(variant: Variant, sizes: Sizes) -> Cost:
    return Cost(cases.moved_bytes(sizes), 0)


STEP_INPUTS = KernelSpec(
    name="step_inputs",
    source="step/step_inputs.cu",
    entry="step_inputs",
    parameters=declare(
        outputs("token_ids", "positions", "slot_mapping", "cu_seqlens_q", "seq_lens"),
        outputs("sample_rows", "settings", "keys"),
        in_outs("block_table", "tables", "token_pool"),
        inputs("message", "sampled", "drafts"),
        in_outs("rejected"),
        derived("int32", "requests", "tokens", "samples"),
        derived("int64", "table_row", "tables_row", "drafts_row"),
        values("int32", "block_size"),
    ),
    params={},
    bind=_bind,
    geometry=_geometry,
    cost=_cost,
    reference=step_inputs_reference,
    make_inputs=cases.step_inputs_inputs,
    sizes=cases.SIZES,
    bench_sizes=cases.BENCH_SIZES,
    tolerance=0.0,
    bench_needs={},
    paper="https://arxiv.org/abs/2309.06180",
)

SPECS = [STEP_INPUTS]
define(SPECS)
