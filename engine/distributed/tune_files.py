"""Measurements on disk: JSON files in the folder of the kernel cache, which engines to come read.

Each says on what it was measured. It is used only where all of that is the same.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from kiln.cache.disk.publish import publish
from kiln.cache.disk.root import cache_root, trust_of
from kiln.cache.disk.trust import Untrusted, make_folder, open_trusted, read_all
from kiln.cache.keys import content_key
from kiln.engine.errors import ConfigError
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import KernelSpec
from kiln.jit_kernels.toolchains.template import render

T = TypeVar("T")
Key = Mapping[str, Any]

logger = logging.getLogger(__name__)


def source_hash(specs: Iterable[KernelSpec]) -> str:
    """Return a hash of the sources of some kernels."""
    texts = []
    for spec in specs:
        unit = render(spec, next(iter(spec.variants())))
        texts += [(spec.name, unit.text), *unit.headers.items()]
    return content_key((name, text.encode()) for name, text in texts)[:16]


def path_of(folder: str, key: Key) -> Path | None:
    """Return where the measurements of a key are kept; None without a folder for the cache."""
    root = cache_root(settings())
    if root is None:
        return None
    name = content_key((label, str(value).encode()) for label, value in key.items())
    return root / folder / f"{name[:32]}.json"


def write(path: Path | None, what: str, key: Key, found: Mapping[str, Any]) -> Path:
    """Write what was found on the hardware and software of a key; return the file.

    ``what`` names the file in messages. Raises ConfigError.
    """
    if path is None:
        raise ConfigError(f"there is no folder for {what}: set KILN_KERNEL_CACHE_DIR or HOME")
    try:
        make_folder(path.parents[1], trust_of(settings()))
        make_folder(path.parent, trust_of(settings()))
        publish(path, json.dumps({"key": dict(key), **found}, indent=1).encode(), replace=True)
    except (OSError, Untrusted) as error:
        raise ConfigError(f"{what} cannot be written: {error}") from error
    return path


def read(path: Path | None, what: str, key: Key, parse: Callable[[Any], T]) -> T | None:
    """Return what ``parse`` makes of a file, None if there is none of this key.

    One of another key, and one from which ``parse`` raises ValueError, KeyError or TypeError, is
    not used, and a warning says why.
    """
    descriptor = None if path is None else open_trusted(path, trust_of(settings()))
    if descriptor is None:
        return None
    try:
        table = json.loads(read_all(descriptor, os.fstat(descriptor).st_size))
        if table["key"] != dict(key):
            raise ValueError(f"it was measured on {table['key']}, and this is {dict(key)}")
        return parse(table)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s %s is not used: %s", what, path, error)
        return None
    finally:
        os.close(descriptor)
