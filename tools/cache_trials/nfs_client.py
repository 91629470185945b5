"""A model of one NFS client: a folder as a machine's kernel shows it to its processes.

The folder itself is the server. A client caches for a while that a name does not exist (negative
dentries), which file a name refers to, a file's attributes, and a folder's listing. It sees other
clients' changes only after that. Requests that change something go to the server. Sometimes the
reply is lost, and the repeated request answers "exists" or "no such file" although the first one
worked. Files that another client removed are stale when read.
"""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

_PATCHED = ("open", "read", "lstat", "stat", "link", "rename", "unlink", "mkdir", "listdir")


class NfsClient:
    """One node's view of ``mount``. ``now`` is its clock, in seconds.

    ``remembers``: how long it caches. ``lost``: the share of lost replies. ``drops_on_exist``:
    whether "exists" from the server drops a negative dentry. Linux does so, but the protocol must
    not need it.
    """

    def __init__(
        self,
        mount: os.PathLike[str],
        *,
        remembers: float = 1.0,
        lost: float = 0.0,
        drops_on_exist: bool = True,
        now: Callable[[], float] = time.monotonic,
        seed: int = 0,
    ) -> None:
        self.mount = os.fspath(mount)
        self.remembers, self.lost = remembers, lost
        self.drops_on_exist = drops_on_exist
        self.now, self.dice = now, random.Random(seed)
        self.stale_answers = 0  # how often a cached answer was wrong
        self._absent: dict[str, float] = {}
        self._files: dict[str, tuple[int, float]] = {}
        self._attributes: dict[str, tuple[os.stat_result, float]] = {}
        self._listings: dict[str, tuple[list[str], float]] = {}
        self._open: dict[int, str] = {}
        self._removed_here: set[int] = set()  # inodes that this client removed while open
        self._real = {name: getattr(os, name) for name in _PATCHED}

    @contextmanager
    def mounted(self) -> Iterator[NfsClient]:
        """Route this process's system calls on the folder through the client."""
        before = {name: getattr(os, name) for name in _PATCHED}
        for name in _PATCHED:
            setattr(os, name, getattr(self, f"_{name}" if name != "open" else "_open_file"))
        try:
            yield self
        finally:
            for name, call in before.items():
                setattr(os, name, call)

    def forget(self) -> None:
        """Drop everything cached, as after the time to remember."""
        for known in (self._absent, self._files, self._attributes, self._listings):
            known.clear()

    def _open_file(self, path: Any, flags: int, mode: int = 0o777, **kwargs: Any) -> int:
        name = os.fspath(path)
        if not self._ours(name):
            return int(self._real["open"](path, flags, mode, **kwargs))
        if flags & os.O_CREAT:
            self._walk(name, parents_only=True)
            fd = int(self._real["open"](path, flags, mode, **kwargs))
            self._changed(name)
        else:
            self._walk(name)
            known = self._files.get(name)
            fd = int(self._asked(name, self._real["open"], path, flags, mode, **kwargs))
            inode = os.fstat(fd).st_ino
            if known and known[1] > self.now() and known[0] != inode:
                os.close(fd)
                del self._files[name]
                self._lie(errno.ESTALE)
            self._files[name] = (inode, self.now() + self.remembers)
        self._open[fd] = name
        return fd

    def _read(self, fd: int, size: int) -> bytes:
        if fd in self._open:
            info = os.fstat(fd)
            if info.st_nlink == 0 and info.st_ino not in self._removed_here:
                self._lie(errno.ESTALE)
        return bytes(self._real["read"](fd, size))

    def _lstat(self, path: Any, **kwargs: Any) -> os.stat_result:
        return self._status("lstat", path, **kwargs)

    def _stat(self, path: Any, **kwargs: Any) -> os.stat_result:
        return self._status("stat", path, **kwargs)

    def _status(self, call: str, path: Any, **kwargs: Any) -> os.stat_result:
        if isinstance(path, int) or not self._ours(os.fspath(path)):
            return self._real[call](path, **kwargs)  # type: ignore[no-any-return]
        name = os.fspath(path)
        self._walk(name)
        known = self._attributes.get(name)
        if known and known[1] > self.now():
            return known[0]
        info: os.stat_result = self._asked(name, self._real[call], path, **kwargs)
        self._attributes[name] = (info, self.now() + self.remembers)
        return info

    def _link(self, source: Any, target: Any, **kwargs: Any) -> None:
        self._change("link", FileExistsError, (source, target), **kwargs)

    def _rename(self, source: Any, target: Any, **kwargs: Any) -> None:
        self._change("rename", FileNotFoundError, (source, target), **kwargs)

    def _unlink(self, path: Any, **kwargs: Any) -> None:
        if self._ours(os.fspath(path)):
            with suppress(FileNotFoundError):
                info = self._real["lstat"](path)
                if info.st_nlink == 1:
                    self._removed_here.add(info.st_ino)
        self._change("unlink", FileNotFoundError, (path,), **kwargs)

    def _mkdir(self, path: Any, mode: int = 0o777, **kwargs: Any) -> None:
        self._change("mkdir", FileExistsError, (path,), mode, **kwargs)

    def _listdir(self, path: Any = ".") -> list[str]:
        name = os.fspath(path)
        if not self._ours(name):
            return list(self._real["listdir"](path))
        self._walk(name)
        known = self._listings.get(name)
        if known is None or known[1] <= self.now():
            names = list(self._asked(name, self._real["listdir"], path))
            known = self._listings[name] = (names, self.now() + self.remembers)
        return list(known[0])

    def _change(
        self, call: str, lost_as: type[OSError], paths: tuple[Any, ...], *args: Any, **kwargs: Any
    ) -> None:
        """Send a change to the server; sometimes lose its reply."""
        names = [os.fspath(path) for path in paths]
        if not self._ours(names[-1]):
            self._real[call](*paths, *args, **kwargs)
            return
        for name in names:
            self._walk(name, parents_only=True)
        try:
            self._real[call](*paths, *args, **kwargs)
        except FileExistsError:
            if self.drops_on_exist:
                self._absent.pop(names[-1], None)
            raise
        for name in names:
            self._changed(name)
        if self.dice.random() < self.lost:
            self.stale_answers += 1
            code = errno.EEXIST if lost_as is FileExistsError else errno.ENOENT
            raise lost_as(code, f"{os.strerror(code)} (reply to {call} was lost)", names[-1])

    def _walk(self, name: str, *, parents_only: bool = False) -> None:
        """Look up a path as the kernel does: a negative dentry ends the walk."""
        path = os.path.dirname(name) if parents_only else name
        while self._ours(path):
            if self._absent.get(path, 0.0) > self.now():
                self.stale_answers += self._exists(path)
                raise FileNotFoundError(errno.ENOENT, "No such file (remembered)", name)
            path = os.path.dirname(path)

    def _asked(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except FileNotFoundError:
            self._absent[name] = self.now() + self.remembers
            raise

    def _changed(self, name: str) -> None:
        self._absent.pop(name, None)
        self._files.pop(name, None)
        self._attributes.pop(name, None)
        self._listings.pop(os.path.dirname(name), None)

    def _lie(self, code: int) -> None:
        self.stale_answers += 1
        raise OSError(code, os.strerror(code))

    def _exists(self, path: str) -> bool:
        try:
            self._real["lstat"](path)
        except OSError:
            return False
        return True

    def _ours(self, name: str) -> bool:
        return name == self.mount or name.startswith(self.mount + os.sep)
