"""The spec of the sampler."""

from __future__ import annotations

import torch

from kiln.jit_kernels.declare.parameters import (
    Arguments,
    declare,
    derived,
    inputs,
    optional,
    outputs,
)
from kiln.jit_kernels.declare.parity import largest_error
from kiln.jit_kernels.declare.spec import (
    DTYPES,
    SCALARS,
    Bound,
    Cost,
    Gpu,
    KernelSpec,
    LaunchGeometry,
    Results,
    Sizes,
    Variant,
)
from kiln.jit_kernels.ops.sampling import cases
from kiln.jit_kernels.ops.sampling.reference import sample_reference
from kiln.jit_kernels.torch_ops import define

LOGITS_TYPES = ("kiln::bf16", "float")
_MAX_THREADS = 512
_SHARED_BYTES = 40 * 1024  # kSamplerBytes in kernel_sources/sampling/peaks.cuh
_ROUNDED = ("logprobs", "top_logprobs")  # all other outputs agree with the reference to the bit


def _bind(a: Arguments) -> Bound:
    rows, vocab = a.logits.shape
    hides = a.mask is not None or a.edit_spans is not None
    return Bound(
        {"logits_t": SCALARS[a.logits.dtype]},
        {"rows": rows, "vocab": vocab, "hides": int(hides)},
        {
            "logits_stride": a.logits.stride(0),
            "vocab": vocab,
            "width": a.top_tokens.shape[1],
        },
    )


def _geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    """One block per row, with a warp for each 1024 tokens, up to 512 threads."""
    threads = min(max(-(-sizes["vocab"] // 1024), 1) * 32, _MAX_THREADS)
    return LaunchGeometry((sizes["rows"], 1, 1), (threads, 1, 1), shared_bytes(sizes, threads))


def shared_bytes(sizes: Sizes, threads: int) -> int:
    """Return the dynamic shared memory of a block in bytes.

    One bit per token if there is a mask or edits. Two bytes for each 16 tokens, or for 32, 64 and
    so on if that does not fit; see Peaks in kernel_sources/sampling/peaks.cuh.
    """
    bits = 16 * -(-sizes["vocab"] // 128) if sizes["hides"] else 0
    peaks = -(-sizes["vocab"] // 16)
    while bits + 2 * peaks + 4 * threads > _SHARED_BYTES:
        peaks //= 2
    return bits + 2 * peaks + 4 * threads


def _cost(variant: Variant, sizes: Sizes) -> Cost:
    """Count one read of the logits: later passes read few of them, mostly from L2."""
    rows, vocab, hides = sizes["rows"], sizes["vocab"], sizes["hides"]
    elements = rows * vocab
    moved = elements * DTYPES[variant["logits_t"]].itemsize
    moved += rows * (56 + 4 * (5 + 2 * sizes["width"]))
    if hides:
        moved += rows * 4 * (-(-vocab // 32)) + 8 * rows + 12 * rows * sizes["edits"]
    return Cost(moved, 20 * elements)


def _error(a: Arguments, wanted: Results) -> float:
    """Return the error of the log-probabilities, or infinity if another output differs."""
    for name, tensor in wanted.items():
        if name not in _ROUNDED and not torch.equal(getattr(a, name).double(), tensor.double()):
            return float("inf")
    return max(largest_error(getattr(a, name), wanted[name]) for name in _ROUNDED)


SAMPLE_TOKENS = KernelSpec(
    name="sample_tokens",
    source="sampling/sample_tokens.cu",
    entry="sample_tokens",
    parameters=declare(
        outputs("tokens", "errors", "cutoffs", "logprobs", "ranks", "top_tokens", "top_logprobs"),
        inputs("logits", "settings", "keys"),
        optional("mask", "edit_spans", "edit_tokens", "edit_counts", "edit_biases"),
        derived("int64", "logits_stride"),
        derived("int32", "vocab", "width"),
    ),
    params={"logits_t": LOGITS_TYPES},
    bind=_bind,
    geometry=_geometry,
    cost=_cost,
    reference=sample_reference,
    make_inputs=cases.sampling_inputs,
    sizes=cases.SIZES,
    bench_sizes=cases.BENCH_SIZES,
    bench_needs={"logits_t": "kiln::bf16"},
    tolerance=1e-5,
    max_cpu_seconds=0.8,
    shared_bytes=lambda variant, gpu: _SHARED_BYTES,
    error=_error,
    paper="https://arxiv.org/abs/1611.01144, https://doi.org/10.1145/2660193.2660195",
)
SPECS = [SAMPLE_TOKENS]
define(SPECS)
