"""Jobs that load and unload LoRA adapters, and a loaded adapter, as clients see them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A loaded adapter. ``path``: as it was given."""

    name: str
    path: str
    pinned: bool
    max_rank: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Load an adapter from a folder inside ``lora_root``; a pinned one is never evicted."""

    job_id: str
    name: str
    path: str
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Unload an adapter when its requests have ended; give up after ``timeout_s`` seconds."""

    job_id: str
    name: str
    timeout_s: float
