"""The page of the serving benchmark: an overview, and the statistics of every latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kiln.engine.bench.load_metrics import METRICS
from kiln.engine.bench.report import Report, Row, table

_OVERVIEW = {
    "engine": "{engine}",
    "load": "{load}",
    "requests": "{requests}",
    "failed": "{failed}",
    "requests/s": "{requests_per_s:.2f}",
    "output tokens/s": "{output_tokens_per_s:,.0f}",
    "total tokens/s": "{total_tokens_per_s:,.0f}",
    "goodput, requests/s": "{request_goodput:.2f}",
    "TTFT ms, median": "{median_ttft_ms:,.1f}",
    "TPOT ms, median": "{median_tpot_ms:.2f}",
    "E2EL ms, median": "{median_e2el_ms:,.0f}",
    "threads": "{threads}",
    "Kiln's speed over this": "{ratio:.2f}×",
}
_EMPTY = "–"


def markdown(report: Report) -> str:
    """Return the report's page."""
    load = report.load
    text = (
        f"{load['dataset']}; greedy, exactly that many output tokens; streamed from "
        f"{load['path']}, every request in a connection of its own; seed {load['seed']}. "
        f"Each load has requests of its own, the same for every engine."
    )
    if load.get("goals"):
        goals = ", ".join(f"{name.upper()} ≤ {most:g} ms" for name, most in load["goals"].items())
        text += f" Goodput: requests with {goals}."
    shorts = "; ".join(f"{name.upper()}: {meaning}" for name, meaning in METRICS.items())
    failures = [
        f"- {row['engine']}, {row['load']}: {count} failed: {error}"
        for row in report.rows
        for error, count in row.get("failures", {}).items()
    ]
    overview = [row | {"failed": sum(row.get("failures", {}).values())} for row in report.rows]
    statistics = _statistics(report.rows, load.get("percentiles", ()))
    return report.markdown(
        f"Serving {report.details['model']}",
        text,
        _filled(_OVERVIEW, overview),
        "\n".join(failures),
        statistics and f"Milliseconds. {shorts}.",
        statistics,
    )


def _statistics(rows: Sequence[Row], percentiles: Sequence[float]) -> str:
    names = ["mean", "median", "std", *(f"p{percent:g}" for percent in percentiles)]
    columns = {"engine": "{engine}", "load": "{load}", "": "{metric}"}
    columns |= {name: f"{{{name}:,.2f}}" for name in names}
    lines = []
    for metric in METRICS:
        for row in rows:
            found = {name: row[key] for name in names if (key := f"{name}_{metric}_ms") in row}
            if found:
                about = {"engine": row["engine"], "load": row["load"], "metric": metric.upper()}
                lines.append(about | found)
    return table(columns, lines)


def _filled(columns: Mapping[str, str], rows: Sequence[Row]) -> str:
    """Return the table without the columns of which no row has a value."""
    empty = {
        title
        for title, form in columns.items()
        if all(table({title: form}, [row]).endswith(f"| {_EMPTY} |") for row in rows)
    }
    return table({title: form for title, form in columns.items() if title not in empty}, rows)
