"""Processes that warm one cold cache and are killed at random moments.

Each worker visits all keys in its own order: look up, verify the payload, build missing entries
under the builder lock, publish. Meanwhile another process damages and removes files in place, and
the cache is emptied repeatedly by pruning. Workers end only by SIGKILL; a worker that exits has
seen a wrong payload or an exception.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache_trials.processes import end, fork
from cache_trials.syscalls import hooked, killing
from kiln.cache.disk.lock import builder_lock
from kiln.cache.disk.prune import prune
from kiln.cache.disk.store import Store
from kiln.cache.keys import content_key

ARCH = "sm_90a"
WRONG = 3  # exit code of a worker
MUST_BE_ZERO = (
    *("wrong_payloads", "workers_that_failed", "stuck_workers", "leftovers_after_the_sweep"),
    *("damaged_entries_left_in_place", "wrong_after_a_last_warm_up"),
)
_FIELDS = ("lookups", "hits", "builds", "passes", "lock_not_held", "longest_wait_us", "beat_us")


@dataclass(frozen=True)
class Program:
    """A build: its key, the SHA-256 of the right payload, and a function that builds it."""

    key: str
    sha256: str
    build: Callable[[], bytes]


def stand_ins(count: int) -> list[Program]:
    """Return programs whose build takes a few milliseconds and gives 10 to 20 KB."""
    programs = []
    for number in range(count):
        size = random.Random(number).randrange(10_000, 20_000)

        def build(number: int = number, size: int = size) -> bytes:
            time.sleep(random.uniform(0.001, 0.006))
            return random.Random(number).randbytes(size)

        digest = hashlib.sha256(random.Random(number).randbytes(size)).hexdigest()
        programs.append(Program(content_key([("n", b"%d" % number)]), digest, build))
    return programs


class Slots:
    """Counters of the workers in shared memory; each worker writes only its own slot."""

    def __init__(self, count: int) -> None:
        # Writes of native words are atomic: a kill cannot leave half a number.
        self._words = memoryview(mmap.mmap(-1, count * len(_FIELDS) * 8)).cast("q")

    def add(self, slot: int, name: str, value: int = 1) -> None:
        """Add to a counter."""
        self.set(slot, name, self.get(slot, name) + value)

    def set(self, slot: int, name: str, value: int) -> None:
        """Set a counter."""
        self._words[slot * len(_FIELDS) + _FIELDS.index(name)] = value

    def get(self, slot: int, name: str) -> int:
        """Return a counter."""
        return self._words[slot * len(_FIELDS) + _FIELDS.index(name)]


def random_kills(
    root: Path,
    locks: Path,
    programs: Sequence[Program],
    *,
    seconds: float,
    workers: int = 8,
    pause: float = 0.04,
    stuck_after: float = 20.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Run the trial; return the counts. ``pause``: mean seconds between two kills."""
    dice, slots = random.Random(seed), Slots(workers)
    start = time.monotonic()

    def start_worker(slot: int) -> int:
        slots.set(slot, "beat_us", int(time.monotonic() * 1e6))
        return fork(_work, slot, slots, root, locks, programs)

    children = [start_worker(slot) for slot in range(workers)]
    vandal = fork(_vandalise, root)
    kills = amid = stuck = wipes = 0
    failures: list[int] = []
    longest_gap = 0.0
    next_wipe = start + 0.5
    while time.monotonic() - start < seconds and len(failures) < 10:
        time.sleep(dice.expovariate(1 / pause))
        now = time.monotonic()
        for slot in range(workers):
            gap = now - slots.get(slot, "beat_us") / 1e6
            longest_gap = max(longest_gap, gap)
            stuck += gap > stuck_after
        if now > next_wipe:
            prune(root, max_bytes=0, max_days=0)  # cold again
            wipes, next_wipe = wipes + 1, now + dice.uniform(0.1, 0.4)
        slot = dice.randrange(workers)
        code = end(children[slot])
        if code == -signal.SIGKILL:
            kills += 1
            amid += any(root.rglob(f".tmp-*-{children[slot]}-*"))
        else:
            failures.append(code)
        children[slot] = start_worker(slot)
    for code in map(end, [*children, vandal]):
        if code != -signal.SIGKILL:
            failures.append(code)
    sums = {n: sum(slots.get(s, n) for s in range(workers)) for n in _FIELDS[:-2]}
    waits = max(slots.get(s, "longest_wait_us") for s in range(workers))
    return {
        "seconds": round(time.monotonic() - start, 1),
        "workers": workers,
        "programs": len(programs),
        "kills": kills,
        "kills_amid_a_publication": amid,
        **sums,
        "times_made_cold": wipes,
        "wrong_payloads": failures.count(WRONG),
        "workers_that_failed": len(failures),
        "stuck_workers": stuck,
        "longest_silence_of_a_worker_s": round(longest_gap, 2),
        "longest_wait_for_a_lock_s": round(waits / 1e6, 2),
        **_aftermath(root, locks, programs),
    }


