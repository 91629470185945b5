"""The process of a rank that is not rank 0: it loads its part, and runs the steps it is told.

``main`` runs in a process that rank 0 starts, ``follow_launched`` in one that torchrun started. It
needs no package that the server needs.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kiln.engine.config import EngineConfig
from kiln.engine.config_forms import read_config_text
from kiln.engine.distributed.calls import Calls
from kiln.engine.distributed.channel import Kind
from kiln.engine.distributed.inbox import Inbox
from kiln.engine.distributed.launched import Launched
from kiln.engine.distributed.logs import configure
from kiln.engine.errors import ConfigError

if TYPE_CHECKING:
    from kiln.engine.distributed.group import Group


def main(arguments: list[str]) -> int:
    """Follow rank 0 on this machine; ``arguments``: the rank, and where rank 0 listens."""
    _ignore_signals()
    rank = int(arguments[0])
    inbox = Inbox(arguments[1], rank)
    return inbox.run(lambda told: follow(inbox, *_spawned(told, rank)))


def follow_launched(place: Launched, config: EngineConfig) -> int:
    """Follow rank 0, which torchrun has started, with its settings and this rank's model folder.

    Returns the exit code. Raises ConfigError if rank 0 cannot be reached.
    """
    from kiln.engine.distributed.followers import ADDRESS_KEY

    try:
        store = place.store()
        host, _, port = store.get(ADDRESS_KEY).decode().rpartition(":")
        inbox = Inbox((host, int(port)), place.rank)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"rank {place.rank} cannot reach rank 0 by {place.host}:{place.port}: {error}; does "
            "rank 0 run the same command?"
        ) from error
    _ignore_signals()  # rank 0 drains, and then ends this one
    return inbox.run(lambda told: follow(inbox, *_launched(told, place, store, config)))


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _spawned(told: dict[str, Any], rank: int) -> tuple[EngineConfig, Group]:
    import torch

    from kiln.engine.runner.load import connect_spawned

    torch.set_num_threads(told["threads"])
    config = read_config_text(told["config"])
    configure(config.logs, f"rank {rank}")
    return config, connect_spawned(told, rank, config.model.device)


def _launched(
    told: dict[str, Any], place: Launched, store: Any, own: EngineConfig
) -> tuple[EngineConfig, Group]:
    from kiln.engine.distributed.connect import connect
    from kiln.engine.runner.device import resolve_rank_device
    from kiln.engine.runner.load import share_threads

    config = read_config_text(told["config"])
    config = replace(
        config,
        model=replace(config.model, model=own.model.model, tokenizer=own.model.tokenizer),
    )
    device = resolve_rank_device(config.model.device, place.local_rank, place.local_world)
    share_threads(device, place.local_world)
    return config, connect(store, place.rank, place.world, device, place.own_address())


def follow(inbox: Inbox, config: EngineConfig, group: Group) -> Group:
    """Load this rank's part of the model, do what rank 0 says until it says stop, and return."""
    from kiln.engine.runner.followed_store import FollowedStore
    from kiln.engine.runner.load import prepared
    from kiln.engine.runner.model_runner import ModelRunner
    from kiln.engine.runner.offload import FollowedHost
    from kiln.engine.runner.step_frame import decode
    from kiln.jit_kernels.compile.ready import ready_guard

    runner = ModelRunner(config, None, group)
    prepared(runner, None)
    inbox.use_check(group.check)
    group.minimum([0])
    ready_guard().declare_ready()
    store, executor = runner.rank_store, runner.executor
    of_adapters = () if store is None else FollowedStore(store, inbox.reply).calls()
    host = runner.host_memory
    of_blocks = () if host is None else FollowedHost(host).calls()
    calls = Calls(executor.follow_sampling, *of_adapters, *of_blocks)
    while True:
        kind, content = inbox.next()
        if kind is Kind.STEP:
            executor.follow(decode(content))
        elif kind is Kind.CALL:
            calls.run(content)
        else:
            assert kind is Kind.STOP, kind
            return group
