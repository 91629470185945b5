"""Entries of real cubins with flipped bits, truncated, and combined wrongly."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from itertools import permutations
from typing import Any

from kiln.cache.disk.entry import DIGEST_SIZE, HEAD, Entry, EntryError, decode, encode
from kiln.cache.keys import content_key

ARCH = "sm_100a"


def real_entries() -> list[tuple[str, bytes]]:
    """Return key and bytes of the entries of three kernels, compiled now. Needs NVRTC."""
    from kiln.jit_kernels.declare.spec import label
    from kiln.jit_kernels.registry import find_spec
    from kiln.jit_kernels.toolchains import nvrtc
    from kiln.jit_kernels.toolchains.template import render

    entries = []
    for name in ("rms_norm", "fused_add_rms_norm", "silu_and_mul"):
        spec = find_spec(name)
        *_, variant = spec.variants()  # bf16, the largest
        unit = render(spec, variant)
        header = {
            "kernel": spec.name,
            "variant": dict(variant),
            "toolchain": nvrtc.identity(),
            "options": nvrtc.options(ARCH),
            "headers": {h: content_key([("text", t.encode())]) for h, t in unit.headers.items()},
        }
        key = content_key([("source", unit.text.encode())])
        cubin = nvrtc.compile_cubin(label(spec, variant), unit, ARCH)
        entries.append((key, encode(key, ARCH, Entry.of(header, cubin))))
    return entries


def believed(data: bytes, key: str, arch: str = ARCH) -> bool:
    """Return whether a reader accepts these bytes as the entry."""
    try:
        decode(data, key, arch)
    except EntryError:
        return False
    return True


def flipped(key: str, data: bytes, bits: Iterable[int]) -> tuple[int, int]:
    """Flip single bits; return how many were tried, and how many results were accepted."""
    work, tried, wrong = bytearray(data), 0, 0
    for bit in bits:
        work[bit >> 3] ^= 1 << (bit & 7)
        wrong += believed(bytes(work), key)
        work[bit >> 3] ^= 1 << (bit & 7)
        tried += 1
    assert bytes(work) == data
    return tried, wrong


def truncated(key: str, data: bytes, step: int = 1) -> tuple[int, int]:
    """Truncate the entry at every ``step`` bytes; return how many were tried and accepted."""
    sizes = range(0, len(data), step)
    return len(sizes), sum(believed(data[:size], key) for size in sizes)


def misassembled(entries: Sequence[tuple[str, bytes]]) -> tuple[int, int]:
    """Swap header, payload and digest between entries; return how many were tried and accepted."""
    tried = wrong = 0
    for (key, data), (other_key, other) in permutations(entries, 2):
        own, foreign = _parts(data), _parts(other)
        trials = [(other, key), (data, other_key)]
        for mask in range(1, 7):
            mixed = b"".join(
                b if mask >> i & 1 else a for i, (a, b) in enumerate(zip(own, foreign, strict=True))
            )
            trials += [(mixed, key), (mixed, other_key)]
        tried += len(trials)
        wrong += sum(believed(mixed, name) for mixed, name in trials)
    for key, data in entries:
        trials_of_arch = ("sm_100", "sm_90a", "sm_120")
        tried += len(trials_of_arch)
        wrong += sum(believed(data, key, arch) for arch in trials_of_arch)
    return tried, wrong


def run(share: float = 1.0) -> dict[str, Any]:
    """Try everything, or a random ``share`` of the bits; return the counts."""
    start, entries, dice = time.monotonic(), real_entries(), random.Random(0)
    assert all(believed(data, key) for key, data in entries)
    counts = {"flips": [0, 0], "truncations": [0, 0], "swaps": list(misassembled(entries))}
    for key, data in entries:
        bits: Iterable[int] = range(8 * len(data))
        if share < 1:
            bits = dice.sample(range(8 * len(data)), int(share * 8 * len(data)))
        for name, (tried, wrong) in (
            ("flips", flipped(key, data, bits)),
            ("truncations", truncated(key, data, 1 if share == 1 else 7)),
        ):
            counts[name][0] += tried
            counts[name][1] += wrong
    return {
        "entry_bytes": [len(data) for _, data in entries],
        **{f"{name}_tried": tried for name, (tried, _) in counts.items()},
        **{f"{name}_believed": wrong for name, (_, wrong) in counts.items()},
        "seconds": round(time.monotonic() - start, 1),
    }


def _parts(data: bytes) -> tuple[bytes, bytes, bytes]:
    start = HEAD.size + HEAD.unpack_from(data)[1]
    return data[:start], data[start:-DIGEST_SIZE], data[-DIGEST_SIZE:]
