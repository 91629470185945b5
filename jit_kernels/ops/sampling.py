"""Sampling: one token a row of logits in one launch, reproducible from seed and position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from kiln.jit_kernels.parity import largest_error
from kiln.jit_kernels.references.sampling import sample_reference
from kiln.jit_kernels.references.sampling_noise import masses, weights
from kiln.jit_kernels.shapes import as_rows, check_shape
from kiln.jit_kernels.spec import (
    DTYPES,
    SCALARS,
    Bound,
    Cost,
    Gpu,
    KernelSpec,
    LaunchGeometry,
    Sizes,
    Variant,
)
from kiln.jit_kernels.torch_ops import call, define

SETTINGS = ("temperature", "top_p", "log_min_p", "repetition", "frequency", "presence")
KEYS = ("seed", "position", "top_k", "num_logprobs")
MAX_VOCAB_WITH_EDITS = 8 * 36 * 1024  # a bit a token in shared memory
_LOGITS = ("kiln::bf16", "float")
_MAX_THREADS = 512
_SHARED_BYTES = 40 * 1024  # kSamplerBytes in kernel_sources/sampling/peaks.cuh


@dataclass(frozen=True, slots=True)
class Edits:
    """Changes of single logits, as lists in the order of the rows; each token once in a row.

    ``starts`` [num_rows + 1] says where a row's begin in ``tokens``, ``counts`` and ``biases``
    [num_edits]. ``biases`` float32 are added first, -inf bans. ``counts`` tells how often the
    token is in the output so far: then the repetition penalty applies, and the frequency and
    presence penalties too; 0 is a token of the prompt alone, to which only the first applies;
    -1 is neither. All but ``biases`` are int32.
    """

    starts: torch.Tensor
    tokens: torch.Tensor
    counts: torch.Tensor
    biases: torch.Tensor


@dataclass(frozen=True, slots=True)
class Samples:
    """What was drawn, a row each. All are views of one block of memory, ``storage`` int32.

    ``errors``: 0, or 1 a NaN among the logits, 2 +inf, 4 nothing left to draw; then the rest is
    0. ``cutoffs``: a token could be drawn where its logit, edited, is at least this.
    ``logprobs`` and ``ranks`` (from 1) of the token, and the likeliest ``top_tokens`` with
    ``top_logprobs`` [num_rows, width], lower ids first among equals, are of the plain softmax of
    the logits as they came: before edits, temperature and filters. Rows that did not ask have 0,
    and -1 with -inf where they asked for fewer.
    """

    tokens: torch.Tensor
    errors: torch.Tensor
    cutoffs: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_tokens: torch.Tensor
    top_logprobs: torch.Tensor
    storage: torch.Tensor

    @classmethod
    def empty(cls, rows: int, width: int, device: torch.device) -> Samples:
        """Return uninitialised results of ``rows`` rows with ``width`` likely tokens each."""
        return cls.of(torch.empty(rows * (5 + 2 * width), dtype=torch.int32, device=device), rows)

    @classmethod
    def of(cls, storage: torch.Tensor, rows: int) -> Samples:
        """Return the results that a copy of ``storage`` holds."""
        width = (storage.numel() // rows - 5) // 2 if rows else 0
        tokens, errors, cutoffs, logprobs, ranks, *tops = storage.split(
            [rows] * 5 + [rows * width] * 2
        )
        top_tokens, top_logprobs = (one.view(rows, width) for one in tops)
        return cls(
            tokens,
            errors,
            cutoffs.view(torch.float32),
            logprobs.view(torch.float32),
            ranks,
            top_tokens,
            top_logprobs.view(torch.float32),
            storage,
        )

    def on_host(self) -> Samples:
        """Return the results in the host's memory: one copy, which waits for the device."""
        if self.storage.device.type == "cpu":
            return self
        return Samples.of(self.storage.cpu(), len(self.tokens))

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """Return all but the storage, in the operator's order."""
        return tuple(getattr(self, field.name) for field in fields(self)[:-1])


