"""Every block of README and docs/ is right as far as it can be checked without running it."""

from __future__ import annotations

import ast
import json
import re

import pytest
import yaml
from doc_tables import metrics
from doc_tables.routes import paths
from document_blocks import PAGES, all_blocks, kiln_commands

from kiln.engine.cli.main import build_parser
from kiln.engine.server.pages.routes import FILES

BLOCKS = all_blocks()
LANGUAGES = {"bash", "python", "json", "yaml", "dockerfile", "ini", "text", "nginx"}
EACH = pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)


def _of(*languages):
    chosen = [block for block in BLOCKS if block.language in languages]
    return pytest.mark.parametrize("block", chosen, ids=lambda block: block.name)


PARSER = build_parser()


def _parse(arguments):
    try:
        PARSER.parse_args(arguments)
    except SystemExit as ended:
        if ended.code:  # --help and --version end with 0
            pytest.fail(f"kiln {' '.join(arguments)}: the command refuses it")


@EACH
def test_a_block_has_a_language_and_a_comment_that_tests_know(block):
    assert block.language in LANGUAGES
    assert re.fullmatch(r"|deep|not run: .{10,}", block.note), block.note
    assert block.language in ("bash", "python") or block.output is None
    if block.language == "json":
        json.loads(block.text)
    if block.output_language == "json":
        json.loads(block.output)


@_of("bash")
def test_commands_of_kiln_have_flags_that_exist(block):
    for arguments in kiln_commands(block):
        _parse(arguments)


@_of("python")
def test_programs_compile(block):
    ast.parse(block.text)


@_of("yaml")
def test_manifests_probe_routes_that_exist(block):
    content = list(yaml.safe_load_all(block.text))
    probed = [request["path"] for request in _values(content, "httpGet")]
    assert set(probed) <= {*paths(), *FILES}
    for program, *arguments in _values(content, "command"):
        assert program == "kiln"
        _parse(arguments)


@_of("bash", "python", "json", "yaml", "nginx")
def test_paths_of_the_server_exist(block):
    known = [re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(path)) for path in {*paths(), *FILES}]
    for path in re.findall(r"127\.0\.0\.1:8000(/[\w/.-]*)", block.text):
        if path.rstrip("/") not in ("/v1", ""):
            assert any(re.fullmatch(one, path) for one in known), path


@_of("ini")
def test_units_of_systemd_start_kiln_with_flags_that_exist(block):
    [line] = re.findall(r"^ExecStart=(.+)$", block.text, re.MULTILINE)
    program, *arguments = line.split()
    assert program.endswith("/kiln")
    _parse(arguments)


def test_metrics_that_a_page_names_exist():
    known = metrics.names()
    for page in PAGES:
        named = set(re.findall(r"\b(kiln:[a-z_]+[a-z])\b", page.read_text(encoding="utf-8")))
        plain = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in named}
        assert plain <= known, f"{page.name}: {plain - known}"


def test_variables_that_a_page_names_exist():
    from kiln.cache import env
    from kiln.jit_kernels.declare.families import families

    known = {row.name for row in env.describe(families(), env.Env())}
    known.add("KILN_PORT")  # which Kubernetes sets, and Kiln ignores
    for page in PAGES:
        named = set(re.findall(r"\b(KILN_[A-Z_]+[A-Z])\b", page.read_text(encoding="utf-8")))
        assert named <= known, f"{page.name}: {named - known}"


def _values(content, key):
    """Every value of a key, at any depth."""
    if isinstance(content, dict):
        for name, value in content.items():
            if name == key:
                yield value
            yield from _values(value, key)
    elif isinstance(content, list):
        for one in content:
            yield from _values(one, key)
