"""Files and folders that others could have written are refused, with one warning."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from kiln.cache.disk.root import open_store, trust_of
from kiln.cache.disk.store import Store
from kiln.cache.disk.trust import (
    Trust,
    Untrusted,
    make_folder,
    make_private_folder,
    open_trusted,
)
from kiln.cache.env import Env
from kiln.cache.keys import content_key

KEY, ARCH = content_key([("source", b"x")]), "sm_90a"
STRANGER = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "kernels")
    assert store.put(ARCH, KEY, b"payload", {})
    return store


def refused(store, caplog):
    """Whether new lookups miss and one warning says so."""
    caplog.clear()
    store = Store(store.root, mode="ro", trust=store.trust)
    found = [store.get(ARCH, KEY) for _ in range(3)]
    return found == [None] * 3 and len(caplog.records) == 1


def heals(store):
    """Whether the next build can publish in the place of what was refused."""
    store = Store(store.root, trust=store.trust)
    assert store.get(ARCH, KEY) is None
    assert store.put(ARCH, KEY, b"payload", {})
    return store.get(ARCH, KEY) is not None


def test_what_we_wrote_is_believed(store, caplog):
    assert store.get(ARCH, KEY) is not None
    assert not caplog.records


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666, 0o622])
def test_a_file_that_others_can_write(store, mode, caplog):
    store.path(ARCH, KEY).chmod(mode)
    assert refused(store, caplog)
    assert f"mode {mode:o}" in caplog.text
    assert heals(store)


def test_a_symbolic_link(store, tmp_path, caplog):
    path = store.path(ARCH, KEY)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert refused(store, caplog)
    assert heals(store)
    assert (tmp_path / "elsewhere").exists()


def test_a_dangling_symbolic_link(store, tmp_path, caplog):
    path = store.path(ARCH, KEY)
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")
    assert refused(store, caplog)
    assert heals(store)
    assert not (tmp_path / "nowhere").exists()


@as_root
def test_a_hard_link_to_a_foreign_file(store, tmp_path, caplog):
    path = store.path(ARCH, KEY)
    path.rename(tmp_path / "theirs")
    os.chown(tmp_path / "theirs", STRANGER, STRANGER)
    os.link(tmp_path / "theirs", path)
    assert refused(store, caplog)
    assert f"user {STRANGER}" in caplog.text
    assert heals(store)
    assert (tmp_path / "theirs").stat().st_uid == STRANGER


def test_a_pipe_does_not_make_us_wait(store, caplog):
    store.path(ARCH, KEY).unlink()
    os.mkfifo(store.path(ARCH, KEY), 0o644)
    assert refused(store, caplog)
    assert heals(store)


def test_a_socket(store, caplog, monkeypatch):
    path = store.path(ARCH, KEY)
    path.unlink()
    monkeypatch.chdir(path.parent)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as planted:
        planted.bind(path.name)
        assert refused(store, caplog)
        assert heals(store)


@as_root
@pytest.mark.parametrize("device", [(1, 3), (1, 5), (250, 77)])  # null, zero, none
def test_a_device(store, device, caplog):
    path = store.path(ARCH, KEY)
    path.unlink()
    try:
        os.mknod(path, stat.S_IFCHR | 0o644, os.makedev(*device))
    except PermissionError:
        pytest.skip("this container may not make devices")
    assert refused(store, caplog)
    assert heals(store)


def test_a_folder_in_the_place_of_an_entry(store, caplog):
    store.path(ARCH, KEY).unlink()
    store.path(ARCH, KEY).mkdir()
    assert refused(store, caplog)
    assert heals(store)


@as_root
def test_a_foreign_owner(store, caplog):
    os.chown(store.path(ARCH, KEY), STRANGER, STRANGER)
    assert refused(store, caplog)
    believer = Trust(Trust().uids | {STRANGER})
    assert Store(store.root, trust=believer).get(ARCH, KEY) is not None
    assert heals(store)


@pytest.mark.parametrize("depth", range(4))
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_a_folder_that_others_can_write(store, depth, mode, caplog):
    folder = store.path(ARCH, KEY).parents[depth]
    folder.chmod(mode)
    assert refused(store, caplog)
    assert "others can write" in caplog.text
    caplog.clear()
    fresh = Store(store.root)
    assert fresh.get(ARCH, KEY) is None
    assert not fresh.put(ARCH, KEY, b"payload", {})
    assert len(caplog.records) == 1
    assert not list(store.root.rglob("*.bad"))
    assert list(fresh.entries()) == []


@as_root
@pytest.mark.parametrize("depth", range(4))
def test_a_folder_of_a_foreign_owner(store, depth, caplog):
    os.chown(store.path(ARCH, KEY).parents[depth], STRANGER, STRANGER)
    assert refused(store, caplog)
    assert not Store(store.root).put(ARCH, KEY, b"payload", {})


@pytest.mark.parametrize("depth", range(4))
def test_a_symbolic_link_to_a_folder(store, depth, tmp_path, caplog):
    folder = store.path(ARCH, KEY).parents[depth]
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert refused(store, caplog)
    assert list(Store(store.root).entries()) == []


def test_a_file_in_the_place_of_a_folder(tmp_path, caplog):
    (tmp_path / "kernels").write_text("")
    store = Store(tmp_path / "kernels")
    assert store.get(ARCH, KEY) is None
    assert not store.put(ARCH, KEY, b"payload", {})
    assert len(caplog.records) == 1


def test_a_shared_cache_has_folders_for_the_group_and_files_that_only_owners_write(tmp_path):
    store = Store(tmp_path / "above" / "kernels", trust=Trust(shared=True))
    before = os.umask(0o077)
    try:
        assert store.put(ARCH, KEY, b"payload", {})
    finally:
        os.umask(before)
    path = store.path(ARCH, KEY)
    assert path.stat().st_mode & 0o7777 == 0o644
    for folder in path.parents[:5]:
        assert folder.stat().st_mode & 0o7777 == 0o2775, folder
    assert store.get(ARCH, KEY) is not None
    assert Store(store.root).get(ARCH, KEY) is None, "a private reader does not believe the group"


@pytest.mark.parametrize("where", ["file-group", "file-others", "folder-others"])
def test_a_shared_cache_refuses_what_anybody_can_write(tmp_path, where, caplog):
    store = Store(tmp_path / "kernels", trust=Trust(shared=True))
    assert store.put(ARCH, KEY, b"payload", {})
    path = store.path(ARCH, KEY)
    {"file-group": path, "file-others": path, "folder-others": path.parent}[where].chmod(
        {"file-group": 0o664, "file-others": 0o646, "folder-others": 0o2777}[where]
    )
    assert refused(store, caplog)


@as_root
def test_a_shared_cache_believes_the_trusted_users_and_leaves_the_others_alone(tmp_path, caplog):
    store = Store(tmp_path / "kernels", trust=Trust(shared=True))
    assert store.put(ARCH, KEY, b"payload", {})
    os.chown(store.path(ARCH, KEY), STRANGER, STRANGER)
    assert refused(store, caplog)
    assert Store(store.root, trust=store.trust).get(ARCH, KEY) is None
    assert store.path(ARCH, KEY).exists(), "somebody else may trust them"
    wider = Trust(Trust().uids | {STRANGER}, shared=True)
    assert Store(store.root, trust=wider).get(ARCH, KEY) is not None


def test_the_environment_says_whom_to_trust(tmp_path):
    assert trust_of(Env()) == Trust()
    env = Env(
        kernel_cache_dir=tmp_path / "kernels",
        kernel_cache_shared=True,
        kernel_trusted_uids=(STRANGER,),
        kernel_cache="ro",
    )
    store = open_store(env)
    assert store.trust == Trust(frozenset({os.geteuid(), 0, STRANGER}), shared=True)
    assert (store.root, store.mode) == (tmp_path / "kernels", "ro")


def test_the_reason_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    for name, reason in (("file", "is not a folder"), ("link", "is a symbolic link")):
        with pytest.raises(Untrusted, match=reason):
            make_folder(tmp_path / name, Trust())


def test_a_folder_that_cannot_be_made_is_an_error_and_no_recursion():
    for path in (Path("/proc/nowhere/kernels"), Path("/dev/null/a/b")):
        with pytest.raises(OSError, match=r"No such file|Not a directory"):
            make_folder(path, Trust())


def test_the_helpers_for_other_folders_say_yes_and_no(tmp_path):
    assert make_private_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a").stat().st_mode & 0o7777 == 0o700
    assert make_private_folder(tmp_path / "a" / "b")
    (tmp_path / "a" / "b").chmod(0o777)
    assert not make_private_folder(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("x")
    assert not make_private_folder(tmp_path / "file" / "c")
    fd = open_trusted(tmp_path / "file")
    assert fd is not None
    os.close(fd)
    assert open_trusted(tmp_path / "absent") is None
    (tmp_path / "file").chmod(0o666)
    assert open_trusted(tmp_path / "file") is None
