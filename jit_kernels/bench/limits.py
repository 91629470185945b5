"""A time limit for code of other libraries."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError inside the block after so many seconds. Only works in the main thread.

    For code that may take minutes and has no limit of its own, such as torch.compile on code that
    it cannot trace well.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    handler = signal.signal(signal.SIGALRM, stop)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    begun = time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # restore the caller's timer, such as a test's
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - begun), 1e-3))
