"""Where nothing can be written, kernels stay in memory, one warning says so, and all goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kiln.cache import env
from kiln.cache.disk.root import cache_root
from kiln.cache.disk.store import Store
from kiln.cache.keys import content_key

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 54321  # a uid without a passwd entry
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else, or mount")

# What a program does at its start: builds 20 kernels, in memory where they cannot be kept.
PROGRAM = """
import os, sys
from kiln.cache.env import read
from kiln.cache.disk.lock import builder_lock, lock_folder
from kiln.cache.disk.root import open_store

if sys.argv[1:]:  # become a user whom no passwd file knows
    os.setgroups([])
    os.setgid(int(sys.argv[1]))
    os.setuid(int(sys.argv[1]))
settings = read([])
store, locks, kernels, kept = open_store(settings), lock_folder(settings), {}, 0
for number in range(20):
    key = f"{number:064x}"
    with builder_lock(locks, key):
        entry = store.get("sm_90a", key)
        kernels[key] = entry.payload if entry else bytes([number]) * 8000
        if entry is None:
            kept += store.put("sm_90a", key, kernels[key], {})
assert all(kernel == bytes([n]) * 8000 for n, kernel in enumerate(kernels.values()))
print(len(kernels), kept)
"""


def start(environ, uid=None):
    """Run the program; return how many kernels it has, how many it kept, and its warnings."""
    command = [sys.executable, "-c", PROGRAM, *([] if uid is None else [str(uid)])]
    environ = {"PYTHONPATH": str(ROOT / "tools/import_root"), **environ}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    has, kept = map(int, done.stdout.split())
    return has, kept, done.stderr.splitlines()


def in_memory_with_one_warning(result):
    has, kept, warnings = result
    return (has, kept, len(warnings)) == (20, 0, 1) and "kernel cache: " in warnings[0]


def test_a_usable_home_is_used(tmp_path):
    assert start({"HOME": str(tmp_path)}) == (20, 20, [])
    assert start({"HOME": str(tmp_path)}) == (20, 0, [])  # all hits
    assert (tmp_path / ".cache/kiln/kernels/v2/sm_90a").is_dir()


@pytest.mark.parametrize("home", ["", "relative"])
def test_a_home_that_is_no_folder_name(home):
    has, kept, warnings = start({"HOME": home})
    assert (has, kept, len(warnings)) == (20, 0, 1)
    assert "no usable home folder" in warnings[0]


def test_a_home_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    assert in_memory_with_one_warning(start({"HOME": str(tmp_path / "file")}))
    assert in_memory_with_one_warning(start({"HOME": "/dev/null"}))


def test_a_home_that_cannot_be_made():
    assert in_memory_with_one_warning(start({"HOME": "/proc/nowhere"}))


@as_root
def test_a_home_that_may_not_be_written(tmp_path):
    for folder in tmp_path, *list(tmp_path.parents)[:-2]:
        if not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)  # so that others get to it
    for mode in (0o555, 0o700):
        tmp_path.chmod(mode)
        assert in_memory_with_one_warning(start({"HOME": str(tmp_path)}, uid=NOBODY))


@as_root
def test_a_user_without_a_passwd_entry_and_without_a_home():
    has, kept, warnings = start({}, uid=NOBODY)
    assert (has, kept, len(warnings)) == (20, 0, 1)
    assert "KILN_KERNEL_CACHE_DIR" in warnings[0]


def test_a_user_without_a_passwd_entry_has_no_cache_folder(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert env.user_cache_home() is None
    assert cache_root(env.Env()) is None
    monkeypatch.setattr(Path, "expanduser", lambda self: Path.home())
    with pytest.raises(env.EnvError, match="use an absolute path"):
        env.read([], {"KILN_KERNEL_CACHE_DIR": "~/kernels"})


def test_a_relative_xdg_folder_is_ignored_as_the_standard_says(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/folder")
    assert env.user_cache_home() == Path("/home/somebody/.cache")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/somewhere")
    assert env.user_cache_home() == Path("/var/somewhere")


@as_root
def test_a_full_disk(tmp_path):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=100k,mode=0700", "tmpfs", str(tmp_path)],
        capture_output=True, check=False,
    )  # fmt: skip
    if mounted.returncode != 0:
        pytest.skip("this container may not mount")
    try:
        has, kept, warnings = start({"KILN_KERNEL_CACHE_DIR": str(tmp_path / "kernels")})
        assert has == 20
        assert 0 < kept < 20
        assert len(warnings) == 1
        assert "No space left on device" in warnings[0]
        store = Store(tmp_path / "kernels")
        assert not list(store.damaged())
        assert sum(1 for _ in store.entries()) == kept
        assert not list(tmp_path.rglob(".tmp*"))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@as_root
def test_a_read_only_file_system_is_read(tmp_path):
    store = Store(tmp_path / "kernels")
    assert store.put("sm_90a", f"{7:064x}", bytes([7]) * 8000, {})
    os.utime(store.path("sm_90a", f"{7:064x}"), (0, 0))
    for action in (["--bind", str(tmp_path)], ["-o", "remount,bind,ro"]):
        command = ["mount", *action, str(tmp_path)]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            subprocess.run(["umount", str(tmp_path)], capture_output=True, check=False)
            pytest.skip("this container may not mount")
    try:
        has, kept, warnings = start({"KILN_KERNEL_CACHE_DIR": str(tmp_path / "kernels")})
        assert (has, kept, len(warnings)) == (20, 0, 1)
        assert "Read-only file system" in warnings[0]
        assert store.get("sm_90a", f"{7:064x}").payload == bytes([7]) * 8000
        assert store.get("sm_90a", content_key([])) is None
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
