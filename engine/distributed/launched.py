"""What torchrun tells each process that it starts."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from kiln.cache.env import torchrun_variables
from kiln.engine.errors import ConfigError

_STORE_SECONDS = 600.0  # for the processes of other machines to start


@dataclass(frozen=True, slots=True)
class Launched:
    """The place of this process among those of ``torchrun``."""

    rank: int
    local_rank: int
    world: int
    local_world: int
    host: str  # MASTER_ADDR
    port: int  # MASTER_PORT
    attempt: str  # tells restarts apart
    has_store: bool  # torchrun itself serves the store

    def store(self) -> Any:
        """Connect to torchrun's key-value store, which all ranks reach."""
        import torch.distributed

        dist: Any = torch.distributed  # torch types only part of it

        serves = self.rank == 0 and not self.has_store
        store = dist.TCPStore(
            self.host,
            self.port,
            world_size=None,
            is_master=serves,
            timeout=timedelta(seconds=_STORE_SECONDS),
        )
        return dist.PrefixStore(f"kiln/{self.attempt}", store)

    def own_address(self) -> str:
        """Return the address of this machine on the network of MASTER_ADDR."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self.host, self.port))  # sends nothing
            return str(probe.getsockname()[0])


def launched(variables: Mapping[str, str] | None = None) -> Launched | None:
    """Return the place of this process; None if torchrun did not start it.

    ``variables`` replace the environment's in tests. Raises ConfigError.
    """
    given = torchrun_variables() if variables is None else variables
    if not given:
        return None
    try:
        return Launched(
            rank=int(given["RANK"]),
            local_rank=int(given["LOCAL_RANK"]),
            world=int(given["WORLD_SIZE"]),
            local_world=int(given["LOCAL_WORLD_SIZE"]),
            host=given["MASTER_ADDR"],
            port=int(given["MASTER_PORT"]),
            attempt=f"{given['TORCHELASTIC_RUN_ID']}/{given.get('TORCHELASTIC_RESTART_COUNT', 0)}",
            has_store=given.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"torchrun's variables are incomplete ({error}): start every rank by torchrun"
        ) from error
