"""How a process of Kiln logs: lines of text on stderr, or one JSON object a line.

Each process calls ``configure`` once, with the settings that came with its configuration.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType

from kiln.engine.config import LogConfig

_request_id: ContextVar[str | None] = ContextVar("request_id", default=None)


def configure(logs: LogConfig, process: str = "") -> None:
    """Log to stderr from now on, as ``logs`` says; ``process`` is named in each line.

    Of other packages, warnings and errors are logged; at the level "debug", all lines.
    """
    handler = logging.StreamHandler()
    as_json = logs.format == "json"
    name = f"[{process}] " if process else ""
    text = logging.Formatter(f"%(asctime)s %(levelname)s {name}%(name)s: %(message)s")
    handler.setFormatter(JsonLines(process or "server") if as_json else text)
    handler.addFilter(_with_request_id)
    level = getattr(logging, logs.level.upper())
    others = level if level == logging.DEBUG else max(level, logging.WARNING)
    logging.basicConfig(level=others, handlers=[handler], force=True)
    logging.getLogger("kiln").setLevel(level)
    if as_json:  # what Python itself would write as several lines of text
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = _log_uncaught_in_thread


def note_request_id(request_id: str) -> None:
    """Let lines that are logged from now on in this task have the field ``request_id``."""
    _request_id.set(request_id)


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object, with the entries of its ``fields`` beside the others.

    ``fields`` is an attribute of the record, given as ``extra={"fields": {…}}``.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the object, with the traceback of an exception as a field."""
        time = datetime.fromtimestamp(record.created, UTC)
        line = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request_id := getattr(record, "request_id", None)) is not None:
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return json.dumps(line, default=str)


def _with_request_id(record: logging.LogRecord) -> bool:
    """Give a record the id of the request in whose task it was logged; keep every record."""
    record.request_id = _request_id.get()
    return True


def _log_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    _logger().critical("an unexpected error ends this process", exc_info=(kind, error, trace))


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
        _logger().error("a thread stopped on an unexpected error", exc_info=args.exc_value)


def _logger() -> logging.Logger:
    return logging.getLogger(__name__)
