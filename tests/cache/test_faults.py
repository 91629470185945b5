"""Whichever call to the system fails, and however: no exception, no wrong byte, no litter."""

from __future__ import annotations

import ast
import errno
import gc
import logging
import os
import random
import shutil
from pathlib import Path

import pytest
from cache_trials.syscalls import ERRORS, OS_CALLS, counting, failing, hooked
from depth import at_depth

import kiln
from kiln.cache.disk import publish
from kiln.cache.disk.lock import builder_lock
from kiln.cache.disk.prune import prune
from kiln.cache.disk.store import Store
from kiln.cache.disk.trust import Trust
from kiln.cache.keys import content_key

ARCH = "sm_90a"
# Keys of one folder: the same calls over and over would only take time.
RIGHT = {
    "ab" + content_key([("n", bytes([n]))])[2:]: random.Random(n).randbytes(2000) for n in range(5)
}
COLD, OLD, DAMAGED, UNTRUSTED, REFRESHED = RIGHT


def prepare(folder):
    """A cache with an entry that a hit touches, a damaged one, and one that others can write."""
    store = Store(folder / "kernels")
    for key in (OLD, DAMAGED, UNTRUSTED, REFRESHED):
        assert store.put(ARCH, key, RIGHT[key], {})
    os.utime(store.path(ARCH, OLD), (1000, 1000))
    store.path(ARCH, DAMAGED).write_bytes(b"damaged")
    store.path(ARCH, UNTRUSTED).chmod(0o666)
    (folder / "locks").mkdir(mode=0o700)


def life(folder):
    """Do everything that a process does with the cache; return the keys that came out wrong."""
    store, found = Store(folder / "kernels"), []
    for key, right in RIGHT.items():
        with builder_lock(folder / "locks", key, seconds=0.01):
            found.append((key, store.get(ARCH, key)))
            if found[-1][1] is None:
                store.put(ARCH, key, right, {})
    Store(store.root, mode="refresh").put(ARCH, REFRESHED, RIGHT[REFRESHED], {})
    found += [(key, Store(store.root).get(ARCH, key)) for key in RIGHT]
    list(store.damaged())
    list(store.quarantined())
    store.sweep()
    umask = os.umask(0o077)  # makes a writer set the mode itself
    Store(folder / "shared", trust=Trust(shared=True)).put(ARCH, COLD, RIGHT[COLD], {})
    os.umask(umask)
    prune(store.root, max_bytes=3000, max_days=1)
    return [key for key, entry in found if entry is not None and entry.payload != RIGHT[key]]


def sequence(folder):
    prepare(folder)
    seen = []
    with hooked(counting(seen)):
        assert life(folder) == []
    return seen


def test_without_faults_everything_is_there_in_the_end(tmp_path):
    prepare(tmp_path)
    assert life(tmp_path) == []
    assert len(list(Store(tmp_path / "kernels").entries())) == 1  # what pruning leaves
    seen = sequence(tmp_path / "again")
    assert set(seen) == {*OS_CALLS, "flock"}, "the trial must reach every call"


def test_the_trial_knows_every_call_that_the_cache_makes():
    """A call that is added to cache/ must be added to the trial."""
    harmless = {"getpid", "geteuid", "kill", "uname", "readlink", "fspath"}
    calls = {
        node.attr
        for path in (Path(kiln.__path__[0]) / "cache").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "os"
        and not node.attr.startswith("O_") and node.attr not in ("path", "environ", "stat_result")
    }  # fmt: skip
    assert calls - harmless == set(OS_CALLS)


@pytest.mark.quick(1)
@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
def test_any_call_may_fail(tmp_path, monkeypatch, error):
    fail_each_call(tmp_path, monkeypatch, lambda number: failing(number, error, forever=False))


def test_any_call_may_fail_from_some_moment_on(tmp_path, monkeypatch):
    def hook(number):
        return failing(number, ERRORS[number % len(ERRORS)], forever=True)

    fail_each_call(tmp_path, monkeypatch, hook)


def fail_each_call(tmp_path, monkeypatch, hook):
    monkeypatch.setattr(logging.getLogger("kiln.cache.disk.store"), "disabled", True)
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # it fails in its turn, and is slow
    count = len(sequence(tmp_path / "count"))
    assert count > 120
    prepare(tmp_path / "template")
    gc.collect()  # what earlier tests left open
    descriptors = len(os.listdir("/proc/self/fd"))
    for number in range(0, count, at_depth(2, 1)):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "template", folder)  # with modes and times
        with hooked(hook(number)):
            assert life(folder) == [], f"call {number}"
        check_aftermath(folder, monkeypatch, number)
        shutil.rmtree(folder)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def check_aftermath(folder, monkeypatch, number):
    """The next process finds right entries only, can publish, and sweeps what was left."""
    root = folder / "kernels"
    store = Store(root)
    for key, right in RIGHT.items():
        entry = store.get(ARCH, key)
        assert entry is None or entry.payload == right, f"call {number}"
        if entry is None:
            assert store.put(ARCH, key, right, {}), f"call {number}"
            assert store.get(ARCH, key) is not None, f"call {number}"
    with monkeypatch.context() as patch:
        patch.setattr(publish, "_alive", lambda pid: False)  # the process has ended
        store.sweep()
        Store(folder / "shared", trust=Trust(shared=True)).sweep()
    assert not list(folder.rglob(".tmp-*")), f"call {number}"


