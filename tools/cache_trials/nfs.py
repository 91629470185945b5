"""Two nodes that start cold on one folder: two NFS clients with separate locks."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from cache_trials.kills import ARCH, Program, stand_ins
from cache_trials.nfs_client import NfsClient
from cache_trials.processes import Child
from kiln.cache.disk.lock import builder_lock
from kiln.cache.disk.prune import prune
from kiln.cache.disk.store import Store

_COUNTS = ("lookups", "hits", "builds", "not_published", "wrong", "warnings", "stale_answers")


def two_nodes(folder: Path, *, seconds: float, min_stale: int = 0, seed: int = 0) -> dict[str, Any]:
    """Start two nodes cold repeatedly, with NFS clients of all kinds; return the counts.

    A busy machine may run the nodes one after the other, and then no client gives stale answers.
    The trial takes up to ten times as long to get ``min_stale`` stale answers.
    """
    dice, programs = random.Random(seed), stand_ins(16)
    totals: dict[str, Any] = {"rounds": 0, "nodes_that_failed": 0, "missing_at_the_end": 0}
    totals |= dict.fromkeys(_COUNTS, 0) | {"not_published_without_drop": 0}
    naive = {"rounds": 0, "failures": 0}
    start = time.monotonic()
    while (spent := time.monotonic() - start) < 10 * seconds:
        if spent >= seconds and totals["stale_answers"] >= min_stale:
            break
        name = f"round-{totals['rounds']}"
        client = {
            "remembers": dice.choice((0.003, 0.03, 30.0)),
            "lost": dice.choice((0.0, 0.05)),
            "drops_on_exist": totals["rounds"] % 4 != 3,
        }
        pruning = dice.random() < 0.3
        _round(folder / name, client, programs, pruning, totals)
        if totals["rounds"] % 8 == 1:
            _naive_round(folder / f"naive-{name}", programs, naive)
    return {
        "seconds": round(time.monotonic() - start, 1),
        "programs": len(programs),
        **totals,
        "protocol_without_care": naive,
    }


def passed(result: dict[str, Any]) -> bool:
    """Return whether no node failed and the clients gave stale answers."""
    zero = ("nodes_that_failed", "missing_at_the_end", "wrong", "warnings", "not_published")
    at_work = result["stale_answers"] > 0 and result["protocol_without_care"]["failures"] > 0
    return at_work and not any(result[name] for name in zero)


def _round(
    folder: Path,
    client: dict[str, Any],
    programs: Sequence[Program],
    pruning: bool,
    totals: dict[str, Any],
) -> None:
    begin = time.monotonic() + 0.02
    nodes = [
        Child(partial(_node, folder, number, client, programs, begin, pruning and number == 1))
        for number in range(2)
    ]
    counts = [node.result() for node in nodes]
    totals["rounds"] += 1
    totals["nodes_that_failed"] += counts.count(None)
    # A client that caches "no such folder" after the server said "exists" cannot publish in it.
    # No real client does that. Kiln then serves its own build and warns that it is not saved.
    excused = () if client["drops_on_exist"] else ("not_published", "warnings")
    for count in filter(None, counts):
        for name in _COUNTS:
            totals[name] += 0 if name in excused else count[name]
        if excused:
            totals["not_published_without_drop"] += count["not_published"]
    if not pruning and not excused:
        store = Store(folder / "mount" / "kernels", mode="ro")
        totals["missing_at_the_end"] += sum(store.get(ARCH, p.key) is None for p in programs)


def _node(
    folder: Path,
    number: int,
    client: dict[str, Any],
    programs: Sequence[Program],
    begin: float,
    pruning: bool,
) -> dict[str, int]:
    count, handler = dict.fromkeys(_COUNTS, 0), _Counter()
    logging.getLogger("kiln.cache.disk.store").addHandler(handler)
    mount, locks = folder / "mount", folder / f"locks-{number}"
    mount.mkdir(exist_ok=True, parents=True)
    locks.mkdir(mode=0o700)
    time.sleep(max(0.0, begin - time.monotonic()))
    with NfsClient(mount, **client, seed=number).mounted() as kernel:
        for repetition in range(3):
            store = Store(mount / "kernels")
            for program in programs:
                payload = _get_or_build(store, locks, program, count)
                count["wrong"] += hashlib.sha256(payload).hexdigest() != program.sha256
            if pruning and repetition < 2:
                prune(mount / "kernels", max_bytes=100_000, max_days=1)
        count["stale_answers"] = kernel.stale_answers
    count["warnings"] = handler.count
    return count


def _get_or_build(store: Store, locks: Path, program: Program, count: dict[str, int]) -> bytes:
    entry = store.get(ARCH, program.key)
    count["lookups"] += 1
    if entry is None:
        with builder_lock(locks, program.key):
            entry = store.get(ARCH, program.key)
            if entry is None:
                payload = program.build()
                count["builds"] += 1
                count["not_published"] += not store.put(ARCH, program.key, payload, {})
                return payload
    count["hits"] += 1
    return entry.payload


class _Counter(logging.Handler):
    """Counts warnings instead of printing them."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count one."""
        self.count += record.levelno >= logging.WARNING


def _naive_round(folder: Path, programs: Sequence[Program], totals: dict[str, int]) -> None:
    """Run the usual protocol, for comparison: rename a folder into place, then open it."""
    begin = time.monotonic() + 0.02
    trial: Callable[[int], int] = partial(_naive_node, folder, programs, begin)
    nodes = [Child(partial(trial, number)) for number in range(2)]
    totals["rounds"] += 1
    totals["failures"] += sum(node.result() for node in nodes)


def _naive_node(folder: Path, programs: Sequence[Program], begin: float, number: int) -> int:
    mount, failures = folder / "mount", 0
    mount.mkdir(exist_ok=True, parents=True)
    time.sleep(max(0.0, begin - time.monotonic()))
    with NfsClient(mount, remembers=30.0, seed=number).mounted():
        for program in programs:
            final = mount / program.key
            if not os.path.lexists(final / "kernel.cubin"):
                own = mount / f"{program.key}.{os.getpid()}"
                os.mkdir(own)
                (own / "kernel.cubin").write_bytes(program.build())
                with suppress(OSError):  # another process published it first
                    os.rename(own, final)
            try:
                os.close(os.open(final / "kernel.cubin", os.O_RDONLY))
            except OSError:
                failures += 1
    return failures
