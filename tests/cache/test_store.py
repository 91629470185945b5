"""A reader of the kernel cache sees a whole, verified, trusted entry or none."""

from __future__ import annotations

import os
import random
import secrets
import threading
import time
from pathlib import Path

import pytest
from cache_trials.lookups import measure

from kiln.cache.disk import publish
from kiln.cache.disk.store import Store
from kiln.cache.keys import content_key

PAYLOAD = random.Random(7).randbytes(3000)
KEY, OTHER = content_key([("source", b"x")]), content_key([("source", b"y")])
ARCH = "sm_90a"


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "kernels")
    assert store.put(ARCH, KEY, PAYLOAD, {"kernel": "k"})
    return store


def payload(store, key=KEY, arch=ARCH):
    """What a new process would find."""
    entry = Store(store.root, mode=store.mode, trust=store.trust).get(arch, key)
    return None if entry is None else entry.payload


def bad_files(store):
    return sorted(path.name for path in store.quarantined())


def test_what_was_put_is_got(store):
    entry = store.get(ARCH, KEY)
    assert entry.payload == PAYLOAD
    assert entry.header == {"kernel": "k"}
    assert store.get(ARCH, OTHER) is None
    assert store.get("sm_90", KEY) is None


def test_files_lie_by_target_and_hash(store):
    path = store.path(ARCH, KEY)
    assert path == store.root / "v2" / ARCH / KEY[:2] / f"{KEY}.kk"
    assert path.stat().st_mode & 0o7777 == 0o644
    for folder in (store.root, path.parent, path.parents[1], path.parents[2]):
        assert folder.stat().st_mode & 0o7777 == 0o700
    (stored,) = store.entries()
    assert (stored.arch, stored.key, stored.path) == (ARCH, KEY, path)
    assert stored.size == path.stat().st_size


def test_the_umask_decides_nothing(tmp_path):
    for umask in (0, 0o777):
        store = Store(tmp_path / str(umask))
        before = os.umask(umask)
        try:
            assert store.put(ARCH, KEY, PAYLOAD, {})
        finally:
            os.umask(before)
        assert store.path(ARCH, KEY).stat().st_mode & 0o7777 == 0o644
        assert store.path(ARCH, KEY).parent.stat().st_mode & 0o7777 == 0o700


def test_flips_and_truncations_are_misses_on_disk_too(store, caplog):
    path = store.path(ARCH, KEY)
    good = path.read_bytes()
    for index in range(0, len(good), 13):
        bad = bytearray(good)
        bad[index] ^= 1 << index % 8
        for data in (bad, good[:index]):
            path.write_bytes(data)
            assert store.get(ARCH, KEY) is None, f"byte {index}"
            path.with_suffix(".bad").rename(path)
    assert len(caplog.records) == 1  # one kind of trouble, one warning


def test_a_bad_entry_is_moved_aside_and_built_again(store):
    store.path(ARCH, KEY).write_bytes(b"damaged")
    assert store.get(ARCH, KEY) is None
    assert bad_files(store) == [f"{KEY}.bad"]
    assert store.put(ARCH, KEY, PAYLOAD, {})
    assert payload(store) == PAYLOAD


def test_a_file_far_too_large_is_refused_unread(store, caplog):
    os.truncate(store.path(ARCH, KEY), 2**40)  # a hole: takes no room
    assert store.get(ARCH, KEY) is None
    assert "too large for a kernel" in caplog.text
    assert bad_files(store) == [f"{KEY}.bad"]


def test_only_so_many_bad_entries_are_kept(store):
    shard = store.path(ARCH, KEY).parent
    for number in range(10):
        key = KEY[:2] + content_key([("n", bytes([number]))])[2:]
        (shard / f"{key}.kk").write_bytes(b"damaged")
        assert store.get(ARCH, key) is None
        assert not (shard / f"{key}.kk").exists()
    assert len(bad_files(store)) == 2


def test_a_good_entry_that_took_a_bad_ones_place_is_not_moved(store, monkeypatch):
    path = store.path(ARCH, KEY)
    good = path.read_bytes()
    path.write_bytes(b"damaged")
    warn = Store._warn

    def meanwhile(self, *args):
        path.unlink()
        (path.parent / "filler").write_bytes(b"")  # so that the inode is not used again
        path.write_bytes(good)
        warn(self, *args)

    monkeypatch.setattr(Store, "_warn", meanwhile)
    assert store.get(ARCH, KEY) is None
    assert payload(store) == PAYLOAD


def test_an_entry_under_another_name_is_a_miss(store):
    assert store.put(ARCH, OTHER, b"other", {})
    store.path(ARCH, OTHER).write_bytes(store.path(ARCH, KEY).read_bytes())
    assert store.get(ARCH, OTHER) is None
    assert store.put("sm_80", KEY, b"other", {})
    store.path("sm_80", KEY).write_bytes(store.path(ARCH, KEY).read_bytes())
    assert store.get("sm_80", KEY) is None


