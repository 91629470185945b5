"""Every benchmark's result has one form, and says where its numbers come from."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from kiln.engine.bench.report import Report, grid, table

ROOT = Path(__file__).resolve().parents[3]
RECORDS = sorted((ROOT / "benchmarks").glob("*.json"))
MACHINE = {"cpu": "a CPU", "cores": 2, "gpu": "none"}


def check_provenance(report):
    assert {"cpu", "cores", "gpu"} <= set(report["hardware"])
    assert report["hardware"]["gpu"]
    assert {"kiln", "python"} <= set(report["versions"])
    assert all(isinstance(version, str) for version in report["versions"].values())
    command = [word for word in report["command"].split() if not word.startswith("KILN_")]
    assert command[0] == "kiln" or command[0].startswith("tools/")
    datetime.fromisoformat(report["date"])
    assert report["benchmark"]
    assert "machine" not in report


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_every_record_says_where_its_numbers_come_from(path):
    record = json.loads(path.read_text())
    # The cache's trials are reports of their own, in one file.
    for report in [record] if "benchmark" in record else record.values():
        check_provenance(report)


def test_a_new_report_has_the_same_form_and_no_empty_load_or_remark():
    report = Report("some", "kiln bench some", [{"a": 0}], details={"limit": 0, "none": []})
    content = report.to_json()
    check_provenance(content)
    assert datetime.fromisoformat(report.date).tzinfo is not None
    assert (content["rows"], content["limit"], content["none"]) == ([{"a": 0}], 0, [])
    assert not {"load", "remark", "details"} & set(content)


def test_a_page_has_title_remark_provenance_and_blocks():
    where = {"hardware": MACHINE, "versions": {"torch": "2"}, "date": "2026-01-01"}
    page = Report("some", "kiln x", remark="a smoke test", **where).markdown("Some", "", "text")
    assert page.split("\n\n") == [
        "# Some: a smoke test",
        "a CPU, 2 cores, GPU: none. torch 2. 2026-01-01: `kiln x`",
        "text",
    ]
    where["hardware"] = {"cpu": None, "cores": None, "gpu": "a GPU"}
    assert "\n\nGPU: a GPU. torch" in Report("some", "kiln x", **where).markdown("Some")


def test_a_table_shows_what_is_missing_and_puts_numbers_to_the_right():
    rows = [{"name": "1st", "seconds": 0.1234}, {"name": "next", "seconds": None}]
    assert table({"": "{name}", "wall s": "{seconds:.2f}", "threads": "{threads}"}, rows) == (
        "|  | wall s | threads |\n| --- | ---: | ---: |\n| 1st | 0.12 | – |\n| next | – | – |"
    )
    assert grid(["a"], []) == ""


def test_without_matplotlib_the_numbers_are_written_and_the_plots_are_told(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    paths = Report("some", "kiln x").write(tmp_path / "new", "some", "text", {"some.png": print})
    assert [path.name for path in paths] == ["some.json", "some.md"]
    assert "matplotlib is not installed" in capsys.readouterr().err


@pytest.mark.deep  # tests/tools/test_gpu_check.py and the CLI's test_bench_engines.py run some so
def test_benchmarks_need_no_server_package():
    """A GPU machine has none of these, and gpu_check writes its reports there."""
    absent = ["fastapi", "uvicorn", "pydantic", "httpx", "zmq", "msgspec", "rich"]
    code = (
        f"import sys; sys.modules |= dict.fromkeys({absent})\n"  # importing one raises ImportError
        "import gpu_check\n"  # it puts the import root on the path
        "from kiln.engine.bench import in_process, kernels, latency, offline, serving\n"
        "from kiln.engine.bench import kiln_engine, transformers_engine, vllm_engine\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT / "tools", check=True)
