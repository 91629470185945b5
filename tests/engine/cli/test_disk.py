"""What ``kiln doctor`` says of the disk under the kernel cache."""

from __future__ import annotations

import fcntl
import subprocess
from pathlib import Path

import pytest

from kiln.cache.env import Env
from kiln.engine.cli.disk import file_system, is_network, lock_support, nearest_folder


def test_the_file_system_is_what_the_system_says(tmp_path):
    for path in (tmp_path, Path("/proc"), Path("/dev/shm")):
        told = subprocess.check_output(["stat", "-f", "-c", "%T", path], text=True).strip()
        # stat speaks of ext2/ext3 for all three, and of overlayfs where the kernel says overlay.
        assert file_system(path)[:3] == told[:3]
    assert file_system(tmp_path / "absent") == ""


@pytest.mark.parametrize(
    ("kind", "network"), [("nfs4", True), ("fuse.sshfs", True), ("lustre", True), ("ext4", False)]
)
def test_network_file_systems_are_told_from_others(kind, network):
    assert is_network(kind) is network


def test_the_nearest_folder_is_one_that_exists(tmp_path):
    assert nearest_folder(tmp_path / "a/b/c") == tmp_path
    assert nearest_folder(tmp_path) == tmp_path


def test_locks_are_tried_and_not_only_looked_for(tmp_path, monkeypatch):
    env = Env(kernel_lock_dir=tmp_path / "locks")
    assert lock_support(env) == (True, str(tmp_path / "locks"))

    def no_locks(fd, operation):
        raise OSError(95, "not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert lock_support(env) == (False, f"{tmp_path / 'locks'} is on a file system without locks")
    (tmp_path / "file").touch()
    held, why = lock_support(Env(kernel_lock_dir=tmp_path / "file"))
    assert not held
    assert "KILN_KERNEL_LOCK_DIR" in why
