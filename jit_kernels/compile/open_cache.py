"""Open the kernel cache that the environment configures, once per process."""

from __future__ import annotations

from functools import cache

from kiln.cache.disk.bundle import Bundle, BundleError
from kiln.cache.disk.lock import lock_folder
from kiln.cache.disk.root import open_store, trust_of
from kiln.cache.env import Env
from kiln.jit_kernels.compile.kernel_cache import KernelCache
from kiln.jit_kernels.declare.errors import BundleRefused
from kiln.jit_kernels.declare.settings import settings


@cache
def kernel_cache() -> KernelCache:
    """Return the kernel cache of this process. Raises BundleRefused."""
    return open_cache(settings())


def open_cache(env: Env) -> KernelCache:
    """Return the kernel cache that ``env`` configures. Raises BundleRefused."""
    bundle = None
    if env.kernel_bundle is not None:
        try:
            bundle = Bundle.open(env.kernel_bundle, env.kernel_bundle_sha256, trust_of(env))
        except BundleError as error:
            raise BundleRefused(f"KILN_KERNEL_BUNDLE: {error}") from None
    elif env.kernel_bundle_sha256 is not None:
        raise BundleRefused("KILN_KERNEL_BUNDLE_SHA256 is set, but KILN_KERNEL_BUNDLE is not")
    locks = lock_folder(env) if env.kernel_cache == "rw" else None
    return KernelCache(open_store(env), bundle=bundle, locks=locks)
