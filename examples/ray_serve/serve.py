"""Serve replicas of Kiln behind Ray Serve: ``python examples/ray_serve/serve.py MODEL``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence

from kiln.engine.cli.commands import serve as kiln_serve
from kiln.engine.cli.hosts import read_hosts
from kiln.engine.cli.listen import is_loopback, open_listener
from kiln.engine.cli.options import lora_modules, served_names
from kiln.engine.errors import ConfigError

_PASSED = "all other flags are those of `kiln serve`, and go to each replica"


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str], argparse.Namespace]:
    """Return our settings, the arguments for each ``kiln serve``, and what these say."""
    parser = argparse.ArgumentParser(
        prog="serve.py", description=__doc__, epilog=_PASSED, allow_abbrev=False
    )
    add = parser.add_argument
    add("--replicas", type=int, default=2, metavar="N", help="default 2")
    add(
        "--max-replicas",
        type=int,
        metavar="N",
        help="start up to N replicas while they have over half of --max-ongoing-requests on "
        "average, and stop them later; default: no more than --replicas",
    )
    add(
        "--tp", "--tensor-parallel-size", type=int, default=1, metavar="N", help="GPUs of a replica"
    )
    add("--cpus", type=float, default=1, metavar="N", help="CPU cores of a replica; default 1")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--address", metavar="HOST:PORT", help="a Ray cluster, or auto; default: start one here")
    add("--max-ongoing-requests", type=int, default=256, metavar="N", help="of a replica")
    add(
        "--spill-above",
        type=int,
        default=8,
        metavar="N",
        help="requests that a replica may have more than the one with the fewest before requests "
        "that would go to it for its adapter or prompt go elsewhere; default 8",
    )
    own, passed = parser.parse_known_args(argv)
    own.max_replicas = own.replicas if own.max_replicas is None else own.max_replicas
    if own.tp > 1:
        passed += ["--tp", str(own.tp)]
    kiln = argparse.ArgumentParser(prog="kiln serve", allow_abbrev=False)
    kiln_serve.add_arguments(kiln)
    return own, passed, kiln.parse_args(passed)


def check(own: argparse.Namespace, kiln: argparse.Namespace) -> None:
    """Check the settings. Raises ConfigError for those that cannot work here."""
    for name in ("replicas", "tp", "max_ongoing_requests"):
        if getattr(own, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(own, name)}: must be 1 or more")
    if own.max_replicas < own.replicas:
        raise ConfigError(f"--max-replicas {own.max_replicas}: --replicas has more")
    if own.spill_above < 0:
        raise ConfigError(f"--spill-above {own.spill_above}: must be 0 or more requests")
    if kiln.lora_root is not None:
        raise ConfigError(
            f"--lora-root {kiln.lora_root}: a replica that starts later would not have the "
            "adapters that clients load; name all of them with --lora-modules"
        )
    if kiln.ssl_certfile is not None:
        raise ConfigError(
            f"--ssl-certfile {kiln.ssl_certfile}: the front does not serve HTTPS; put a proxy in "
            "front of it"
        )
    is_open = kiln.api_key is None and kiln.api_key_file is None
    if is_open and not is_loopback(own.host) and not kiln.allow_unauthenticated:
        raise ConfigError(
            f"--host {own.host} is reachable from other machines: set --api-key-file, or allow "
            "everybody with --allow-unauthenticated"
        )
    if own.port == 0:
        raise ConfigError("--port 0: name a port, which several processes take in turn")
    if own.address is None:
        open_listener(own.host, own.port).close()  # of a port in use, the fronts wait for the end


def main(argv: Sequence[str]) -> int:
    """Serve until SIGINT or SIGTERM; then requests in flight may finish."""
    try:
        own, passed, kiln = parse(argv)
        check(own, kiln)
        has_key = kiln.api_key is not None or kiln.api_key_file is not None
        own.hosts = read_hosts(kiln.allowed_hosts, own.host, has_key=has_key)
        most_adapters = kiln.max_loras or max(1, len(lora_modules(kiln)))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # both are read when ray is imported
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # else the URL of only one replica is shown
    from kiln_cluster import connect, deploy, disconnect

    own.gpus = 0 if kiln.device == "cpu" else own.tp
    start = None
    try:
        connect(own)
        # After ray.init, which sets a handler of its own. KeyboardInterrupt for both signals.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        start = deploy(own, passed, served_names(kiln), most_adapters, kiln.shutdown_timeout)
        print(f"\nall replicas serve on http://{own.host}:{own.port}", flush=True)
        while True:
            time.sleep(3600)
    except (KeyboardInterrupt, SystemExit):  # the latter is Ray's, for SIGTERM while it starts
        return 0
    except (ConnectionError, RuntimeError) as error:
        print(f"error: {error}\nThe lines above say why", file=sys.stderr)
        return 1
    finally:
        disconnect(own, start, kiln.shutdown_timeout)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