def sample_tokens(
    logits: torch.Tensor,
    settings: torch.Tensor,
    keys: torch.Tensor,
    mask: torch.Tensor | None = None,
    edits: Edits | None = None,
    width: int = 0,
) -> Samples:
    """Draw a token for each row of logits [num_rows, vocab], bf16, fp32, or fp16 as fp32 first.

    ``settings`` [num_rows, 6] float32 are temperature (below 1e-5: greedy, the lowest id among
    equals), top_p, log(min_p), and the repetition, frequency and presence penalties; neutral are
    1, 1, -inf, 1, 0, 0. ``keys`` [num_rows, 4] int64 are seed, position, top_k (0: all; 1:
    greedy) and how many likely tokens to report beside the token's own log-probability (-1: not
    even that), at most ``width``. ``mask`` [num_rows, ceil(vocab / 32)] int32 has a bit for each
    token that may be drawn, the first the lowest. Edits and mask come before the temperature,
    then top-k, then top-p of what is left, then min-p; ties at a threshold are all kept.

    A row's result depends on nothing but the row: its token is that of a race of exponential
    clocks that seed, position and token id start. Raises ValueError on a wrong shape, TypeError
    on a wrong dtype. Source: kernel_sources/sampling/sample_tokens.cu
    """
    rows, vocab = logits.shape
    if logits.dtype not in SCALARS:
        raise TypeError(f"sample_tokens: logits is {logits.dtype}; use bf16, fp16 or fp32")
    check_shape("sample_tokens", "settings", settings, (rows, len(SETTINGS)))
    check_shape("sample_tokens", "keys", keys, (rows, len(KEYS)))
    wanted = {"settings": (settings, torch.float32), "keys": (keys, torch.int64)}
    if mask is not None:
        check_shape("sample_tokens", "mask", mask, (rows, -(-vocab // 32)))
        wanted["mask"] = (mask, torch.int32)
    if edits is not None:
        check_shape("sample_tokens", "edits.starts", edits.starts, (rows + 1,))
        for field in fields(edits):
            dtype = torch.float32 if field.name == "biases" else torch.int32
            wanted[f"edits.{field.name}"] = (getattr(edits, field.name), dtype)
    for name, (tensor, dtype) in wanted.items():
        if tensor.dtype != dtype or not tensor.is_contiguous():
            raise TypeError(f"sample_tokens: {name} must be contiguous {dtype}")
    if (mask is not None or edits is not None) and vocab > MAX_VOCAB_WITH_EDITS:
        raise ValueError(f"sample_tokens: edits reach {MAX_VOCAB_WITH_EDITS} tokens, not {vocab}")
    samples = Samples.empty(rows, width, logits.device)
    lists = (None,) * 4 if edits is None else _lists(edits)
    call(_SAMPLE, *samples.outputs(), _dense(logits), settings, keys, mask, *lists)
    return samples


def _dense(logits: torch.Tensor) -> torch.Tensor:
    """Return logits of a type that the kernel comes in, a row's next to each other."""
    if SCALARS[logits.dtype] not in _LOGITS:
        logits = logits.float()
    rows = as_rows(logits)
    return logits.contiguous() if rows is None else rows


def _lists(edits: Edits) -> tuple[torch.Tensor, ...]:
    return edits.starts, edits.tokens, edits.counts, edits.biases


def _bind(*arguments: Any) -> Bound:
    logits, settings, keys, *optional = arguments[7:]
    rows, vocab = logits.shape
    width = arguments[5].shape[1]
    pointers = [0 if one is None else one for one in optional]
    values = (*arguments[:7], logits, settings, keys, *pointers, logits.stride(0), vocab, width)
    hides = any(one is not None for one in optional)
    sizes = {"rows": rows, "vocab": vocab, "hides": int(hides)}
    return Bound({"logits_t": SCALARS[logits.dtype]}, sizes, values)


def _geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    """One block a row, a thread for each 32 tokens up to 512."""
    threads = min(max(-(-sizes["vocab"] // 1024), 1) * 32, _MAX_THREADS)
    return LaunchGeometry((sizes["rows"], 1, 1), (threads, 1, 1), shared_bytes(sizes, threads))


def shared_bytes(sizes: Sizes, threads: int) -> int:
    """Return the dynamic shared memory of a block in bytes.

    A bit a token if any may hide, and two bytes for each 16 tokens, or for 32, 64 ... where that
    would be too much: what Peaks in kernel_sources/sampling/peaks.cuh makes of it.
    """
    bits = 16 * -(-sizes["vocab"] // 128) if sizes["hides"] else 0
    peaks = -(-sizes["vocab"] // 16)
    while bits + 2 * peaks + 4 * threads > _SHARED_BYTES:
        peaks //= 2
    return bits + 2 * peaks + 4 * threads


def _cost(variant: Variant, sizes: Sizes) -> Cost:
    """Count one read of the logits: later ones are of few, or find them in the L2."""
    rows, vocab, hides = sizes["rows"], sizes["vocab"], sizes["hides"]
    elements = rows * vocab
    moved = elements * DTYPES[variant["logits_t"]].itemsize
    moved += rows * (56 + 4 * (5 + 2 * sizes["width"]))
    if hides:
        moved += rows * 4 * (-(-vocab // 32)) + 4 * (rows + 1) + 12 * rows * sizes["edits"]
    return Cost(moved, 20 * elements)


def _error(arguments: Sequence[Any], wanted: Sequence[torch.Tensor]) -> float:
    """Return infinity unless all but log-probabilities agree to the bit, else their error."""
    exact = (0, 1, 2, 4, 5)
    if not all(torch.equal(arguments[i].double(), wanted[i].double()) for i in exact):
        return float("inf")
    return max(largest_error(arguments[i], wanted[i]) for i in (3, 6))


# (temperature, top_k, top_p, min_p, likely tokens) of the rows of a test, in turn.
_TURNS = (
    (0.0, 0, 1.0, 0.0, 3),
    (1.0, 0, 1.0, 0.0, -1),
    (0.7, 20, 0.9, 0.0, 0),
    (1.3, 0, 0.8, 0.0, 20),
    (0.8, 0, 1.0, 0.1, -1),
    (1.0, 300, 0.95, 0.02, 2),
    (0.5, 40, 1.0, 0.0, -1),
    (2.0, 0, 0.999, 0.0, 20),
    (1.0, 1, 1.0, 0.0, -1),
    (1.0, 7, 0.3, 0.5, 5),
    (3.0, 600, 1.0, 0.0, 0),
    (0.9, 0, 0.9, 0.05, 4),
    (1.0, 0, 0.9999999, 0.0, -1),  # which needs the mass of the row to the last bit
)
_EDGE = (0.8, 0, 1.0, 0.0, -1)  # with a top-p of _on_the_edge
_RACES = ((8.0, 0, 1.0, 0.0, -1), (1.0, 0, 1.0, 0.0, -1))  # where a whole row may win
_SERVED = {  # what a benchmark asks for
    1: (0.0, 0, 1.0, 0.0, -1),
    2: (1.0, 0, 1.0, 0.0, -1),
    3: (0.7, 0, 0.95, 0.0, -1),
    4: (0.7, 50, 0.95, 0.0, -1),
    5: (0.7, 50, 0.95, 0.0, 20),
    6: (1.0, 0, 0.95, 0.0, -1),  # of thousands of tokens: more than a list takes
}
_BENCHED = (  # setting, whether a mask hides tokens, edits a row; rows
    *((serve, 0, 0, (1, 8, 32, 128)) for serve in range(1, 6)),
    *(
        (serve, hides, edits, (1, 128))
        for serve, hides, edits in ((6, 0, 0), (3, 1, 0), (3, 1, 64))
    ),
)
_SPREADS = (3.0, 0.05, 8.0, 0.0, 1.0)  # of the logits: peaked, flat, very peaked, all equal


def _inputs(variant: Variant, sizes: Sizes, device: str) -> tuple[Any, ...]:
    """Return logits of several shapes; see _SERVED for ``serve``, _RACES, _EDGE for the like."""
    rows, vocab, serve = sizes["rows"], sizes["vocab"], sizes.get("serve", 0)
    logits = torch.randn(rows, vocab + sizes.get("gap", 0), device=device)
    if serve:  # what a model gives: one token in a hundred stands out
        logits = logits.mul_(2) + 8 * (torch.rand_like(logits) < 0.01) * torch.rand_like(logits)
        turns = [_SERVED[serve]] * rows
    else:
        spreads = torch.tensor([_SPREADS[row % len(_SPREADS)] for row in range(rows)])
        logits = logits.mul_(spreads.to(device).unsqueeze(1))
        turns = [_EDGE] if sizes.get("edge") else list(_RACES if sizes.get("race") else _TURNS)
        turns = [turns[row % len(turns)] for row in range(rows)]
    logits = logits.to(DTYPES[variant["logits_t"]])[:, :vocab]
    neutral = [1.0, 0.0, 0.0] if serve else [1.2, 0.3, 0.5]
    settings = [[t, p, math.log(m) if m else -math.inf, *neutral] for t, _, p, m, _ in turns]
    keys = [[row * 77 - 3, row * 5, turn[1], turn[4]] for row, turn in enumerate(turns)]
    if sizes.get("edge"):
        for row, wanted in enumerate(settings):
            wanted[1] = _on_the_edge(logits[row], wanted[0], row)
    mask = lists = None
    if sizes["hides"]:
        words = torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), device=device)
        mask = (words | torch.randint_like(words, 2**31)).int()
        lists = _random_edits(rows, vocab, sizes["edits"], device)
    return (
        *Samples.empty(rows, sizes["width"], torch.device(device)).outputs(),
        logits,
        torch.tensor(settings, device=device).view(rows, len(SETTINGS)),
        torch.tensor(keys, device=device, dtype=torch.int64).view(rows, len(KEYS)),
        mask,
        *(lists or (None,) * 4),
    )


def _on_the_edge(row: torch.Tensor, temperature: float, number: int) -> float:
    """Return a top-p just where a token's share ends: the mass must be known to the last bits."""
    scale = torch.tensor(1.44269504) / temperature
    values, places = row.float().unique(return_inverse=True)
    mass = torch.zeros(len(values), dtype=torch.int64, device=row.device)
    mass.index_add_(0, places, masses(weights(row.float(), row.max().float(), scale)))
    shares = mass.flip(0).cumsum(0).double() / mass.sum()
    edge = float(shares[(shares < (0.5, 0.8, 0.9, 0.97)[number % 4]).sum()].float())
    return edge + (number // 4 - 3) * 2.0**-24  # the nearest of float32, or a few steps off


def _random_edits(rows: int, vocab: int, count: int, device: str) -> tuple[torch.Tensor, ...]:
    tokens = [torch.randperm(vocab, device=device)[:count] for _ in range(rows)]
    total = rows * count
    biases = torch.randn(total, device=device).mul_(4)
    biases[::5] = -math.inf
    return (
        torch.arange(rows + 1, device=device, dtype=torch.int32) * count,
        torch.cat(tokens or [torch.empty(0, device=device)]).int(),
        torch.randint(-1, 4, (total,), device=device, dtype=torch.int32),
        biases,
    )


_SIZES = [
    {"rows": rows, "vocab": vocab, "gap": gap, "width": width, "hides": hides, "edits": edits}
    for rows, vocab, gap, width, hides, edits in [
        (0, 64, 0, 0, 0, 0), (1, 1, 0, 1, 0, 0), (11, 100, 3, 20, 1, 7), (13, 700, 4, 5, 0, 0),
        (13, 1111, 1, 20, 1, 90), (13, 4104, 8, 20, 0, 0),
    ]
] + [
    {"rows": rows, "vocab": 1100, "gap": 4, "width": 0, "hides": hides, "edits": edits, "race": 1}
    for rows, hides, edits in ((100, 0, 0), (60, 1, 400))
] + [
    {"rows": 28, "vocab": 3000, "gap": 0, "width": 0, "hides": 0, "edits": 0, "edge": 1}
]  # fmt: skip

_SAMPLE = KernelSpec(
    name="sample_tokens",
    source="sampling/sample_tokens.cu",
    entry="sample_tokens",
    schema=(
        "(Tensor(a!) out_tokens, Tensor(b!) out_errors, Tensor(c!) out_cutoffs, "
        "Tensor(d!) out_logprobs, Tensor(e!) out_ranks, Tensor(f!) out_top_tokens, "
        "Tensor(g!) out_top_logprobs, Tensor logits, Tensor settings, Tensor keys, "
        "Tensor? mask, Tensor? edit_starts, Tensor? edit_tokens, Tensor? edit_counts, "
        "Tensor? edit_biases) -> ()"
    ),
    arguments=(*["pointer"] * 15, "int64", "int32", "int32"),
    params={"logits_t": _LOGITS},
    bind=_bind,
    geometry=_geometry,
    cost=_cost,
    reference=sample_reference,
    make_inputs=_inputs,
    sizes=_SIZES,
    bench_sizes=[
        {"rows": rows, "vocab": 131072, "width": 20, "hides": hides, "edits": edits, "serve": serve}
        for serve, hides, edits, counts in _BENCHED
        for rows in counts
    ],
    bench_needs={"logits_t": "kiln::bf16"},
    tolerance=1e-5,
    max_cpu_seconds=0.8,
    shared_bytes=lambda variant, gpu: _SHARED_BYTES,
    error=_error,
    paper="https://arxiv.org/abs/1611.01144, https://doi.org/10.1145/2660193.2660195",
)
SPECS = [_SAMPLE]
define(SPECS)
