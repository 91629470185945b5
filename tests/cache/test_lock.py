"""One process builds and the rest wait; where there are no locks, all build and nobody fails."""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from kiln.cache.disk import lock
from kiln.cache.disk.lock import builder_lock, lock_folder
from kiln.cache.env import Env
from kiln.cache.keys import content_key

KEY = content_key([("source", b"x")])
OTHER = content_key([("source", b"y")])

STAMPEDE = """
import errno, fcntl, json, os, sys, time
from pathlib import Path
from cache_trials.processes import Child
from kiln.cache.disk.lock import builder_lock
from kiln.cache.disk.store import Store

folder, error, key = Path(sys.argv[1]), getattr(errno, sys.argv[2], None), "ab" * 32
(folder / "locks").mkdir(mode=0o700)

def refuse(fd, operation):
    raise OSError(error, os.strerror(error))

if error:
    fcntl.flock = refuse

def work():
    store, built = Store(folder / "kernels"), False
    time.sleep(max(0, begin - time.monotonic()))
    entry = store.get("sm_90a", key)
    payload = entry and entry.payload
    with builder_lock(folder / "locks", key) as held:
        entry = store.get("sm_90a", key)
        payload = entry and entry.payload
        if entry is None:
            time.sleep(0.05)
            built, payload = True, b"the bytes" * 1000
            store.put("sm_90a", key, payload, {})
    return built, held, payload == b"the bytes" * 1000

begin = time.monotonic() + 0.3
print(json.dumps([child.result() for child in [Child(work) for _ in range(16)]]))
"""


def stampede(tmp_path, error):
    tools = os.path.join(os.path.dirname(__file__), "..", "..", "tools")
    environ = {**os.environ, "PYTHONPATH": f"{tools}:{tools}/import_root"}
    command = [sys.executable, "-c", STAMPEDE, str(tmp_path), error]
    output = subprocess.check_output(command, env=environ, timeout=60)
    return [tuple(result) for result in json.loads(output)]


def test_of_16_processes_one_builds(tmp_path):
    results = stampede(tmp_path, "none")
    assert sum(built for built, _, _ in results) == 1
    assert all(held and right for _, held, right in results)


@pytest.mark.parametrize("error", ["ENOLCK", "EOPNOTSUPP", "ENOSYS", "EACCES"])
def test_without_locks_16_processes_agree_and_none_fails(tmp_path, error):
    results = stampede(tmp_path, error)
    assert len(results) == 16
    assert all(right and not held for _, held, right in results)
    assert any(built for built, _, _ in results)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "locks").mkdir(mode=0o700)
    return tmp_path / "locks"


def test_a_lock_is_held_once_and_given_back(folder):
    with builder_lock(folder, KEY) as first:
        assert first
        with builder_lock(folder, KEY, seconds=0.05) as second:
            assert not second
        with builder_lock(folder, OTHER, seconds=0.05) as another:
            assert another
    with builder_lock(folder, KEY, seconds=0) as again:
        assert again
    assert KEY[:3] != OTHER[:3]


def test_a_lock_is_given_back_after_an_exception(folder):
    with pytest.raises(KeyError), builder_lock(folder, KEY):
        raise KeyError
    with builder_lock(folder, KEY, seconds=0) as again:
        assert again


class FakeClock:
    """Time that passes while somebody sleeps, and only then."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    fake = FakeClock()
    monkeypatch.setattr(lock, "time", fake)
    return fake


def test_the_deadline_is_kept(folder, clock):
    with builder_lock(folder, KEY):
        with builder_lock(folder, KEY, seconds=20) as held:
            assert not held
        assert clock.now == pytest.approx(1020)


def test_a_waiter_goes_on_as_soon_as_the_builder_is_done(folder):
    order = []

    def wait():
        with builder_lock(folder, KEY, seconds=20) as held:
            order.append(("waiter", held))

    with builder_lock(folder, KEY):
        waiter = threading.Thread(target=wait)
        waiter.start()
        time.sleep(0.1)
        order.append(("builder", True))
    waiter.join()
    assert order == [("builder", True), ("waiter", True)]


def test_a_lock_dies_with_its_holder_though_a_child_lives_on(folder, monkeypatch):
    copies = []
    monkeypatch.setattr(lock, "close_quietly", lambda fd: (copies.append(os.dup(fd)), os.close(fd)))
    with builder_lock(folder, KEY):
        pass
    with builder_lock(folder, KEY, seconds=0) as held:
        assert held, "a copy of the descriptor, as a forked child has it, must not hold the lock"
    for fd in copies:
        os.close(fd)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EACCES])
def test_a_file_system_without_locks_is_no_error(folder, monkeypatch, clock, code):
    def refuse(fd, operation):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    gc.collect()  # what earlier tests left open
    descriptors = len(os.listdir("/proc/self/fd"))
    with builder_lock(folder, KEY, seconds=20) as held:
        assert not held
    assert clock.now == 1000, "nobody waits for a lock that cannot be had"
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_no_folder_no_lock(tmp_path):
    with builder_lock(None, KEY) as held:
        assert not held
    with builder_lock(tmp_path / "absent", KEY) as held:
        assert not held


def test_a_planted_link_is_not_followed(folder, tmp_path):
    (folder / KEY[:3]).symlink_to(tmp_path / "victim")
    with builder_lock(folder, KEY) as held:
        assert not held
    assert not (tmp_path / "victim").exists()


def test_lock_files_stay_and_are_few(folder):
    for number in range(300):
        with builder_lock(folder, content_key([("n", b"%d" % number)])):
            pass
    names = [path.name for path in folder.iterdir()]
    assert all(len(name) == 3 for name in names)  # hence never more than 4096
    assert 250 < len(names) <= 300
    with pytest.raises(ValueError, match="64 hex"), builder_lock(folder, "../x"):
        pass


def test_the_folder_of_locks_is_private_and_on_this_machine(tmp_path, monkeypatch, caplog):
    chosen = tmp_path / "mine" / "locks"
    assert lock_folder(Env(kernel_lock_dir=chosen)) == chosen
    assert chosen.stat().st_mode & 0o7777 == 0o700
    chosen.chmod(0o777)
    assert lock_folder(Env(kernel_lock_dir=chosen)) is None
    assert "KILN_KERNEL_LOCK_DIR" in caplog.text

    run, memory = tmp_path / "run", tmp_path / "dev/shm"
    run.mkdir()
    memory.mkdir(parents=True)
    monkeypatch.setattr(lock, "Path", lambda text: tmp_path / text.strip("/"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(run))
    assert lock_folder(Env()) == run / "kiln"
    own = memory / f"kiln-{os.geteuid()}"
    for unusable in ("relative", str(tmp_path / "absent"), ""):
        monkeypatch.setenv("XDG_RUNTIME_DIR", unusable)
        assert lock_folder(Env()) == own
    own.chmod(0o777)  # as a neighbour would plant it
    assert lock_folder(Env()) is None
    own.rmdir()
    memory.rmdir()
    assert lock_folder(Env()) is None
    assert not memory.exists()
