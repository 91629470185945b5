"""Measure up to how many rows Kiln's kernel multiplies faster than torch: ``kiln warmup --tune``.

A product is what ``Weight.product`` does, rounding of activations included, by either choice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from kiln.engine.errors import ConfigError
from kiln.engine.graphs.buckets import decode_buckets
from kiln.engine.layers import row_limits
from kiln.engine.layers.few_rows import trial
from kiln.engine.layers.row_limits import Product
from kiln.engine.layers.weight import Weight
from kiln.engine.models.family import Family
from kiln.engine.models.hf_config import HFConfig
from kiln.engine.models.kernel_needs import kernel_needs
from kiln.engine.models.loader import Progress
from kiln.engine.models.products import products_of
from kiln.engine.models.split import Split
from kiln.engine.models.splitting import check_split
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.implementations import decide
from kiln.jit_kernels.ops.linear.checks import MOST_ROWS
from kiln.jit_kernels.ops.linear.spec import SKINNY_GEMM

ROWS = decode_buckets(MOST_ROWS)
_KERNEL, _TORCH = "kernel", "torch"
# Weights that the products of a graph read in turn, so that they do not stay in the L2 cache.
_COLD_BYTES, _MOST_COPIES = 2**28, 128
_FAR = 0.02  # from torch's result, relative to a row's length: codes and results are rounded

Call = Callable[[], object]
Timer = Callable[[Mapping[str, Sequence[Call]]], Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds of a product of so many rows."""

    rows: int
    kernel_us: float
    torch_us: float


@dataclass(frozen=True, slots=True)
class TunedProduct:
    """A measured product. ``roles``: of the projections that it is; ``inputs``: of x."""

    roles: tuple[str, ...]
    product: Product
    inputs: int
    num_bytes: int
    times: tuple[Times, ...]

    @property
    def most_rows(self) -> int:
        """Up to how many rows the kernel will multiply."""
        return best_limit(self.times)

    def fields(self) -> dict[str, Any]:
        """Return what the table keeps."""
        rows = [{"rows": t.rows, "us": [t.kernel_us, t.torch_us]} for t in self.times]
        return {
            **self.product._asdict(), "most_rows": self.most_rows, "roles": list(self.roles),
            "num_bytes": self.num_bytes, "times": rows,
        }  # fmt: skip


def best_limit(times: Sequence[Times]) -> int:
    """Return the limit with the least sum of times, by the kernel up to it and by torch above.

    Of equal ones it is the smallest. ``times``: of ascending numbers of rows.
    """
    gains = accumulate((one.torch_us - one.kernel_us for one in times), initial=0.0)
    limits = (0, *(one.rows for one in times))
    return max(zip(gains, limits, strict=True), key=lambda one: one[0])[1]


def tune_products(
    model: tuple[Family, HFConfig],
    dtype: torch.dtype,
    device: torch.device,
    world: int,
    timer: Timer,
    progress: Progress,
) -> list[TunedProduct]:
    """Measure the products of one of ``world`` ranks that the kernel can multiply.

    ``timer`` returns the microseconds of a call of each name, from calls that do the same on copies
    of the weights. Raises ConfigError if the kernel cannot run, or gives wrong results.
    """
    family, config = model
    check_split(config, world)
    _check_kernel(config, dtype, device, progress)
    wanted = products_of(family, config, dtype, Split(0, world))
    found: dict[Product, TunedProduct] = {}
    with torch.inference_mode():
        for done, one in enumerate(wanted):
            progress("products", done, len(wanted))
            for weight in one.weights(config, dtype, device):
                x = torch.randn(MOST_ROWS, one.inputs, device=device).to(dtype)
                product = _checked(weight, x)
                if product is None:
                    continue
                if product in found:
                    known = found[product]
                    roles = tuple(dict.fromkeys((*known.roles, *one.roles)))
                    found[product] = replace(known, roles=roles)
                else:
                    times = _times(weight, x, timer)
                    found[product] = TunedProduct(
                        one.roles, product, one.inputs, _bytes(weight), times
                    )
    progress("products", len(wanted), len(wanted))
    if not found:
        raise ConfigError(
            f"no product of this model in {str(dtype).removeprefix('torch.')} can be multiplied by "
            f"{SKINNY_GEMM.name}: there is nothing to measure; engines use torch for all of them"
        )
    return list(found.values())


def store(device: torch.device, found: Sequence[TunedProduct]) -> Path:
    """Keep the limits for engines on the same hardware; return the file. Raises ConfigError."""
    return row_limits.store(device, [one.fields() for one in found])


def _check_kernel(
    config: HFConfig, dtype: torch.dtype, device: torch.device, progress: Progress
) -> None:
    """Build and load the kernel. Raises ConfigError if a toggle decides, or it cannot run."""
    env, family = settings(), SKINNY_GEMM.family
    if env.kernel_choice(family) != "auto":
        raise ConfigError(f"{env.asked(family)} decides for all products already: unset it")
    needs = kernel_needs(config, dtype, dtype)
    made = decide([SKINNY_GEMM], device, needs, progress).made
    if all(one.implementation == "torch" for one in made):
        reason = made[0].reason if made else f"it has no variant for {dtype}"
        raise ConfigError(f"{SKINNY_GEMM.name} cannot run, so torch multiplies: {reason}")


def _checked(weight: Weight, x: torch.Tensor) -> Product | None:
    """Return the product that the kernel multiplies; None: it does not.

    Raises ConfigError if its result is not torch's.
    """
    mine, theirs = _out(weight, x), _out(weight, x)
    with trial(MOST_ROWS) as own:
        weight.product(x, mine, None)
    if not own.products:
        return None
    (product,) = own.products
    _multiply(0, weight, x, theirs)
    apart = (mine.double() - theirs.double()).norm(dim=1) / theirs.double().norm(dim=1)
    far = apart.max().item()
    if not far < _FAR:
        raise ConfigError(
            f"{SKINNY_GEMM.name} gives wrong products of {product}: they differ from torch's by "
            f"{far:.3g} of a row's length. They are not measured; please report it"
        )
    return product


def _times(weight: Weight, x: torch.Tensor, timer: Timer) -> tuple[Times, ...]:
    count = 1 if x.device.type == "cpu" else min(_MOST_COPIES, -(-_COLD_BYTES // _bytes(weight)))
    copies = [weight, *(copy.deepcopy(weight) for _ in range(count - 1))]
    found = []
    for rows in ROWS:
        own = x[:rows]
        out = _out(weight, own)
        us = timer(
            {
                name: [partial(_multiply, most, one, own, out) for one in copies]
                for name, most in ((_KERNEL, MOST_ROWS), (_TORCH, 0))
            }
        )
        found.append(Times(rows, round(us[_KERNEL], 2), round(us[_TORCH], 2)))
    return tuple(found)


def _multiply(most: int, weight: Weight, x: torch.Tensor, out: torch.Tensor) -> None:
    with trial(most):
        weight.product(x, out, None)


def _out(weight: Weight, x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(len(x), weight.out_features)


def _bytes(weight: Weight) -> int:
    return sum(one.nbytes for one in weight.tensors if one is not None)
