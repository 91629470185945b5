"""Pruning keeps the caps, takes the longest unused first, and disturbs no reader."""

from __future__ import annotations

import os
import random
import threading
import time

import pytest

from kiln.cache.disk.prune import prune
from kiln.cache.disk.store import Store
from kiln.cache.disk.trust import Trust
from kiln.cache.keys import content_key

ARCH, DAY = "sm_90a", 86400
KEYS = [content_key([("n", bytes([n]))]) for n in range(8)]


@pytest.fixture
def store(tmp_path):
    """Eight entries of one size; entry n was last used n days ago."""
    store = Store(tmp_path / "kernels")
    for days, key in enumerate(KEYS):
        assert store.put(ARCH, key, b"x" * 1000, {})
        os.utime(store.path(ARCH, key), (time.time() - days * DAY - 60,) * 2)
    return store


def left(store):
    return [KEYS.index(stored.key) for stored in sorted(store.entries(), key=lambda s: -s.mtime)]


def size(store):
    return next(store.entries()).size


def test_what_was_not_used_for_so_long_goes(store):
    pruned = prune(store.root, max_bytes=10**9, max_days=4.5)
    assert left(store) == [0, 1, 2, 3, 4]
    assert {entry.key for entry in pruned.removed} == set(KEYS[5:])
    assert (pruned.kept, pruned.removed_bytes) == (5, 3 * size(store))


def test_the_longest_unused_go_until_the_rest_fits(store):
    pruned = prune(store.root, max_bytes=3 * size(store) + 5, max_days=90)
    assert left(store) == [0, 1, 2]
    assert pruned.kept_bytes == 3 * size(store)
    assert prune(store.root, max_bytes=3 * size(store), max_days=90).removed == ()


def test_a_hit_saves_an_entry(store):
    assert Store(store.root).get(ARCH, KEYS[7]) is not None
    prune(store.root, max_bytes=2 * size(store), max_days=90)
    assert left(store) == [7, 0]


def test_nothing_is_left_of_a_cache_without_room(store):
    prune(store.root, max_bytes=0, max_days=90)
    assert left(store) == []
    assert store.put(ARCH, KEYS[0], b"x" * 1000, {})


def test_a_dry_run_says_the_same_and_touches_nothing(store):
    leftover = store.path(ARCH, KEYS[0]).parent / ".tmp-old"
    leftover.write_bytes(b"")
    os.utime(leftover, (0, 0))
    caps = {"max_bytes": 4 * size(store), "max_days": 90}
    told = prune(store.root, **caps, dry_run=True)
    assert left(store) == list(range(8))
    assert leftover.exists()
    assert prune(store.root, **caps).removed == told.removed
    assert not leftover.exists()


def test_entries_from_the_future_count_as_just_used(store):
    os.utime(store.path(ARCH, KEYS[3]), (time.time() + 3650 * DAY,) * 2)
    prune(store.root, max_bytes=10**9, max_days=0.5)
    assert sorted(left(store)) == [0, 3]


def test_what_vanishes_or_resists_meanwhile_is_no_error(store, monkeypatch):
    real = os.unlink

    def unlink(path, **kwargs):
        real(path, **kwargs)
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "unlink", unlink)
    assert len(prune(store.root, max_bytes=4 * size(store), max_days=90).removed) == 4

    def refuse(path, **kwargs):
        raise PermissionError(path)

    monkeypatch.setattr(os, "unlink", refuse)
    pruned = prune(store.root, max_bytes=0, max_days=90)
    assert pruned.removed == ()
    assert pruned.kept == 4


def test_an_entry_that_is_used_meanwhile_stays(store, monkeypatch):
    real = os.lstat
    path = store.path(ARCH, KEYS[7])

    def used(name, **kwargs):
        info = real(name, **kwargs)
        if str(name) == str(path):
            os.utime(path)  # a reader's hit, right after we looked
        return info

    monkeypatch.setattr(os, "lstat", used)
    prune(store.root, max_bytes=0, max_days=90)
    monkeypatch.undo()
    assert left(store) == [7]


def test_old_damaged_entries_go_and_new_ones_stay_for_a_week(store):
    for key in KEYS[:2]:
        store.path(ARCH, key).write_bytes(b"damaged")
        assert store.get(ARCH, key) is None
    old, new = sorted(store.quarantined())
    os.utime(old, (time.time() - 8 * DAY,) * 2)
    assert prune(store.root, max_bytes=10**9, max_days=90).leftovers == 1
    assert list(store.quarantined()) == [new]


def test_links_out_of_the_cache_are_not_followed(store, tmp_path):
    elsewhere = Store(tmp_path / "elsewhere")
    assert elsewhere.put("sm_80", KEYS[0], b"x" * 1000, {})
    (store.root / "v2" / "sm_80").symlink_to(elsewhere.root / "v2" / "sm_80")
    prune(store.root, max_bytes=0, max_days=0)
    assert elsewhere.get("sm_80", KEYS[0]) is not None


def test_a_folder_that_is_not_ours_is_not_pruned(store):
    store.root.chmod(0o777)
    assert prune(store.root, max_bytes=0, max_days=0).removed == ()
    assert prune(store.root, max_bytes=0, max_days=0, trust=Trust(shared=True)).removed == ()
    store.root.chmod(0o700)
    assert len(left(store)) == 8


def test_without_a_folder_there_is_nothing_to_prune(tmp_path):
    assert prune(None, max_bytes=0, max_days=0).kept == 0
    assert prune(tmp_path / "absent", max_bytes=0, max_days=0).kept == 0


def test_the_cap_holds_while_four_readers_run_and_none_of_them_errs(tmp_path, caplog):
    root, right = tmp_path / "kernels", {}
    for number in range(64):
        right[content_key([("n", b"%d" % number)])] = random.Random(number).randbytes(8000)
    stop, errors, hits = threading.Event(), [], [0] * 4

    def read(reader):
        store, keys = Store(root), list(right)
        while not stop.is_set():
            random.shuffle(keys)
            for key in keys:
                try:
                    entry = store.get(ARCH, key)
                except Exception as error:
                    errors.append(repr(error))
                    return
                if entry is not None:
                    hits[reader] += 1
                    if entry.payload != right[key]:
                        errors.append(key)

    readers = [threading.Thread(target=read, args=(reader,)) for reader in range(4)]
    for reader in readers:
        reader.start()
    store, rounds = Store(root), 0
    while rounds < 3 or (not all(hits) and not errors):
        for key, payload in right.items():
            assert store.put(ARCH, key, payload, {})
        pruned = prune(root, max_bytes=100_000, max_days=90)
        assert pruned.kept_bytes == sum(entry.size for entry in store.entries()) <= 100_000
        rounds += 1
    stop.set()
    for reader in readers:
        reader.join()
    assert not errors
    assert not caplog.records
    assert all(hits)
