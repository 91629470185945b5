"""The one place that makes a runner: in this process alone, or as rank 0 of several."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kiln.engine.config import EngineConfig
from kiln.engine.config_forms import config_text
from kiln.engine.distributed.connect import LOOPBACK, connect, connect_while, file_store
from kiln.engine.distributed.followers import Followers, OnLost
from kiln.engine.distributed.group import Group
from kiln.engine.distributed.launched import launched
from kiln.engine.errors import ConfigError
from kiln.engine.models.loader import Progress
from kiln.engine.runner.device import resolve_rank_device
from kiln.engine.runner.lead import LeadRunner
from kiln.engine.runner.model_runner import ModelRunner

FOLLOWER = "kiln.engine.runner.follow"


def load_runner(
    config: EngineConfig, progress: Progress | None = None, on_lost: OnLost | None = None
) -> ModelRunner:
    """Load the model of a config, run a trial step, and capture its CUDA graphs.

    With tensor parallelism the same happens on the other ranks, which are started here, or were by
    torchrun. ``on_lost`` is called, in another thread, when one of them is gone. Raises what
    ModelRunner raises, also for another rank, whose number the message then names.
    """
    size = config.parallel.tensor_parallel_size
    if size == 1:
        return prepared(ModelRunner(config, progress), progress)
    if config.parallel.launcher == "torchrun":
        return _lead_launched(config, progress, on_lost)
    device = resolve_rank_device(config.model.device, 0, size)
    followers = Followers.spawn(size, FOLLOWER, on_lost)
    content = {"config": config_text(config), **meeting(followers, device)}
    meet = partial(connect_spawned, content, 0, config.model.device)
    return _lead(config, followers, content, meet, progress)


def prepared(runner: ModelRunner, progress: Progress | None) -> ModelRunner:
    """Run a trial step and capture the CUDA graphs: on every rank, before any request."""
    runner.try_out(progress)
    runner.capture_graphs(progress)
    return runner


def meeting(followers: Followers, device: torch.device) -> dict[str, Any]:
    """Return what ranks of this machine need to know to meet: the content for connect_spawned."""
    threads = share_threads(device, followers.size)
    return {"folder": str(followers.folder), "size": followers.size, "threads": threads}


def connect_spawned(told: dict[str, Any], rank: int, device: str) -> Group:
    """Connect ranks of this machine. ``told``: of their meeting; ``device``: as in the config."""
    store = file_store(Path(told["folder"]), told["size"])
    own = resolve_rank_device(device, rank, told["size"])
    return connect(store, rank, told["size"], own, LOOPBACK)


def share_threads(device: torch.device, size: int) -> int:
    """Let ``size`` processes of this machine share its cores; return torch's threads in each."""
    threads = min(torch.get_num_threads(), len(os.sched_getaffinity(0)))
    if device.type == "cpu":
        threads = max(1, threads // size)
        torch.set_num_threads(threads)
    return threads


def _lead_launched(
    config: EngineConfig, progress: Progress | None, on_lost: OnLost | None
) -> ModelRunner:
    place = launched()
    if place is None or place.rank > 0:
        raise ConfigError("launcher='torchrun': this process is not rank 0 of torchrun's")
    device = resolve_rank_device(config.model.device, place.local_rank, place.local_world)
    share_threads(device, place.local_world)
    store = place.store()
    followers = Followers.await_launched(place, store, on_lost)
    meet = partial(connect, store, 0, place.world, device, place.own_address())
    return _lead(config, followers, {"config": config_text(config)}, meet, progress)


def _lead(
    config: EngineConfig,
    followers: Followers,
    content: dict[str, Any],
    meet: Any,
    progress: Progress | None,
) -> ModelRunner:
    """Start the followers' work, and do the same here."""
    group = None
    try:
        followers.start(content)
        if progress is not None:
            progress("connecting ranks", 0, 1)
        group = connect_while(followers.check, meet)
        if progress is not None:
            progress("connecting ranks", 1, 1)
        followers.use_abort(group.abort)
        runner = LeadRunner(config, followers, group, progress)
        prepared(runner, progress)
        group.minimum([0])  # every rank has come so far
        followers.check()
        runner.lead()
    except BaseException as error:
        reason = followers.blame(error) if isinstance(error, Exception) else error
        followers.stop()
        if group is not None:
            group.abort()  # the others may be anywhere
            group.close()
        followers.close()
        raise reason from error
    return runner
