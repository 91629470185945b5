"""A reader of the kernel cache sees a whole, verified, trusted entry or none."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from kiln.cache.keys import content_key
from kiln.cache.store import Store

PAYLOAD = random.Random(7).randbytes(3000)
KEY = content_key([("source", b"x")])


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "kernels")
    assert store.put(KEY, PAYLOAD, {"arch": "sm_90a"})
    return store


def test_what_was_put_is_got(store):
    assert store.get(KEY) == PAYLOAD
    assert store.get(content_key([("source", b"y")])) is None


def test_every_single_byte_flip_and_every_truncation_is_a_miss(store):
    path = store.path(KEY)
    good = path.read_bytes()
    for index in range(len(good)):
        bad = bytearray(good)
        bad[index] ^= 1 << index % 8
        path.write_bytes(bad)
        assert store.get(KEY) is None, f"byte {index}"
        path.with_suffix(".bad").rename(path)
    for size in range(0, len(good), 7):
        path.write_bytes(good[:size])
        assert store.get(KEY) is None, f"{size} bytes"
        path.with_suffix(".bad").rename(path)


def test_a_bad_entry_is_moved_aside_and_built_again(store):
    store.path(KEY).write_bytes(b"damaged")
    assert store.get(KEY) is None
    assert store.put(KEY, PAYLOAD, {})
    assert store.get(KEY) == PAYLOAD


def test_an_entry_under_another_keys_name_is_a_miss(store):
    other = content_key([("source", b"other")])
    assert store.put(other, b"other", {})
    store.path(other).write_bytes(store.path(KEY).read_bytes())
    assert store.get(other) is None


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_an_entry_that_others_can_write_is_a_miss(store, mode):
    store.path(KEY).chmod(mode)
    assert store.get(KEY) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_an_entry_of_a_foreign_owner_is_a_miss(store):
    os.chown(store.path(KEY), 12345, 12345)
    assert store.get(KEY) is None


def test_a_link_a_folder_and_a_pipe_are_misses(store, tmp_path):
    path = store.path(KEY)
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert store.get(KEY) is None
    path.unlink()
    path.mkdir()
    assert store.get(KEY) is None
    path.rmdir()
    os.mkfifo(path)
    assert store.get(KEY) is None  # and does not wait for a writer


def test_the_first_writer_wins_and_nothing_is_left_behind(store):
    inode = store.path(KEY).stat().st_ino
    assert store.put(KEY, PAYLOAD, {})
    assert store.path(KEY).stat().st_ino == inode
    assert [p.name for p in store.path(KEY).parent.iterdir()] == [store.path(KEY).name]


def test_a_file_system_without_hard_links_is_served_by_rename(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    store = Store(tmp_path)
    assert store.put(KEY, PAYLOAD, {})
    assert store.get(KEY) == PAYLOAD


@pytest.mark.parametrize("call", ["open", "fsync", "mkdir"])
def test_trouble_with_the_disk_is_one_warning(tmp_path, monkeypatch, caplog, call):
    def refuse(*args, **kwargs):
        raise OSError(28, "No space left on device")

    store = Store(tmp_path / "new")
    monkeypatch.setattr(os if call != "mkdir" else Path, call, refuse)
    assert not store.put(KEY, PAYLOAD, {})
    assert not store.put(KEY, PAYLOAD, {})
    assert len(caplog.records) == 1
    monkeypatch.undo()
    assert not list(tmp_path.rglob(".tmp*"))


def test_a_folder_that_others_can_write_is_not_used(tmp_path, caplog):
    root = tmp_path / "shared"
    root.mkdir()
    root.chmod(0o777)
    assert not Store(root).put(KEY, PAYLOAD, {})
    assert "others can write" in caplog.text


def test_without_a_root_nothing_is_kept():
    store = Store(None)
    assert not store.put(KEY, PAYLOAD, {})
    assert store.get(KEY) is None


@pytest.mark.parametrize("key", ["", "../../etc/passwd", "A" * 64, "0" * 63, "0" * 64 + "\n"])
def test_only_a_digest_becomes_a_path(store, key):
    with pytest.raises(ValueError, match="64 hex digits"):
        store.path(key)


def test_racing_writers_and_readers_agree(tmp_path):
    store, wrong = Store(tmp_path), []

    def work():
        for index in range(30):
            key = content_key([("n", bytes([index]))])
            payload = bytes([index]) * 500
            store.put(key, payload, {})
            if store.get(key) != payload:
                wrong.append(index)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


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
