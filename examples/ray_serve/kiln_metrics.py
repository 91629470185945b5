"""Join the /metrics pages of several servers into one."""

from __future__ import annotations

from collections.abc import Mapping


def join_metrics(pages: Mapping[str, str]) -> str:
    """Return pages in Prometheus's text format as one, each sample labelled with its replica.

    Prometheus wants all samples of a metric together, after one HELP and one TYPE line.
    """
    metrics: dict[str, list[str]] = {}
    for replica, page in pages.items():
        name, is_new = "", False
        for line in page.splitlines():
            if line.startswith("#"):
                _, kind, name, *_ = line.split(" ", 3)
                is_new = name not in metrics if kind == "HELP" else is_new
                if is_new:
                    metrics.setdefault(name, []).append(line)
            elif line:
                metrics.setdefault(name, []).append(_labelled(line, replica))
    return "".join(f"{line}\n" for lines in metrics.values() for line in lines)


def _labelled(sample: str, replica: str) -> str:
    """Return a sample with one more label. A metric's name ends at its labels or its value."""
    label = f'replica="{replica}"'
    end = min(at for at in (sample.find("{"), sample.find(" ")) if at >= 0)
    name, rest = sample[:end], sample[end:]
    return f"{name}{{{label},{rest[1:]}" if rest.startswith("{") else f"{name}{{{label}}}{rest}"
