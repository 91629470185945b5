"""Start Ray and the deployments, and stop them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import ray
from kiln_front import Front
from kiln_replica import with_adapters
from kiln_router import AffinityRouter
from ray import serve
from ray.serve.config import HTTPOptions, RequestRouterConfig

APPLICATION = "kiln"
_HERE = Path(__file__).resolve().parent
_OBJECT_STORE_BYTES = 128 << 20  # requests and answers are small, and do not go through it
_HEALTH_SECONDS = 2.0  # between two checks; Ray replaces a replica after three that fail
_STOP_SECONDS = 10.0  # after the requests have ended
_LOGS = {"log_level": "WARNING", "enable_access_log": False}


def connect(settings: argparse.Namespace) -> None:
    """Connect to the cluster of ``--address``, or start one on this machine."""
    # These files go to every machine; Kiln itself must be installed there.
    environment = {"working_dir": str(_HERE), "excludes": ["__pycache__"]}
    if settings.address is not None:
        ray.init(settings.address, runtime_env=environment)
    else:
        cores = settings.replicas * settings.cpus
        ray.init(
            "local",
            num_cpus=max(os.cpu_count() or 1, -int(-cores // 1)),
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            runtime_env=environment,
        )
    serve.start(
        http_options=HTTPOptions(host=settings.host, port=settings.port), logging_config=_LOGS
    )


def deploy(
    settings: argparse.Namespace,
    arguments: list[str],
    served_names: tuple[str, ...],
    max_adapters: int,
    drain_seconds: float,
) -> None:
    """Start the replicas and the front; return when all are ready. Raises RuntimeError."""
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    replica = serve.deployment(
        with_adapters(max_adapters),
        name="replica",
        num_replicas=settings.replicas,
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus if has_gpus else 0},
        max_ongoing_requests=settings.max_ongoing_requests,
        max_queued_requests=settings.replicas * settings.max_ongoing_requests,
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
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=100_000,  # the replicas' limits are the ones that count
        graceful_shutdown_timeout_s=drain_seconds,
        graceful_shutdown_wait_loop_s=0.5,
        logging_config=_LOGS,
    )
    replicas = replica.bind(arguments, os.getcwd())
    serve.run(front.bind(replicas, served_names), name=APPLICATION, route_prefix="/")


def disconnect(settings: argparse.Namespace) -> None:
    """Stop what ``deploy`` started, and Ray if ``connect`` started it."""
    if not ray.is_initialized():
        return
    if settings.address is None:
        serve.shutdown()
    else:
        serve.delete(APPLICATION)
    ray.shutdown()
