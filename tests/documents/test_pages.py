"""README and docs/ can be read: short, with links that lead somewhere and tables that fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from document_blocks import PAGES, ROOT

import kiln
from kiln.engine.models.registry import known_families

WRITTEN = [*PAGES, ROOT / "CONTRIBUTING.md"]
PAGE = pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
GENERATED = re.compile(r"<!-- begin ([\w-]+) -->.*?<!-- end \1 -->", re.DOTALL)
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
MOST_COLUMNS, MOST_IN_A_CELL = 6, 420


def _anchors(path: Path) -> set[str]:
    """Return the anchors of a page as GitHub makes them from its titles."""
    text = FENCED.sub("", path.read_text(encoding="utf-8"))
    titles = re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", title.replace("`", "").lower()) for title in titles)
    return {title.strip().replace(" ", "-") for title in plain}


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 1200


@PAGE
def test_links_lead_to_files_titles_and_images_that_exist(page):
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    for link in links:
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert target.is_relative_to(ROOT)
        if anchor:
            assert anchor in _anchors(target), f"{page.name} links to {link}"


@PAGE
def test_files_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    roots = "cache|engine|jit_kernels|kernel_sources|tests|tools|benchmarks|examples|docs"
    for name in re.findall(rf"`((?:{roots})/[\w./*-]+)`", text):
        assert list(ROOT.glob(name.rstrip("/"))), f"{page.name} names {name}"


@PAGE
def test_tables_fit_a_narrow_page(page):
    for line in GENERATED.sub("", page.read_text(encoding="utf-8")).splitlines():
        if not line.startswith("|"):
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        assert len(cells) <= MOST_COLUMNS, line
        assert max(map(len, cells)) <= MOST_IN_A_CELL, line


def test_every_page_is_reached_from_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert f"(docs/{page.name})" in readme


def test_every_architecture_is_in_the_page_of_models():
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert [name for name in known_families() if f"`{name}`" not in text] == []


def test_messages_of_the_page_of_troubleshooting_are_those_of_the_code():
    folders = ("cache", "jit_kernels", "engine", "tools")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    files.append(ROOT / "tools" / "setup_venv.sh")
    source = "\n".join(path.read_text(encoding="utf-8") for path in files)
    source = re.sub(r"\"\s*\n\s*f?\"", "", source)  # texts that are written in several pieces
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^(?:\*\*|- )`([^`\n]+)`(?:\*\*|:)", page, re.MULTILINE)
    assert len(messages) > 15
    for message in messages:
        pieces = [piece.strip(" :;()") for piece in message.split("…")]
        missing = [piece for piece in pieces if len(piece) > 5 and piece not in source]
        assert not missing, message


def test_the_changelog_has_this_version():
    assert f"## {kiln.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
