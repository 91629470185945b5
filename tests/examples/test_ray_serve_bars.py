"""Faults under load, and the end with open streams, of examples/ray_serve."""

from __future__ import annotations

import pytest
from ray_trials.cluster import running
from ray_trials.load import load
from ray_trials.trials import CLIENTS, strike, terminate

pytest.importorskip("ray.serve", reason='needs Ray: pip install -e ".[ray]"')
pytestmark = pytest.mark.deep

REQUESTS = 800
PAUSE_SECONDS = 10.0  # four are wanted, on a machine that does nothing else


@pytest.mark.parametrize("fault", ["engine killed", "engine stopped", "server killed"])
def test_only_requests_in_flight_at_a_replica_that_fails_are_lost(ray_serve, fault):
    trial = strike(ray_serve, fault, REQUESTS)
    assert 0 < trial.bad <= CLIENTS
    assert trial.bad_percent <= 1
    assert all("engine_unavailable" in kind for kind in trial.kinds)


def test_another_front_takes_over_from_one_that_is_killed(ray_serve):
    trial = strike(ray_serve, "front killed", REQUESTS)
    assert trial.pause < PAUSE_SECONDS
    assert set(trial.kinds) <= {"RemoteProtocolError", "ReadError", "ConnectError"}


def test_sigterm_lets_open_streams_finish_and_leaves_nothing(ray_serve):
    end = terminate(ray_serve, streams=8, max_tokens=300)
    assert (end.finished, end.exit_code, end.left) == (8, 0, 0)


def test_more_replicas_start_under_load(tmp_path):
    flags = ["--replicas", "1", "--max-replicas", "2", "--max-ongoing-requests", "4"]
    cpu = ["--device", "cpu", "--kv-memory-gib", "0.25"]
    with running(tmp_path / "log", [*flags, *cpu]) as cluster:
        assert len(cluster.alive()) == 1
        with load(cluster.url, clients=8, requests=10**6) as made:
            try:
                cluster.wait_until(lambda: len(cluster.alive()) == 2, 180)
            finally:
                made.stop()
    assert not made.bad
