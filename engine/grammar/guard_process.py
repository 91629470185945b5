"""The process that tries grammars out, so that a hostile one costs no more than this process.

It reads lines of JSON from stdin: first the vocabulary, then grammars. For each grammar it writes
what is wrong with it, or null, as a line of JSON. It ends with stdin; one that takes too long ends
it by a signal, and one that takes too much memory by an error, whatever native code is running.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from typing import Any

from kiln.engine.errors import RequestError
from kiln.engine.grammar.vocabulary import check, compiled, read_vocabulary

MAX_SECONDS = 3.0  # for a grammar and the masks of its first tokens
_NUM_TOKENS = 8
_MAX_BYTES = 2 * 2**30  # that all grammars may add to the process


def main(arguments: list[str]) -> int:
    """Answer until stdin ends."""
    vocabulary = read_vocabulary(**json.loads(sys.stdin.buffer.readline()))
    _limit_memory()
    _answer(None)
    while line := sys.stdin.buffer.readline():
        signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)  # its default action ends the process
        said = _complaint(vocabulary, json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, 0)
        _answer(said)
    return 0


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
