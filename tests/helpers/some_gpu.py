"""A GPU's name and sizes on a machine without one, and what a table may hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kiln.engine.distributed import tune_files
from kiln.engine.layers import row_limits

GPU = torch.device("cuda", 0)


def pretend(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Callable[..., None]:
    """Return a function that says which GPU this machine has; tables are kept in a folder."""

    def use(name: str, capability: tuple[int, int] = (9, 0), multiprocessors: int = 132) -> None:
        found = SimpleNamespace(
            name=name, major=capability[0], minor=capability[1],
            multi_processor_count=multiprocessors,
        )  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
        row_limits.limits_on.cache_clear()

    monkeypatch.setattr(tune_files, "cache_root", lambda env: folder)
    return use


def measured(form: str = "DenseWeight", rows: int = 12, **other: Any) -> dict[str, Any]:
    """Return a product as it stands in a table."""
    return {
        "form": form, "dtype": "bfloat16", "outputs": 64, "inputs": 256, "stored": "bfloat16",
        "most_rows": rows, **other,
    }  # fmt: skip
