"""A page of a benchmark fits the terminal: tables become columns, and no value is lost."""

from __future__ import annotations

import pytest

from kiln.engine.cli.bench_model import write_out
from kiln.engine.cli.tables import fit_page

PAGE = """# A title that is rather long for a narrow terminal

| engine | output tokens/s | Kiln's speed over this | a long value |
| --- | ---: | ---: | --- |
| kiln | 1,234 | – | one two three four five six seven |
| vllm | 999 | 1.23× | one |

The end.
"""


@pytest.mark.parametrize("width", [40, 60, 79, 200])
def test_no_line_is_longer_and_every_word_is_there(width):
    shown = fit_page(PAGE, width)
    assert max(map(len, shown.splitlines())) <= width
    words = PAGE.replace("|", " ").replace("---:", "").replace("---", "").split()
    assert sorted(shown.replace("─", "").split()) == sorted(words)


def test_numbers_are_on_the_right_and_names_wrap_only_if_need_be():
    wide = fit_page(PAGE, 200).splitlines()
    assert wide[2] == "engine  output tokens/s  Kiln's speed over this  a long value"
    kiln, vllm = (line[: len("engine  output tokens/s")] for line in wide[4:6])
    assert (kiln, vllm) == ("kiln              1,234", "vllm                999")
    assert len(fit_page(PAGE, 60).splitlines()) > len(wide)


def test_a_terminal_gets_columns_and_a_file_markdown(monkeypatch, capsys):
    class Args:
        json = output = None

    write_out(Args, None, PAGE, None)
    assert capsys.readouterr().out == f"{PAGE}\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    write_out(Args, None, PAGE, None)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60
