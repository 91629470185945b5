"""Every process logs lines of text, or one JSON object a line whatever happens."""

from __future__ import annotations

import contextvars
import json
import logging
import subprocess
import sys

import pytest

from kiln.engine.config import EngineConfig, LogConfig, ModelConfig
from kiln.engine.config_forms import config_text
from kiln.engine.distributed.command import module_command
from kiln.engine.distributed.logs import JsonLines, configure, note_request_id
from kiln.engine.runner import follow

ROOT = module_command("kiln")[-1]
PROGRAM = """
import logging, sys, threading, warnings
sys.path.insert(0, {root!r})
from kiln.engine.config import LogConfig
from kiln.engine.distributed.logs import configure, note_request_id

configure(LogConfig(level={level!r}, format={format!r}), {process!r})
kiln, other = logging.getLogger("kiln.engine.core"), logging.getLogger("uvicorn.error")
kiln.debug("d")
kiln.info("i %d", 7)
other.info("hidden")
other.debug("hidden")
note_request_id("r-1")
try:
    1 / 0
except ZeroDivisionError:
    other.exception("two\\nlines")
warnings.warn("careful")
thread = threading.Thread(target=lambda: [][1])
thread.start()
thread.join()
raise SystemError("last words")
"""


def run(level="info", format="json", process="engine"):
    program = PROGRAM.format(root=ROOT, level=level, format=format, process=process)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert not done.stdout
    return done.stderr


def test_as_json_each_line_is_an_object_also_for_tracebacks_and_warnings():
    first, error, warning, thread, last = map(json.loads, run().splitlines())
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "INFO",
        "process": "engine",
        "logger": "kiln.engine.core",
        "message": "i 7",
    }
    assert (error["level"], error["message"]) == ("ERROR", "two\nlines")
    assert error["request_id"] == "r-1"
    assert error["exception"].splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert "careful" in warning["message"]
    assert "IndexError" in thread["exception"]
    assert last["level"] == "CRITICAL"
    assert "last words" in last["exception"]


def test_as_text_a_line_has_time_level_process_and_logger():
    lines = run(format="text").splitlines()
    assert lines[0].endswith(" INFO [engine] kiln.engine.core: i 7")
    assert lines[-1] == "SystemError: last words"
    (own,) = [line for line in run(format="text", process="").splitlines() if "i 7" in line]
    assert own.endswith(" INFO kiln.engine.core: i 7")


@pytest.mark.parametrize(("level", "count"), [("debug", 2), ("info", 1), ("warning", 0)])
def test_the_level_is_that_of_kilns_lines(level, count):
    said = run(level, "text")
    assert said.count("kiln.engine.core") == count
    assert ("hidden" in said) == (level == "debug")


def test_the_level_hides_what_is_below_it(capsys):
    root, kiln = logging.getLogger(), logging.getLogger("kiln")
    before = root.handlers[:], root.level, kiln.level
    try:
        configure(LogConfig(level="error"))
        kiln.warning("hidden")
        kiln.error("shown")
    finally:
        root.handlers, root.level = before[:2]
        kiln.setLevel(before[2])
    said = capsys.readouterr().err
    assert said.endswith(" ERROR kiln: shown\n")
    assert "hidden" not in said


def test_fields_stand_beside_the_message_and_need_not_be_json():
    record = logging.LogRecord("kiln", logging.INFO, "", 0, "hello", (), None)
    record.fields = {"status": 200, "path": sys}
    line = json.loads(JsonLines("server").format(record))
    assert (line["status"], line["message"]) == (200, "hello")
    assert line["path"] == str(sys)


def test_requests_that_are_served_together_keep_their_own_ids(capsys):
    configured = contextvars.copy_context()
    configured.run(note_request_id, "r-1")
    contextvars.copy_context().run(note_request_id, "r-2")
    seen = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.request_id)
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        configure(LogConfig())
        handler.filters = root.handlers[0].filters
        root.handlers = [handler]
        configured.run(root.warning, "one")
        root.warning("none")
    finally:
        root.handlers, root.level = before
        logging.getLogger("kiln").setLevel(logging.NOTSET)
    assert seen == ["r-1", None]


def test_a_rank_logs_as_the_engine_does_under_a_name_of_its_own(monkeypatch):
    seen = []
    monkeypatch.setattr(follow, "configure", lambda logs, process: seen.append((logs, process)))
    monkeypatch.setattr("kiln.engine.runner.load.connect_spawned", lambda *given: None)
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    logs = LogConfig(level="error", format="json")
    config = EngineConfig(ModelConfig("m"), logs=logs)
    assert follow._spawned({"threads": 1, "config": config_text(config)}, 1) == (config, None)
    assert seen == [(logs, "rank 1")]
