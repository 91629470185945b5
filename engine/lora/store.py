"""The loaded adapters of an engine: all in host memory, some in the adapter pool."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from kiln.engine.config import LoRAConfig
from kiln.engine.errors import AdapterError, AdapterPathError, ConfigError
from kiln.engine.lora.adapter import WEIGHTS_FILE, read_adapter
from kiln.engine.lora.adapter_config import CONFIG_FILE
from kiln.engine.lora.copying import Copier
from kiln.engine.lora.loaded_adapter import Copied
from kiln.engine.lora.packing import ALIGNMENT, PackedAdapter, pack
from kiln.engine.lora.pool import AdapterPool
from kiln.engine.lora.sites import Sites
from kiln.engine.models.loader import Progress
from kiln.engine.requests.adapter_job import AdapterInfo

logger = logging.getLogger(__name__)

_GIB = 2**30
_LEAST_BYTES = _GIB  # of the pool, if adapters can be loaded while serving


class RankStore:
    """The AdapterStore of one rank: it copies adapters to the rank's pool.

    One thread calls it, except for ``read``. ``sites``: those of the rank's model.
    Raises AdapterError for an adapter of the config, ConfigError for another setting.
    """

    def __init__(
        self,
        config: LoRAConfig,
        sites: Sites,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress,
    ) -> None:
        self._config = config
        self._sites = sites
        self._dtype = dtype
        self._root = None if config.root is None else _folder(config.root)
        self._host: dict[str, PackedAdapter] = {}
        self.sizes: dict[str, int] = {}  # the elements of each, in the order of their loading
        for done, module in enumerate(config.modules):
            progress("adapters", done, len(config.modules))
            self.add(self._read(module.name, Path(module.path).expanduser()))
        self.num_slots = config.num_slots
        self.size = self._pool_size()
        self.pool = AdapterPool(sites.all, self.num_slots, self.size, dtype, device)
        self._copier = Copier(self.pool)
        progress("adapters", len(config.modules), len(config.modules))

    def read(self, name: str, path: str) -> PackedAdapter:
        """Read and check the adapter of a folder inside ``root``; any thread may call it.

        Raises AdapterPathError, or AdapterError.
        """
        return self._read(name, self._inside_root(name, path))

    def add(self, packed: PackedAdapter) -> None:
        """Keep an adapter in host memory. Raises AdapterError."""
        used = sum(one.values.nbytes for one in (*self._host.values(), packed))
        if used > self._config.host_memory_gib * _GIB:
            raise AdapterError(
                f"LoRA adapter {packed.name!r}: takes {packed.values.nbytes} bytes, {used} with "
                f"those that are loaded, above lora_host_memory_gib="
                f"{self._config.host_memory_gib:g}: unload one, or raise it"
            )
        self._host[packed.name] = packed
        self.sizes[packed.name] = packed.values.numel()

    def forget(self, name: str) -> None:
        """Free the host memory of an adapter that is not in the pool."""
        del self._host[name], self.sizes[name]

    def info(self, name: str, path: str, *, pinned: bool) -> AdapterInfo:
        """Describe an adapter."""
        packed = self._host[name]
        return AdapterInfo(name, path, pinned, packed.max_rank, packed.values.nbytes)

    def begin(self, name: str, slot: int, start: int) -> None:
        """Begin to copy an adapter to the elements of the pool from ``start`` on."""
        self._copier.begin(self._host[name], slot, start)

    def copied(self, *, wait: bool = False) -> Sequence[Copied]:
        """Publish the adapters whose copies have ended, between steps, and return them."""
        return [
            Copied(name, None if error is None else _failed_copy(name, error))
            for name, error in self._copier.ended(wait=wait)
        ]

    def copy_now(self, name: str, slot: int, start: int) -> None:
        """Copy an adapter and wait for it, while no other copy runs. Raises AdapterError."""
        self.begin(name, slot, start)
        for _, error in self.copied(wait=True):
            if error is not None:
                raise error

    def clear(self, slot: int) -> None:
        """Empty a slot; a copy to it that ``copied`` has not returned is forgotten."""
        self._copier.forget(slot)
        self.pool.clear(slot)

    def _read(self, name: str, folder: Path) -> PackedAdapter:
        most = self._config.max_lora_rank
        adapter = read_adapter(name, folder, self._sites, self._dtype, max_rank=most)
        return pack(adapter, self._sites.all, self._dtype)

    def _inside_root(self, name: str, path: str) -> Path:
        """Return a folder with all links followed. Raises AdapterPathError."""
        assert self._root is not None, "loading while serving needs a root"
        try:
            folder = (self._root / path).resolve()
            files = [folder, *((folder / file).resolve() for file in (CONFIG_FILE, WEIGHTS_FILE))]
        except (OSError, RuntimeError, ValueError) as error:  # too long; a loop of links; a NUL
            raise AdapterError(f"LoRA adapter {name!r}: lora_path: {error}") from error
        for file in files:
            if not file.is_relative_to(self._root):
                raise AdapterPathError(
                    f"LoRA adapter {name!r}: lora_path={path[:200]!r}: is or leads outside of "
                    "lora_root: give a folder inside it"
                )
        return folder

    def _pool_size(self) -> int:
        """Return the elements of the pool; see LoRAConfig."""
        sizes = sorted(self.sizes.values(), reverse=True)
        itemsize, given = self._dtype.itemsize, self._config.memory_gib
        if given is None:
            least = _LEAST_BYTES // itemsize if self._root is not None else 0
            return max(sum(sizes[: self.num_slots]), least)
        size = int(given * _GIB) // ALIGNMENT * ALIGNMENT // itemsize
        if sizes and sizes[0] > size:
            largest = max(self.sizes, key=self.sizes.__getitem__)
            raise ConfigError(
                f"lora_memory_gib={given:g}: LoRA adapter {largest!r} takes "
                f"{sizes[0] * itemsize / _GIB:.3g} GiB: raise it"
            )
        return size


def _failed_copy(name: str, error: BaseException) -> AdapterError:
    logger.error("copying LoRA adapter %r failed", name, exc_info=error)
    why = (str(error) or repr(error)).partition("\n")[0]
    return AdapterError(f"LoRA adapter {name!r}: copying it to the device failed: {why[:200]}")


def _folder(root: str) -> Path:
    path = Path(root).expanduser()
    if not path.is_dir():
        raise ConfigError(f"lora_root={root!r}: is not a folder")
    return path.resolve()
