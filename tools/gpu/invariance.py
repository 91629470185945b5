"""Batch invariance on the GPU: random trials."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from gpu.pace import Pace, Row, chosen
from kiln.jit_kernels.bench.copies import copy_to
from kiln.jit_kernels.check.invariance import attention_trials
from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import KernelSpec
from kiln.jit_kernels.launch import launch
from kiln.jit_kernels.registry import all_specs, find_spec

Run = Callable[[KernelSpec, Sequence[Any]], None]
_BATCHES, _AT_ONCE = 200, 20
# Operators whose tensors have one row per token or request in the first dimension, and their
# arguments for which that is not so.
_BY_ROW = {
    "sample_tokens": ("edit_tokens", "edit_counts", "edit_biases"),
    "route_tokens": ("bias",),
    "rms_norm": ("weight",),
    "fused_add_rms_norm": ("weight",),
    "silu_and_mul": (),
}


def batch_invariance(args: argparse.Namespace) -> list[Row]:
    """Run random batches of attention, then the operators that work by rows."""
    pace = Pace(args, seconds=70)
    specs = [spec for name, spec in all_specs().items() if name in ("paged_attention", *_BY_ROW)]
    names = [spec.name for spec in chosen(args, specs)]
    return pace.rows(names, str, partial(_rows_of, pace, args.quick))


def _rows_of(pace: Pace, quick: bool, name: str) -> Iterator[Row]:
    if name == "paged_attention":
        yield _attention(pace, _BATCHES // 10 if quick else _BATCHES)
    else:
        yield by_row(find_spec(name), "cuda")


def _attention(pace: Pace, wanted: int) -> Row:
    """Run batches until there are enough or three quarters of the time are used up."""
    device = torch.device("cuda", torch.cuda.current_device())
    failures: list[str] = []
    done = 0
    while done < wanted and pace.used() < 0.75:
        failures += attention_trials(device, _AT_ONCE, seed=done)
        done += _AT_ONCE
    row: Row = {"kernel": "paged_attention", "trials": done, "differ": len(failures)}
    return row | {"first": failures[0] if failures else "", "ok": not failures and done > 0}


def by_row(spec: KernelSpec, device: str, run: Run = launch) -> Row:
    """Run each test size whole, shuffled, and each row alone; compare the results bit by bit.

    ``run`` takes the spec and the operator's arguments.
    """
    shared = _BY_ROW[spec.name]
    trials = differ = 0
    for variant in spec.variants(spec.bench_needs):
        for sizes in spec.sizes:
            a = copy_to(spec.make_arguments(variant, sizes, "cpu"), device)
            if any(getattr(a, name) is not None for name in shared if name.startswith("edit")):
                continue  # lists that rows index
            rows = getattr(a, spec.parameters.results[0]).shape[0]
            whole = _results(spec, a, slice(None), run)
            picks = [torch.randperm(rows), *(torch.tensor([row]) for row in range(min(rows, 8)))]
            for pick in picks if rows else []:
                some = _results(spec, a, pick.to(device), run)
                trials += 1
                differ += any(
                    not torch.equal(_bits(one[pick.to(device)]), _bits(other))
                    for one, other in zip(whole, some, strict=True)
                )
    ok = not differ and trials > 0
    return {"kernel": spec.name, "trials": trials, "differ": differ, "ok": ok}


def _results(
    spec: KernelSpec, a: Arguments, pick: slice | torch.Tensor, run: Run
) -> list[torch.Tensor]:
    """Run on some rows of copies; return the results."""
    shared = _BY_ROW[spec.name]
    own = [
        value[pick].clone() if isinstance(value, torch.Tensor) and name not in shared else value
        for name, value in copy_to(a)._asdict().items()
    ]
    named = spec.arguments(own)
    run(spec, named)
    return [getattr(named, name) for name in spec.parameters.results]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.numel() else tensor
