"""What docs/ says of flags, toggles, metrics and routes is made from the code."""

from __future__ import annotations

import argparse
import re

import make_docs
import pytest
from doc_tables import flags


def test_the_generated_parts_are_up_to_date(capsys):
    assert make_docs.main(["--check"]) == 0, capsys.readouterr().err


def test_each_part_is_on_one_page():
    text = "".join(page.read_text(encoding="utf-8") for page in make_docs.pages())
    for name in make_docs.PARTS:
        assert text.count(f"<!-- begin {name} -->") == 1


def test_an_old_part_is_reported_with_the_command_that_renews_it(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("Before\n<!-- begin toggles -->\nearlier\n<!-- end toggles -->\nbehind\n")
    monkeypatch.setattr(make_docs, "pages", lambda: [page])
    assert make_docs.main(["--check"]) == 1
    assert "page.md; run python tools/make_docs.py" in capsys.readouterr().err
    assert "earlier" in page.read_text()
    assert make_docs.main([]) == 0
    text = page.read_text()
    assert text.startswith("Before\n")
    assert text.endswith("behind\n")
    assert "KILN_KERNEL_CACHE" in text
    assert "earlier" not in text
    assert make_docs.main(["--check"]) == 0


def test_every_flag_of_every_command_is_on_the_page_of_flags():
    text = (make_docs.ROOT / "docs" / "toggles-and-flags.md").read_text(encoding="utf-8")
    for name, parser in flags.verbs():
        for action in parser._actions:
            longest = max(action.option_strings, key=len, default="")
            if longest.startswith("--") and action.help != argparse.SUPPRESS:
                assert re.search(rf"`{longest}[` ]", text) or longest in flags.EVERYWHERE, name


def test_a_part_that_nothing_makes_is_an_error():
    with pytest.raises(KeyError):
        make_docs.renewed("<!-- begin nothing -->\n<!-- end nothing -->")
