"""Replace addresses in reports of the host runtime by source lines."""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

_ADDRESS = re.compile(r"\[([^\]\s]+)\+(0x[0-9a-f]+)\]")
# Frames between a kernel's line and the access: cuda_host.h, its wrappers, the thunk.
_NOT_KERNEL = ("kernel_sources/host/", "kernel_sources/include/kiln/ptx/", "main.cpp", "??")


def readable(report: str) -> str:
    """Return a report with ``[library+offset]`` replaced by file:line, each line once."""
    text = _ADDRESS.sub(lambda match: _place(match[1], match[2]), report)
    return "\n".join(
        dict.fromkeys(text.replace("./kernel_sources/", "kernel_sources/").split("\n"))
    )


@lru_cache(maxsize=4096)
def _place(library: str, offset: str) -> str:
    """Return the kernel's own line; for a line in a header, also its caller."""
    tool = shutil.which("addr2line")
    path = Path(library)
    if tool is None:
        return f"{path.name}+{offset}"
    if path.parent.is_relative_to("/proc/self/fd"):  # a folder that this process has open
        path = Path(os.readlink(path.parent)) / path.name
    answer = subprocess.run(
        [tool, "-i", "-e", str(path), offset],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    lines = [line.partition(" (discriminator")[0] for line in answer.stdout.splitlines()]
    frames = [posixpath.normpath(line) for line in lines]
    kernel = [frame for frame in frames if not frame.startswith(_NOT_KERNEL)]
    if not kernel:
        return frames[0] if frames else f"{path.name}+{offset}"
    callers = [frame for frame in kernel if ".cuh:" not in frame]
    if ".cuh:" in kernel[0] and callers:
        return f"{kernel[0]}, called from {callers[0]}"
    return kernel[0]
