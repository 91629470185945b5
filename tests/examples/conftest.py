"""Run examples/ray_serve/serve.py for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ray_trials.cluster import DEMO, FLAGS, Cluster, running

_ADAPTERS = [f"{name}={DEMO}/adapters/{name}" for name in ("sentence", "chatty")]
_ROUTING = ["--spill-above", "2", "--max-ongoing-requests", "16", "--lora-modules", *_ADAPTERS]


@pytest.fixture(scope="module")
def ray_serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Run the command with two replicas; at the end nothing of it is left."""
    with running(tmp_path_factory.mktemp("ray") / "log", [*FLAGS, *_ROUTING]) as cluster:
        yield cluster