def test_the_first_writer_wins_and_nothing_is_left_behind(store):
    inode = store.path(ARCH, KEY).stat().st_ino
    assert store.put(ARCH, KEY, PAYLOAD, {})
    assert store.path(ARCH, KEY).stat().st_ino == inode
    assert [p.name for p in store.path(ARCH, KEY).parent.iterdir()] == [f"{KEY}.kk"]


def test_a_file_system_without_hard_links_is_served_by_rename(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    store = Store(tmp_path)
    assert store.put(ARCH, KEY, PAYLOAD, {})
    assert payload(store) == PAYLOAD
    assert not list(tmp_path.rglob(".tmp*"))


def test_the_mode_says_what_is_read_and_written(store):
    def opened(mode):
        return Store(store.root, mode=mode)

    for mode, reads, writes in (
        ("rw", True, True), ("ro", True, False), ("sealed", True, False),
        ("off", False, False), ("refresh", False, True),
    ):  # fmt: skip
        assert (opened(mode).get(ARCH, KEY) is not None) is reads, mode
        key = content_key([("mode", mode.encode())])
        assert opened(mode).put(ARCH, key, b"new", {}) is writes, mode
        assert store.path(ARCH, key).exists() is writes, mode


@pytest.mark.parametrize("mode", ["ro", "sealed"])
def test_a_read_only_cache_is_not_touched_even_when_damaged(store, mode):
    path = store.path(ARCH, KEY)
    path.write_bytes(b"damaged")
    os.utime(path, (1, 1))
    leftover = path.parent / ".tmp-old"
    leftover.write_bytes(b"")
    os.utime(leftover, (1, 1))
    reader = Store(store.root, mode=mode)
    assert reader.get(ARCH, KEY) is None
    assert path.read_bytes() == b"damaged"
    assert path.stat().st_mtime == 1
    assert reader.sweep() == 0
    assert leftover.exists()
    assert store.sweep() == 1


def test_refresh_replaces_what_is_there(store):
    with store.path(ARCH, KEY).open("rb") as before:
        assert Store(store.root, mode="refresh").put(ARCH, KEY, b"anew", {})
        assert PAYLOAD in before.read()  # who has it open keeps it
    assert payload(store) == b"anew"
    assert not list(store.root.rglob(".tmp*"))


@pytest.mark.parametrize("when", [0, 1000000000, 4102444800])
def test_the_time_of_an_entry_decides_nothing_but_is_renewed_by_a_hit(store, when):
    path = store.path(ARCH, KEY)
    os.utime(path, (when, when))
    assert Store(store.root, mode="ro").get(ARCH, KEY) is not None
    assert path.stat().st_mtime == when
    assert payload(store) == PAYLOAD
    assert abs(path.stat().st_mtime - time.time()) < 60
    os.utime(path, (time.time() - 3600,) * 2)
    assert payload(store) == PAYLOAD
    assert path.stat().st_mtime < time.time() - 3000  # once a day is enough


def test_leftovers_of_the_dead_are_swept_and_work_in_progress_is_not(store, monkeypatch):
    shard = store.path(ARCH, KEY).parent
    made = []
    monkeypatch.setattr(os, "link", lambda source, target: made.append(str(source)))
    assert store.put(ARCH, OTHER, b"x", {})  # tells what a temporary file is called
    monkeypatch.undo()
    node = made[0].split("-")[-3]
    dead = max(int(p) for p in os.listdir("/proc") if p.isdigit()) + 100_000
    random_part = "0" * 32
    mine = shard / f".tmp-{node}-{os.getpid()}-{random_part}"
    of_the_dead = shard / f".tmp-{node}-{dead}-{random_part}"
    elsewhere = shard / f".tmp-{'f' * 16}-{dead}-{random_part}"
    old, old_future = shard / ".tmp-of-old", shard / ".tmp-of-2100"
    for path in (mine, of_the_dead, elsewhere, old, old_future):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 3700,) * 2)
    os.utime(old_future, (4102444800,) * 2)
    assert store.sweep() == 3
    assert mine.exists()
    assert elsewhere.exists()
    assert payload(store) == PAYLOAD
    of_the_dead.write_bytes(b"half")
    neighbour = KEY[:2] + OTHER[2:]
    assert store.put(ARCH, neighbour, b"x", {})  # a publication sweeps its own folder
    assert not of_the_dead.exists()


