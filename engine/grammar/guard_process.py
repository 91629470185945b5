"""The process that tries grammars out, so that a hostile one costs no more than this process.

It reads lines of JSON from stdin: first the vocabulary, then grammars. For each grammar it writes
what is wrong with it, or null, as a line of JSON. It ends with stdin. A grammar that takes too much
time ends it by a signal, whatever native code is running: SIGPROF after so much processor time,
SIGALRM after the seconds of its argument, on a busy machine. One that takes too much memory ends it
too.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any

from kiln.engine.errors import RequestError
from kiln.engine.grammar.vocabulary import check, compiled, read_vocabulary

MAX_SECONDS = 1.0  # of processor time for a grammar and the masks of its first tokens
_NICENESS = 10  # the engine and its streams come first
_NUM_TOKENS = 8
_MAX_BYTES = 2 * 2**30  # that all grammars may add to the process


def main(arguments: list[str]) -> int:
    """Answer until stdin ends. The argument is how many seconds one answer may take."""
    vocabulary = read_vocabulary(**json.loads(sys.stdin.buffer.readline()))
    _limit_memory()
    os.nice(_NICENESS)
    _answer(None)
    while line := sys.stdin.buffer.readline():
        _set_limits(MAX_SECONDS, float(arguments[0]))
        said = _complaint(vocabulary, json.loads(line))
        _set_limits(0, 0)
        _answer(said)
    return 0


def _set_limits(processor: float, wall: float) -> None:
    """End the process after so many seconds; 0: never."""
    signal.setitimer(signal.ITIMER_PROF, processor)
    signal.setitimer(signal.ITIMER_REAL, wall)


def _answer(said: str | None) -> None:
    sys.stdout.buffer.write(json.dumps(said).encode() + b"\n")
    sys.stdout.buffer.flush()


def _complaint(vocabulary: Any, text: str) -> str | None:
    try:
        matcher = compiled(vocabulary, text)
        for _ in range(_NUM_TOKENS):
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            check(matcher)
            if matcher.is_stopped() or not mask:
                break
            matcher.consume_token((mask & -mask).bit_length() - 1)  # the lowest that may follow
            check(matcher)
    except RequestError as error:
        return str(error)
    return None


def _limit_memory() -> None:
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MAX_BYTES, resource.RLIM_INFINITY))
