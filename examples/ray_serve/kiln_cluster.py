"""Start Ray and the deployments, and stop them."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import ray
from kiln_front import Front
from kiln_leftovers import Descendants
from kiln_replica import with_adapters
from kiln_router import AffinityRouter
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException

APPLICATION = "kiln"
_HERE = Path(__file__).resolve().parent
_OBJECT_STORE_BYTES = 128 << 20  # requests and answers are small, and do not go through it
_HEALTH_SECONDS = 2.0  # between two checks; Ray replaces a replica after three that fail
_FRONTS = 2  # one works, the other one waits for its port
_ON_THE_HEAD = {"node:__internal_head__": 0.001}  # the resource of the first machine
_STOP_SECONDS = 10.0  # after the requests have ended
_ANSWER_SECONDS = 10.0  # of a front that is asked which command deployed it
_POLL_SECONDS = 0.1
_LOGS = {"log_level": "WARNING", "enable_access_log": False}


def connect(settings: argparse.Namespace) -> None:
    """Connect to the cluster of ``--address``, or start one on this machine."""
    # These files go to every machine; Kiln itself must be installed there.
    environment = {"working_dir": str(_HERE), "excludes": ["__pycache__"]}
    if settings.address is not None:
        ray.init(settings.address, runtime_env=environment)
    else:
        cores = settings.max_replicas * settings.cpus
        ray.init(
            "local",
            num_cpus=max(os.cpu_count() or 1, -int(-cores // 1)),
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            runtime_env=environment,
        )
    serve.start(proxy_location="Disabled", logging_config=_LOGS)  # the fronts listen by themselves


def deploy(
    settings: argparse.Namespace,
    arguments: list[str],
    served_names: tuple[str, ...],
    max_adapters: int,
    drain_seconds: float,
) -> str:
    """Start the replicas and the fronts; return when all are ready, with an id of this start.

    An application that is there already is replaced without a pause. Raises RuntimeError.
    """
    start = uuid.uuid4().hex
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    replica = serve.deployment(
        with_adapters(max_adapters),
        name="replica",
        **_how_many(settings),
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus if has_gpus else 0},
        max_ongoing_requests=settings.max_ongoing_requests,
        max_queued_requests=settings.max_replicas * settings.max_ongoing_requests,
        health_check_period_s=_HEALTH_SECONDS,
        health_check_timeout_s=15.0,
        graceful_shutdown_timeout_s=drain_seconds + _STOP_SECONDS,
        graceful_shutdown_wait_loop_s=0.5,
        request_router_config=RequestRouterConfig(
            request_router_class=AffinityRouter,
            request_router_kwargs={"spill_above": settings.spill_above},
        ),
        logging_config=_LOGS,
    )
    front = serve.deployment(
        Front,
        name="front",
        user_config={"start": start},  # a change of it replaces no front
        num_replicas=_FRONTS,
        ray_actor_options={"num_cpus": 0, "resources": _ON_THE_HEAD},
        health_check_period_s=1.0,
        graceful_shutdown_timeout_s=drain_seconds,
        graceful_shutdown_wait_loop_s=0.5,
        logging_config=_LOGS,
    )
    replicas = replica.bind(arguments, os.getcwd())
    fronts = front.bind(replicas, served_names, settings.hosts, settings.host, settings.port)
    serve.run(fronts, name=APPLICATION, route_prefix=None)
    return start


def disconnect(settings: argparse.Namespace, start: str | None, drain_seconds: float) -> None:
    """Let the requests end, then stop what ``deploy`` started, and Ray if ``connect`` started it.

    ``start``: what ``deploy`` returned. What another command has deployed stays. A second signal
    (KeyboardInterrupt) ends the requests.
    """
    if not ray.is_initialized():
        return
    here = settings.address is None
    started = Descendants() if here else None
    try:
        if here or _start_that_serves() in (None, start):
            _drain(drain_seconds)
            serve.delete(APPLICATION, _blocking=False)
            _wait_until_gone(_STOP_SECONDS)
        else:
            print("another command serves; what it started stays", file=sys.stderr)
    except KeyboardInterrupt:
        print("a second signal: requests in flight are lost", file=sys.stderr)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if started is None:
        ray.shutdown()
    else:
        started.update()
        serve.shutdown()
        ray.shutdown()
        started.end()


def _how_many(settings: argparse.Namespace) -> dict[str, Any]:
    """Return the number of replicas, fixed or by their load, as Ray takes it."""
    if settings.max_replicas == settings.replicas:
        return {"num_replicas": settings.replicas}
    limits = {"min_replicas": settings.replicas, "max_replicas": settings.max_replicas}
    target = max(1, settings.max_ongoing_requests // 2)
    return {"autoscaling_config": {**limits, "target_ongoing_requests": target}}


def _start_that_serves() -> str | None:
    """Return the id of the start whose fronts serve; None if no front answers.

    Ray keeps the time of an application's first start, whichever command has replaced it since.
    """
    try:
        front = serve.get_app_handle(APPLICATION)
        found: str = front.start.remote().result(timeout_s=_ANSWER_SECONDS)
    except (TimeoutError, RayError, RayServeException):
        return None
    return found


def _drain(seconds: float) -> None:
    """Let the requests in flight end, for at most some seconds."""
    try:
        calls = serve.get_app_handle(APPLICATION).broadcast("drain")
        calls.results(timeout_s=seconds, return_exceptions=True)
    except (TimeoutError, RayServeException) as error:  # the latter: it never ran
        print(f"not all requests in flight have ended: {error}", file=sys.stderr)


def _wait_until_gone(seconds: float) -> None:
    """Return when the replicas and the fronts have stopped, or after some seconds."""
    end = time.monotonic() + seconds
    while APPLICATION in serve.status().applications and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
