"""How far a run of paged attention is from float64, in units of the rounding it cannot avoid."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kiln.jit_kernels.attention.reference import Paged, attend

MOST_UNITS = 2.0  # the weights and the output are rounded once each
_LSE_UNIT = 5e-5
_HALF_STEP = 2.0**-31  # of fp16's least weight, where the row's greatest is 2^6 or more


def attention_error(
    call: Paged,
    out: torch.Tensor,
    lse: torch.Tensor,
    wanted: Sequence[torch.Tensor],
    serves: Callable[[int], bool],
    *,
    fp16_weights: bool = False,
) -> float:
    """Return the largest error of out and lse, at most ``MOST_UNITS`` where a kernel is right.

    A unit is half a step of the output's dtype at 1, of sum p |v|; 5e-5 for lse. Weights that are
    fp16 have steps of 2^-30 of the row's greatest, however small they are: half of one, of every
    |v|, comes to the unit. Rows of requests that are not served must be what ``wanted`` (out and
    lse) holds there: else infinite.
    """
    worst = torch.zeros((), dtype=torch.float64, device=out.device)
    left_alone = torch.ones(out.shape[0], dtype=torch.bool, device=out.device)
    numbers = torch.finfo(out.dtype)
    step = _HALF_STEP / (numbers.eps / 2) if fp16_weights else 0.0
    for one in attend(_wide(call), serves, step):
        rows = slice(one.first_token, one.first_token + one.num_tokens)
        left_alone[rows] = False
        unit = numbers.eps / 2 * (one.bound + numbers.tiny)
        worst = torch.maximum(worst, ((out[rows].double() - one.out).abs() / unit).max())
        if lse.numel():
            off = (lse[rows].double() - one.lse).abs() / _LSE_UNIT
            off.masked_fill_(lse[rows].double() == one.lse, 0.0)  # equal infinities
            worst = torch.maximum(worst, off.max())
    for got, want in zip((out, lse), wanted, strict=True):
        if got.numel() and not _same(got[left_alone], want[left_alone]):
            return float("inf")
    return float(worst)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.double(), b.double()
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _wide(call: Paged) -> Paged:
    return Paged(
        call.query.double(), call.key_pool.double(), call.value_pool.double(), call.block_table,
        call.seq_lens, call.cu_seqlens_q, None if call.sinks is None else call.sinks.double(),
        call.scale, call.window, call.soft_cap, call.k_scale, call.v_scale,
    )  # fmt: skip
