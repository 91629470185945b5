"""Grammars are tried out in processes of their own before a request goes to the engine."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import subprocess
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kiln.engine.distributed.command import module_command
from kiln.engine.errors import RequestError
from kiln.engine.grammar.guard_process import MAX_SECONDS
from kiln.engine.requests.structured_outputs import FIELD
from kiln.engine.server.errors import ApiError

_NUM_PROCESSES = 2
_MAX_WAIT = 1.0  # seconds for a process to be free; with the longest answer less than 5
_MAX_ANSWER = 3.5
_MAX_KNOWN = 4096  # verdicts that are remembered
_TOO_MUCH = (
    f"{FIELD}: to compile the grammar takes more than {MAX_SECONDS:g} s or 2 GiB: simplify it, by "
    "fewer alternatives or smaller numbers of repetitions"
)

Vocabulary = Callable[[], dict[str, Any]]


class GrammarGuard:
    """Says within 5 s whether a grammar can be compiled, and remembers it.

    ``vocabulary`` returns the keywords of ``read_vocabulary``. An answer takes a process at most
    ``max_answer`` seconds. A process starts with the first grammar, and another when two are tried
    at once.
    """

    def __init__(self, vocabulary: Vocabulary, max_answer: float = _MAX_ANSWER) -> None:
        self._max_answer = max_answer
        self._known: OrderedDict[bytes, str | None] = OrderedDict()
        self._threads = ThreadPoolExecutor(_NUM_PROCESSES, thread_name_prefix="kiln-grammars")
        self._local = threading.local()
        self._vocabulary = vocabulary

    async def check(self, text: str) -> None:
        """Raise RequestError if the engine could not use a grammar.

        Raises ApiError 503 if it was not tried, because the processes are busy with others.
        """
        key = hashlib.sha256(text.encode()).digest()
        if key not in self._known:
            self._known[key] = await self._ask(text)
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
        said = self._known[key]
        if said is not None:
            raise RequestError(said, FIELD)

    async def _ask(self, text: str) -> str | None:
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()

        def ask() -> str | None:
            loop.call_soon_threadsafe(begun.set)
            return self._process().ask(text)

        answer = loop.run_in_executor(self._threads, ask)
        try:
            await asyncio.wait_for(begun.wait(), _MAX_WAIT)
        except TimeoutError as error:
            answer.cancel()
            raise _busy() from error
        return await answer

    def _process(self) -> _Process:
        """Return the process of this thread."""
        known: _Process | None = getattr(self._local, "process", None)
        if known is None or known.has_ended:
            known = self._local.process = _Process(self._vocabulary(), self._max_answer)
        return known


class _Process:
    """One process. It ends when its stdin closes, so also with this one."""

    def __init__(self, vocabulary: dict[str, Any], max_answer: float) -> None:
        self._child = subprocess.Popen(
            [*module_command("kiln.engine.grammar.guard_process"), str(max_answer)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches only the parent
        )
        self.ask(vocabulary)

    @property
    def has_ended(self) -> bool:
        """Whether a grammar has ended it."""
        return self._child.poll() is not None

    def ask(self, question: object) -> str | None:
        """Return what is wrong with a grammar; None if nothing is. Raises ApiError 503."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(json.dumps(question).encode() + b"\n")
            self._child.stdin.flush()
            answer = self._child.stdout.readline()
        except OSError:
            answer = b""
        if not answer:
            if self._child.wait() == -signal.SIGALRM:
                raise _busy()
            return _TOO_MUCH
        said: str | None = json.loads(answer)
        return said


def _busy() -> ApiError:
    message = f"{FIELD}: the machine is busy, and the grammar was not compiled: try again"
    return ApiError(503, message, FIELD, "overloaded", retry_after=5)