@pytest.mark.parametrize("plant", ["file", "link"])
def test_a_file_planted_under_the_temporary_name_is_not_written(
    store, monkeypatch, tmp_path, plant
):
    names, victim = [], tmp_path / "victim"
    victim.write_text("mine")
    monkeypatch.setattr(secrets, "token_hex", lambda size: "0" * 2 * size)
    monkeypatch.setattr(os, "link", lambda source, target: names.append(source))
    neighbour = KEY[:2] + OTHER[2:]
    assert store.put(ARCH, neighbour, b"x", {})  # tells what a temporary file is called
    monkeypatch.undo()
    monkeypatch.setattr(secrets, "token_hex", lambda size: "0" * 2 * size)
    if plant == "link":
        names[0].symlink_to(victim)
    else:
        os.link(victim, names[0])
    assert not store.put(ARCH, neighbour, b"x", {})
    assert victim.read_text() == "mine"
    assert store.get(ARCH, neighbour) is None


def test_process_ids_mean_something_only_in_one_namespace_of_one_boot(monkeypatch):
    nodes = {publish._node()}
    monkeypatch.setattr(os, "readlink", lambda path: "pid:[1]")
    nodes.add(publish._node.__wrapped__())
    monkeypatch.setattr(Path, "read_text", lambda self: "another boot")
    nodes.add(publish._node.__wrapped__())
    assert len(nodes) == 3
    assert all(len(node) == 16 for node in nodes)


def test_damaged_names_every_entry_that_would_be_refused_and_moves_none(store):
    assert store.put("sm_80", OTHER, b"other", {})
    assert list(store.damaged()) == []
    store.path("sm_80", OTHER).write_bytes(b"damaged")
    store.path(ARCH, KEY).chmod(0o666)
    reasons = {stored.arch: reason for stored, reason in store.damaged()}
    assert set(reasons) == {"sm_80", ARCH}
    assert "not an entry" in reasons["sm_80"]
    assert "others can write" in reasons[ARCH]
    assert len(list(store.entries())) == 2


def test_names_that_are_no_entries_are_not_listed(store):
    shard = store.path(ARCH, KEY).parent
    (shard / "readme.txt").write_text("x")
    (shard / f"{OTHER[:-1]}.kk").write_bytes(b"x")
    (shard / (("00" if KEY[:2] != "00" else "11") + KEY[2:] + ".kk")).write_bytes(b"x")
    (store.root / "v2" / "sm_xyz").mkdir(mode=0o700)
    assert [stored.key for stored in store.entries()] == [KEY]


def test_without_a_root_nothing_is_kept_and_one_warning_says_so(caplog):
    store = Store(None)
    assert not store.put(ARCH, KEY, PAYLOAD, {})
    assert not store.put(ARCH, KEY, PAYLOAD, {})
    assert store.get(ARCH, KEY) is None
    assert list(store.entries()) == list(store.damaged()) == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "KILN_KERNEL_CACHE_DIR" in caplog.text
    caplog.clear()
    assert not Store(None, mode="off").put(ARCH, KEY, PAYLOAD, {})
    assert not caplog.records


@pytest.mark.parametrize("key", ["", "../../etc/passwd", "A" * 64, "0" * 63, "0" * 64 + "\n"])
@pytest.mark.parametrize("arch", [ARCH, "..", "sm_90a/../..", "sm_9", "sm_90b", "sm_90a\n", ""])
def test_only_a_target_and_a_digest_become_a_path(store, arch, key, caplog):
    before = sorted(store.root.parent.rglob("*"))
    with pytest.raises(ValueError, match=r"64 hex digits|one such as sm_90a"):
        store.path(arch, key)
    assert store.get(arch, key) is None
    assert store.put(arch, key, PAYLOAD, {}) is False
    assert len(caplog.records) == 1
    assert sorted(store.root.parent.rglob("*")) == before


def test_racing_writers_and_readers_agree(tmp_path):
    store, wrong = Store(tmp_path), []

    def work():
        for index in range(30):
            key = content_key([("n", bytes([index]))])
            data = bytes([index]) * 500
            store.put(ARCH, key, data, {})
            entry = store.get(ARCH, key)
            if entry is None or entry.payload != data:
                wrong.append(index)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_warm_lookup_costs_little_more_than_reading_and_hashing_the_file(tmp_path):
    # The best of many, and beside a yardstick: the machine may be slow or busy.
    times = measure(tmp_path / "kernels")
    assert times["best_median_us"] <= 2.5 * times["best_read_and_hash_us"]


def test_a_key_depends_on_labels_lengths_and_order():
    keys = {
        content_key(fields)
        for fields in (
            [("a", b"bc")],
            [("ab", b"c")],
            [("a", b"b"), ("c", b"")],
            [("c", b""), ("a", b"b")],
            [("a", b""), ("b", b"c")],
        )
    }
    assert len(keys) == 5
