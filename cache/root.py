"""Where compiled artefacts live."""

from __future__ import annotations

from pathlib import Path

from kiln.cache.env import Env, user_cache_home


def cache_root(env: Env) -> Path | None:
    """Return the root folder of the kernel cache, or None where there is no usable home.

    The folder may not exist yet. With None, callers keep what they build in memory.
    """
    if env.kernel_cache_dir is not None:
        return env.kernel_cache_dir.absolute()
    home = user_cache_home()
    return None if home is None else home / "kiln" / "kernels"
