"""The file system of a folder, and whether kernel builders can lock each other out."""

from __future__ import annotations

import os
from pathlib import Path

from kiln.cache.disk.lock import builder_lock, lock_folder
from kiln.cache.env import Env

_NETWORK = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "lustre",
    "gpfs",
    "ceph",
    "9p",
    "fuse",
    "beegfs",
    "wekafs",
)


def nearest_folder(path: Path) -> Path:
    """Return the folder itself, or its nearest existing parent."""
    return next((each for each in (path, *path.parents) if each.exists()), Path(path.anchor))


def file_system(path: Path) -> str:
    """Return the file system type of a path, such as "ext4"; "" if unknown."""
    try:
        device = os.stat(path).st_dev
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts:
        mount, _, rest = line.partition(" - ")
        if mount.split()[2] == wanted and rest:
            return rest.split()[0]
    return ""


def is_network(kind: str) -> bool:
    """Whether several machines may share a file system of this type."""
    return kind.partition(".")[0] in _NETWORK


def lock_support(env: Env) -> tuple[bool, str]:
    """Return whether builders of one kernel can lock each other out, and the folder or reason."""
    folder = lock_folder(env)
    if folder is None:
        return False, "no local folder is trusted; set KILN_KERNEL_LOCK_DIR"
    with builder_lock(folder, "0" * 64, seconds=0.5) as held:
        return held, str(folder) if held else f"{folder} is on a file system without locks"
