"""What a model takes of the device's memory."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass

import torch

from kiln.engine.compile.parameters import named_tensors, parts_of
from kiln.engine.layers.few_rows import limits_source, with_limits_source
from kiln.engine.layers.weight import DEQUANTISED, Weight
from kiln.engine.models.family import Model


@dataclass(slots=True)
class MemoryUse:
    """Bytes of memory. ``step`` and ``graphs`` are measured, on a GPU whose pool is not set.

    ``step``: the temporary memory of the largest step. ``graphs``: what is kept free for the CUDA
    graphs. The KV pool takes the rest.
    """

    weights: int
    step: int = 0
    graphs: int = 0
    pool: int = 0


def weight_bytes(model: Model, device: torch.device) -> int:
    """Return the bytes of a model that was just loaded: measured on a GPU, counted on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    tensors = {tensor.data_ptr(): tensor for tensor in named_tensors(model).values()}
    return sum(tensor.nbytes for tensor in tensors.values())


def products_used(
    model: Model, dtype: torch.dtype, device: torch.device, chosen: str
) -> dict[str, str]:
    """Say under "linear" how projections are multiplied, and how quantised weights are kept.

    ``chosen``: "implementation: reason" of the kernel for few rows, empty if none is loaded. The
    result is empty on a CPU whose torch multiplies floats.
    """
    implementation, _, reason = chosen.partition(": ")
    told = []
    if implementation not in ("", "torch"):
        told.append(with_limits_source(reason, device))
    elif reason or device.type == "cuda":
        told.append(reason or limits_source(device))
    kinds = Counter(weight.describe() for weight in parts_of(model, Weight) if weight.is_quantised)
    if kinds:
        text = "; ".join(f"{count} projections in {kind}" for kind, count in kinds.most_common())
        if DEQUANTISED in text:
            text += f": slower than {str(dtype).removeprefix('torch.')}, in less memory"
        told.append(text)
    return {"linear": f"{implementation or 'torch'}: {'; '.join(told)}"} if told else {}


def free_unused(device_type: str) -> None:
    """Free what nothing refers to any more, and give the memory that torch keeps to the device."""
    gc.collect()  # engines, models and graphs contain cycles
    if device_type == "cuda":
        torch.cuda.empty_cache()