@pytest.mark.parametrize("error", [errno.ESTALE, errno.EIO])
@pytest.mark.parametrize("call", ["open", "fstat", "read", "lstat"])
def test_a_lookup_that_fails_once_on_a_network_is_a_hit(tmp_path, monkeypatch, error, call):
    store = Store(tmp_path / "kernels")
    assert store.put(ARCH, COLD, RIGHT[COLD], {})
    real, count = getattr(os, call), []

    def flaky(*args, **kwargs):
        count.append(1)
        if len(count) == 1:
            raise OSError(error, "flaky")
        return real(*args, **kwargs)

    monkeypatch.setattr(os, call, flaky)
    assert store.get(ARCH, COLD).payload == RIGHT[COLD]


@pytest.mark.parametrize("error", [errno.ESTALE, errno.EIO])
def test_a_lookup_that_fails_twice_is_a_miss_with_one_warning(tmp_path, monkeypatch, caplog, error):
    store, count = Store(tmp_path / "kernels"), []
    assert store.put(ARCH, COLD, RIGHT[COLD], {})

    def broken(*args):
        count.append(1)
        raise OSError(error, "broken")

    monkeypatch.setattr(os, "read", broken)
    assert store.get(ARCH, COLD) is None
    assert len(count) == 2
    assert store.get(ARCH, COLD) is None
    assert len(caplog.records) == 1
    monkeypatch.undo()
    assert store.get(ARCH, COLD) is not None, "an entry that could not be read is not a bad one"


@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["open", "write", "fsync", "mkdir", "rename"])
def test_trouble_with_the_disk_is_one_warning(tmp_path, monkeypatch, caplog, call, error):
    def refuse(*args, **kwargs):
        raise OSError(error, os.strerror(error))

    store = Store(tmp_path / "new")
    monkeypatch.setattr(os, "link" if call == "rename" else call, refuse)
    monkeypatch.setattr(os, call, refuse)
    assert not store.put(ARCH, COLD, RIGHT[COLD], {})
    assert not store.put(ARCH, COLD, RIGHT[COLD], {})
    assert len(caplog.records) == 1
    assert "not saving kernels to disk" in caplog.text
    monkeypatch.undo()
    assert not list(tmp_path.rglob(".tmp*"))
    assert store.put(ARCH, COLD, RIGHT[COLD], {}), "trouble may pass"


def test_a_short_write_is_continued(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:100]))
    store = Store(tmp_path)
    assert store.put(ARCH, COLD, RIGHT[COLD], {})
    assert store.get(ARCH, COLD).payload == RIGHT[COLD]


@pytest.mark.parametrize("most", [1000, 1_000_000])
def test_a_short_read_is_continued(tmp_path, monkeypatch, most):
    store, real = Store(tmp_path), os.read
    assert store.put(ARCH, COLD, RIGHT[COLD], {})
    monkeypatch.setattr(os, "read", lambda fd, size: real(fd, min(size, most)))
    assert store.get(ARCH, COLD).payload == RIGHT[COLD]


def test_a_file_system_without_fsync_is_written_all_the_same(tmp_path, monkeypatch):
    def refuse(fd):
        raise OSError(errno.EINVAL, "no fsync here")

    monkeypatch.setattr(os, "fsync", refuse)
    assert Store(tmp_path).put(ARCH, COLD, RIGHT[COLD], {})


def test_a_cache_that_is_removed_at_any_call_is_made_again(tmp_path):
    calls = []
    with hooked(counting(calls)):
        assert Store(tmp_path / "k").put(ARCH, COLD, RIGHT[COLD], {})
    for number in range(len(calls)):
        root = tmp_path / str(number)

        def remove(now, name, call, root=root, number=number):
            if now == number:
                shutil.rmtree(root, ignore_errors=True)
            return call()

        store = Store(root)
        with hooked(remove):
            assert store.put(ARCH, COLD, RIGHT[COLD], {}), f"call {number}"
        assert store.put(ARCH, COLD, RIGHT[COLD], {}), f"call {number}"
        assert store.get(ARCH, COLD).payload == RIGHT[COLD]
