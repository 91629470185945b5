"""What a front counts, for /metrics: how requests were routed, and attempts that failed."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, generate_latest

REGISTRY = CollectorRegistry()
ROUTED = Counter(
    "kiln:router_requests",
    "Requests by whether their replica had the adapter or had seen the longest beginning of the "
    "prompt (hit), another one had but was too busy (spill), or none had (miss).",
    ["affinity"],
    registry=REGISTRY,
)
FAILED = Counter(
    "kiln:router_failed_attempts",
    "Attempts at a replica that failed. Lost ones may have reached an engine, and were not made "
    "again; the others reached none, and were made elsewhere.",
    ["reason"],
    registry=REGISTRY,
)
for affinity in ("hit", "spill", "miss"):
    ROUTED.labels(affinity)
for reason in ("refused", "draining", "loading", "restarting", "lost"):
    FAILED.labels(reason)


def page() -> str:
    """Return the counters in Prometheus's text format, without the times of their creation."""
    lines = generate_latest(REGISTRY).decode().splitlines(keepends=True)
    return "".join(line for line in lines if "_created" not in line)
