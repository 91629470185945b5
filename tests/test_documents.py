"""What the documents say about files and toggles is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kiln
from kiln.cache import env
from kiln.engine.cli.main import build_parser
from kiln.jit_kernels.declare.families import families

ROOT = Path(__file__).resolve().parents[1]


def test_every_toggle_is_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    names = {row.name for row in env.describe([], env.Env())}
    missing = [name for name in names if f"`{name}`" not in readme]
    assert not missing
    toggles = {f"KILN_{family.upper()}" for family in families()}
    found = set(re.findall(r"`(KILN_[A-Z_]+)[`=]", readme))
    assert toggles <= found <= names | toggles


def test_the_changelog_has_this_version():
    assert f"## {kiln.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_files_that_the_documents_name_exist():
    for document in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / document).read_text()
        for path in re.findall(
            r"`((?:cache|engine|jit_kernels|kernel_sources|tests|tools|benchmarks|examples)/[\w./-]+)`",
            text,
        ):
            assert (ROOT / path).exists(), f"{document} names {path}"


def test_the_flags_of_kiln_serve_that_the_readme_shows_exist(capsys):
    """Also behind torchrun, whose own flags come before."""
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--help"])
    known = set(re.findall(r"(--[a-z][a-z-]+)", capsys.readouterr().out))
    readme = (ROOT / "README.md").read_text()
    shown = re.findall(r"kiln serve([^`\n]*)", readme)
    flags = {flag for text in shown for flag in re.findall(r"(--[a-z][a-z-]+)", text)}
    assert "--tp" in flags
    assert flags <= known
