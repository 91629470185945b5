"""Up to how many rows skinny_gemm multiplies a product under KILN_LINEAR=auto, and who says so.

A table that ``kiln warmup --tune`` has measured on this hardware has the first word, then the
built-in one. On a GPU that neither knows, and for a form that is not built in, torch multiplies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

import kiln
from kiln.engine.distributed import tune_files
from kiln.jit_kernels.ops.dequantize.spec import DEQUANTIZE
from kiln.jit_kernels.ops.linear.checks import MOST_ROWS
from kiln.jit_kernels.ops.linear.spec import SKINNY_GEMM
from kiln.jit_kernels.ops.quantization.spec import QUANTIZE

_MIB = 2**20
# The kernel also computes the activation behind gate_up if its weights have at most so many bytes.
# On an H100 that makes a step of Qwen3-0.6B (12 MB) 2 to 4 % faster. It changes nothing for
# Llama-3-8B with AWQ (59 MB), and makes a step of the same model in bf16 (235 MB) 5 to 12 % slower.
# See benchmarks/few_row_steps.md.
MOST_GATED_BYTES = 32 * _MIB
# By form: (most bytes of weights, most rows), measured on an H100 with 2 to 235 MB of weights; see
# benchmarks/gpu_check_few_rows.md. An H200 has the same cores and faster memory.
BUILT_IN: Mapping[str, Sequence[tuple[float, int]]] = MappingProxyType(
    {
        "DenseWeight": ((40 * _MIB, 16), (math.inf, 8)),
        "ChannelWeight": ((math.inf, 16),),
        "TokenWeight": ((100 * _MIB, 16), (math.inf, 8)),
        "StaticWeight": ((100 * _MIB, 16), (math.inf, 8)),
        "BlockWeight": ((math.inf, 16),),
        "BlockGroupWeight": ((20 * _MIB, 16), (math.inf, 8)),
        "Group4Weight": ((math.inf, 16),),
        "MXFP4Weight": ((math.inf, 16),),
    }
)
# With int8 codes the kernel is faster at every size, because torch pads so few rows to 17.
_MOST_INT8_ROWS = 16
# By form: the most rows of an expert on average. For more, torch or quantized_gemm is as fast. Of
# the forms with 8-bit codes, only BlockGroupWeight was measured, with 4 and 16 rows per expert
# (benchmarks/gpu_check_products.md). The others have the same limit, since their codes take as many
# bytes.
_OF_EXPERTS: Mapping[str, int] = MappingProxyType(
    {
        "DenseWeight": 4,
        "ChannelWeight": 8,
        "TokenWeight": 8,
        "StaticWeight": 8,
        "BlockWeight": 8,
        "BlockGroupWeight": 8,
        "Group4Weight": 16,
        "MXFP4Weight": 32,
    }
)
_BUILT_IN_GPUS = re.compile(r"\bG?H[12]00\b")  # in the name of a GPU
_BUILT_IN = "the built-in table of H100 and H200"
_NONE = "no table of this GPU, so torch multiplies; kiln warmup --tune --model MODEL makes one"
_FOLDER, _WHAT = "linear", "the table of kiln warmup --tune"


class Product(NamedTuple):
    """A product of few rows: the form of its weights, the dtype of x, outputs and inputs.

    ``stored`` is the dtype of the weights, since one form may have fp8 or int8 codes. Where a byte
    of the weights holds several inputs, ``inputs`` counts bytes.
    """

    form: str
    dtype: str
    outputs: int
    inputs: int
    stored: str


def product_of(form: str, weight: torch.Tensor, dtype: torch.dtype) -> Product:
    """Return the product with weights [outputs, inputs] of a form."""
    outputs, inputs = weight.shape
    of_x, stored = (str(one).removeprefix("torch.") for one in (dtype, weight.dtype))
    return Product(form, of_x, outputs, inputs, stored)


@dataclass(frozen=True, slots=True)
class RowLimits:
    """The limits on a device: ``tuned`` ones, and for other products those ``built_in``, if any.

    ``source`` says in words where they come from.
    """

    tuned: Mapping[Product, int]
    built_in: bool
    source: str

    @property
    def may_multiply(self) -> bool:
        """Whether the kernel multiplies any product."""
        return self.built_in or any(self.tuned.values())

    def most_rows(self, product: Product, num_bytes: int) -> int:
        """Return the most rows of a product whose weights have so many bytes; 0: never."""
        if product in self.tuned:
            return self.tuned[product]
        steps = BUILT_IN.get(product.form, ()) if self.built_in else ()
        if steps and product.stored == "int8":
            return _MOST_INT8_ROWS
        return next((rows for most, rows in steps if num_bytes <= most), 0)

    def rows_of_experts(self, form: str, experts: int) -> int:
        """Return the most rows of the products of so many experts, of all together."""
        return _OF_EXPERTS.get(form, 0) * experts if self.built_in else 0


@cache
def limits_on(device: torch.device) -> RowLimits:
    """Return the limits on a GPU. Without an index it stands for GPUs of other machines."""
    if device.index is None:
        return RowLimits({}, built_in=True, source=_BUILT_IN)
    built_in = _is_built_in(device)
    key = key_of(device)
    path, table = _path(key), _load(key)
    if table is not None:
        others = f"the others by {_BUILT_IN}" if built_in else "the others by torch"
        source = f"as kiln warmup --tune measured on {table['date']}: {path}; {others}"
        return RowLimits(_limits(table), built_in, source)
    if built_in:
        return RowLimits({}, built_in, _BUILT_IN)
    return RowLimits({}, built_in, _NONE)


def key_of(device: torch.device) -> dict[str, str | int]:
    """Return the hardware and software that a measurement belongs to."""
    kernels = (SKINNY_GEMM, DEQUANTIZE, QUANTIZE)  # of one side or the other
    return {
        **_hardware(device),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "kiln": kiln.__version__,
        "source": tune_files.source_hash(kernels),
    }


def store(device: torch.device, products: Iterable[Mapping[str, Any]]) -> Path:
    """Keep measured products beside those that were measured here before; return the file.

    Each has the fields of a Product, ``most_rows``, and anything else. Raises ConfigError.
    """
    key = key_of(device)
    before = _load(key)
    found = {} if before is None else {_product(one): one for one in before["products"]}
    found |= {_product(one): dict(one) for one in products}
    table = {"date": date.today().isoformat(), "products": list(found.values())}
    path = tune_files.write(_path(key), _WHAT, key, table)
    limits_on.cache_clear()
    return path


def _load(key: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the table of a key, None if there is none that may be used."""

    def parse(table: Any) -> dict[str, Any]:
        _limits(table)
        return {"date": date.fromisoformat(table["date"]), "products": table["products"]}

    return tune_files.read(_path(key), _WHAT, key, parse)


def _limits(table: Mapping[str, Any]) -> dict[Product, int]:
    """Return the limits of a table. Raises ValueError, TypeError and KeyError."""
    limits = {_product(one): one["most_rows"] for one in table["products"]}
    for product, rows in limits.items():
        if type(rows) is not int or not 0 <= rows <= MOST_ROWS:
            raise ValueError(f"{product} has most_rows {rows!r}: want 0 to {MOST_ROWS}")
    return limits


def _product(fields: Mapping[str, Any]) -> Product:
    return Product(*(fields[name] for name in Product._fields))


def _path(key: Mapping[str, Any]) -> Path | None:
    """Return the file of a key's hardware: another torch has the same, so that old ones go."""
    hardware = {name: key[name] for name in ("gpu", "capability", "multiprocessors")}
    return tune_files.path_of(_FOLDER, hardware)


def _hardware(device: torch.device) -> dict[str, str | int]:
    found = torch.cuda.get_device_properties(device)
    return {
        "gpu": found.name,
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
    }


def _is_built_in(device: torch.device) -> bool:
    return bool(_BUILT_IN_GPUS.search(str(_hardware(device)["gpu"])))
