"""The folder of compiled kernels, and the store that the environment configures."""

from __future__ import annotations

from pathlib import Path

from kiln.cache.disk.store import Store
from kiln.cache.disk.trust import Trust
from kiln.cache.env import Env, user_cache_home


def cache_root(env: Env) -> Path | None:
    """Return the root folder of the kernel cache, or None without a usable home.

    The folder may not exist yet. With None, callers keep compiled kernels in memory.
    """
    if env.kernel_cache_dir is not None:
        return env.kernel_cache_dir.absolute()
    home = user_cache_home()
    return None if home is None else home / "kiln" / "kernels"


def trust_of(env: Env) -> Trust:
    """Return the users to trust: always this user and root."""
    uids = Trust().uids | set(env.kernel_trusted_uids)
    return Trust(uids, env.kernel_cache_shared)


def open_store(env: Env) -> Store:
    """Return the kernel cache that the environment configures."""
    return Store(cache_root(env), mode=env.kernel_cache, trust=trust_of(env))


def open_piece_store(env: Env) -> Store:
    """Return the store of compiled pieces of models: a folder of its own, by the same rules."""
    _, root = cache_roots(env) or (None, None)
    return Store(root, mode=env.kernel_cache, trust=trust_of(env))


def cache_roots(env: Env) -> tuple[Path, ...]:
    """Return the folders of kernels and of pieces, which are pruned alike; none without a home."""
    root = cache_root(env)
    return () if root is None else (root, root / "pieces")
