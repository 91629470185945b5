"""The measured rows of the README have the numbers of the files that they link to."""

from __future__ import annotations

import re

import pytest
from document_blocks import ROOT

NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?!\w|\.\d)")
ROW = re.compile(r"^\| (.*) \(\[file\]\(([^)]+)\)\) \| (.*) \| (.*) \|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "README.md").read_text(encoding="utf-8"))


def _numbers(text):
    return [found.replace(",", "") for found in NUMBER.findall(text)]


def test_there_are_eight_rows():
    assert len(ROWS) == 8


@pytest.mark.parametrize(("what", "file", "kiln", "other"), ROWS, ids=lambda cell: cell[:40])
def test_each_number_of_a_row_is_in_its_file(what, file, kiln, other):
    measured = [float(number) for number in _numbers((ROOT / file).read_text(encoding="utf-8"))]
    # A file may say 1.18 times, or a share of 0.978, where the row has a percentage.
    forms = [*measured, *((one - 1) * 100 for one in measured), *(one * 100 for one in measured)]
    shown = _numbers(re.sub(r"vLLM [\d.]+", "", f"{kiln} {other}"))
    assert shown
    for number in shown:
        places = len(number.partition(".")[2])
        assert any(f"{one:.{places}f}" == number for one in forms), f"{number} is not in {file}"