def _aftermath(root: Path, locks: Path, programs: Sequence[Program]) -> dict[str, int]:
    """Sweep, warm the cache once more, and count leftovers and errors."""
    before = sum(1 for _ in root.rglob(".tmp-*"))
    swept = Store(root).sweep()
    left = sum(1 for _ in root.rglob(".tmp-*"))
    wrong = 0
    for program in programs:
        store = Store(root)
        entry = store.get(ARCH, program.key)
        if entry is None:
            store.put(ARCH, program.key, program.build(), {})
            entry = store.get(ARCH, program.key)
        wrong += entry is None or hashlib.sha256(entry.payload).hexdigest() != program.sha256
    return {
        "leftovers_at_the_end": before,
        "leftovers_swept": swept,
        "leftovers_after_the_sweep": left,
        "damaged_entries_kept_aside": sum(1 for _ in root.rglob("*.bad")),
        "damaged_entries_left_in_place": sum(1 for _ in Store(root).damaged()),
        "wrong_after_a_last_warm_up": wrong,
        "lock_files": sum(1 for _ in locks.iterdir()),
    }


def _work(slot: int, slots: Slots, root: Path, locks: Path, programs: Sequence[Program]) -> None:
    order = list(programs)
    logging.disable()  # rejected entries are counted, not logged
    while True:
        store = Store(root)
        random.shuffle(order)
        for program in order:
            slots.set(slot, "beat_us", int(time.monotonic() * 1e6))
            _get_or_build(slot, slots, store, locks, program)
        slots.add(slot, "passes")


def _get_or_build(slot: int, slots: Slots, store: Store, locks: Path, program: Program) -> None:
    entry = store.get(ARCH, program.key)
    slots.add(slot, "lookups")
    if entry is None:
        before = time.monotonic()
        with builder_lock(locks, program.key) as held:
            waited = int((time.monotonic() - before) * 1e6)
            slots.set(slot, "longest_wait_us", max(waited, slots.get(slot, "longest_wait_us")))
            slots.add(slot, "lock_not_held", not held)
            entry = store.get(ARCH, program.key)
            if entry is None:
                payload = program.build()
                store.put(ARCH, program.key, payload, {"kernel": "stand-in"})
                slots.add(slot, "builds")
                _check(program, payload)
                return
    slots.add(slot, "hits")
    _check(program, entry.payload)


def _check(program: Program, payload: bytes) -> None:
    if hashlib.sha256(payload).hexdigest() != program.sha256:
        os._exit(WRONG)


def _vandalise(root: Path) -> None:
    """Until killed, damage entries in place: delete, truncate, or change a byte."""
    dice = random.Random()
    while True:
        time.sleep(0.02)
        paths = list(root.rglob("*.kk"))
        if not paths:
            continue
        path = dice.choice(paths)
        with suppress(OSError):
            size = max(1, path.stat().st_size)
            action = dice.randrange(3)
            if action == 0:
                path.unlink()
            elif action == 1:
                os.truncate(path, dice.randrange(size))
            else:
                with path.open("r+b") as file:
                    file.seek(dice.randrange(size))
                    file.write(dice.randbytes(1))


def kill_at_each_call(folder: Path) -> dict[str, int]:
    """Kill a publisher before and after each of its system calls; return the counts.

    After each kill the next process must find the right payload or none, and be able to publish.
    """
    program = stand_ins(1)[0]
    tried = wrong = unswept = unpublished = 0
    for after in (False, True):
        number = 0
        while True:
            root = folder / f"{number}-{after}"
            if end(fork(_publish_once, root, number, after, program), kill=False) == 0:
                break  # the publisher has fewer calls
            tried, number = tried + 1, number + 1
            store = Store(root)
            entry = store.get(ARCH, program.key)
            wrong += entry is not None and hashlib.sha256(entry.payload).hexdigest() != (
                program.sha256
            )
            unpublished += not store.put(ARCH, program.key, program.build(), {})
            unpublished += store.get(ARCH, program.key) is None
            store.sweep()
            unswept += any(root.rglob(".tmp-*"))
    return {"killed": tried, "wrong": wrong, "unswept": unswept, "unpublished": unpublished}


def _publish_once(root: Path, number: int, after: bool, program: Program) -> None:
    payload = program.build()
    with hooked(killing(number, after=after)):
        Store(root).put(ARCH, program.key, payload, {})
    os._exit(0)
