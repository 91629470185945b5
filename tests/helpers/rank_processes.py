"""Processes that are the ranks of a group, for tests.

They are forked from a server that has imported torch, so each costs milliseconds, not seconds. A
rank runs functions that the test names, which must be in an importable module.
"""

from __future__ import annotations

import multiprocessing as mp
import os
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any

Exchange = Callable[[bytes], list[bytes]]
_SECONDS = 120  # without a word from any rank


@cache
def _context() -> Any:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "rank_processes", "rank_kernels"])
    return context


class RankFailed(AssertionError):
    """A rank raised an error, with its traceback, or was killed."""


class Ranks:
    """``world`` processes, which end with this one or at ``close``."""

    def __init__(self, world: int) -> None:
        pairs = [_context().Pipe() for _ in range(world)]
        self.processes = [
            _context().Process(target=_serve, args=(theirs,), daemon=True) for _, theirs in pairs
        ]
        for process, (_, theirs) in zip(self.processes, pairs, strict=True):
            process.start()
            theirs.close()
        self.pipes = [ours for ours, _ in pairs]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def call(self, work: Callable[..., Any], each: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return work(rank, world, exchange, *arguments) of the first ranks, one for each item.

        Raises RankFailed, once all have finished.
        """
        answers = self.try_call(work, each)
        failed = [f"rank {rank}: {one}" for rank, one in enumerate(answers) if _is_failure(one)]
        if failed:
            raise RankFailed("\n".join(failed))
        return answers

    def try_call(self, work: Callable[..., Any], each: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call as ``call`` does; a rank's answer is a RankFailed if it failed."""
        pipes = self.pipes[: len(each)]
        for rank, (pipe, arguments) in enumerate(zip(pipes, each, strict=True)):
            pipe.send((work, rank, len(each), arguments))
        answers: list[Any] = [None] * len(each)
        pending, told = set(range(len(each))), dict[int, bytes]()
        while pending:
            ready = wait([pipes[rank] for rank in pending], _SECONDS)
            assert ready, f"ranks {sorted(pending)} have not said a word for {_SECONDS} s"
            for rank in [rank for rank in pending if pipes[rank] in ready]:
                kind, value = _receive(pipes[rank])
                if kind == "exchange":
                    told[rank] = value
                else:
                    answers[rank] = value if kind == "answer" else RankFailed(value)
                    pending.discard(rank)
            if told and len(told) == len(pending):  # all that still run
                complete = len(told) == len(each)
                gathered = [told[rank] for rank in sorted(told)] if complete else None
                for rank in told:
                    pipes[rank].send(gathered)
                told.clear()
        return answers

    def kill(self, rank: int) -> None:
        """End a rank as ``kill -9`` does, and wait until it is gone."""
        self.processes[rank].kill()
        self.processes[rank].join()

    def close(self) -> None:
        """End all ranks."""
        for rank, pipe in enumerate(self.pipes):
            self.kill(rank)
            pipe.close()


def _is_failure(answer: Any) -> bool:
    return isinstance(answer, RankFailed)


def _receive(pipe: Connection) -> tuple[str, Any]:
    try:
        kind, value = pipe.recv()
    except (EOFError, ConnectionResetError):
        return "failed", "the process is gone"
    return kind, value


def _serve(pipe: Connection) -> None:
    """Run what the test asks for, until it goes away."""
    import traceback

    import torch

    torch.set_num_threads(1)  # ranks share the cores
    os.environ["KILN_CPU_KERNELS"] = "host"

    def exchange(data: bytes) -> list[bytes]:
        pipe.send(("exchange", data))
        gathered = pipe.recv()
        if gathered is None:
            raise ConnectionError("a rank has ended")
        return gathered

    while True:
        try:
            work, rank, world, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("answer", work(rank, world, exchange, *arguments)))
        except Exception:
            pipe.send(("failed", traceback.format_exc()))
