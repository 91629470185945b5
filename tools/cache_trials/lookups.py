"""Time a warm, verified lookup of entries of 16 KB in the page cache."""

from __future__ import annotations

import hashlib
import random
import statistics
import time
from pathlib import Path
from typing import Any

from kiln.cache.disk.store import Store
from kiln.cache.keys import content_key

ARCH, PAYLOAD_BYTES = "sm_90a", 16_192


def measure(root: Path, rounds: int = 20) -> dict[str, Any]:
    """Look up 64 entries repeatedly; return the median of each round, in microseconds.

    Each round also times reading and hashing a file of that size, which any verified lookup must
    do.
    """
    store = Store(root)
    keys = [content_key([("n", bytes([number]))]) for number in range(64)]
    header = {"kernel": "k", "options": ["-o"] * 12, "headers": dict.fromkeys(keys[:8], keys[0])}
    for key in keys:
        assert store.put(ARCH, key, random.randbytes(PAYLOAD_BYTES), header)
    plain = root.with_name("plain")
    plain.write_bytes(random.randbytes(next(store.entries()).size))
    medians, floors = [], []
    for _ in range(rounds):
        times, reads = [], []
        for key in keys:
            start = time.perf_counter_ns()
            entry = store.get(ARCH, key)
            times.append((time.perf_counter_ns() - start) / 1000)
            assert entry is not None
            start = time.perf_counter_ns()
            hashlib.sha256(plain.read_bytes()).digest()
            reads.append((time.perf_counter_ns() - start) / 1000)
        medians.append(statistics.median(times))
        floors.append(statistics.median(reads))
    return {
        "entries": len(keys),
        "entry_bytes": next(store.entries()).size,
        "best_median_us": round(min(medians), 1),
        "median_of_medians_us": round(statistics.median(medians), 1),
        "best_read_and_hash_us": round(min(floors), 1),
    }
