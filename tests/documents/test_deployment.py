"""The image of the page of deployment: its steps run by hand, and its server needs no compiler."""

from __future__ import annotations

import os
import re

import pytest
from document_blocks import ROOT, blocks
from document_runs import Place, serving
from image_steps import build, instructions, run_in, shell

from kiln.engine.cli.main import build_parser

[BLOCK] = [b for b in blocks(ROOT / "docs" / "deployment.md") if b.language == "dockerfile"]
_SECONDS = 1800


def test_each_step_is_known_and_copies_from_a_stage_that_exists():
    stages: list[str] = []
    for name, rest in instructions(BLOCK.text):
        if name == "FROM":
            stages.append(rest.partition(" AS ")[2])
        elif "--from=" in rest:
            assert re.search(r"--from=(\w+)", rest)[1] in stages[:-1]


def test_the_commands_of_the_image_have_flags_that_exist():
    steps = dict(instructions(BLOCK.text))
    words = re.findall(r'"([^"]+)"', f"{steps['ENTRYPOINT']} {steps['CMD']}")
    assert words[0] == "kiln"
    build_parser().parse_args(words[1:])
    for name, rest in instructions(BLOCK.text):
        if name == "RUN" and "/kiln " in rest:
            build_parser().parse_args(rest.split("/kiln ")[1].split())


@pytest.mark.deep
@pytest.mark.timeout(_SECONDS)
def test_the_steps_run_by_hand_make_a_server_that_compiles_nothing(tmp_path):
    # The CPU build of torch, as setup_venv.sh takes it where there is no GPU.
    before = "--quiet -c constraints.txt torch==2.13.0"
    kernels, last = build(BLOCK.text, ROOT, tmp_path, before)
    assert (kernels.root / "opt" / "kernels.bundle").stat().st_size > 100_000
    assert [step.split()[0] for step in last.skipped] == ["useradd"]

    # All that the model calls on this GPU is there; nothing is compiled for another one.
    bare = {"PATH": str(tmp_path / "last" / "opt" / "kiln" / "bin")}
    warm = f"kiln warmup --arch sm_90a --model {last.root}/src/engine/demo --json"
    assert '"built": 0' in shell(last, warm, **bare).stdout
    other = run_in(last, warm.replace("sm_90a", "sm_80"), **bare)
    assert other.returncode == 3, other.stdout + other.stderr

    binaries = last.root / "opt" / "kiln" / "bin"
    variables = {**last.variables, "PYTHONPATH": "", "PATH": f"{binaries}{os.pathsep}/nowhere"}
    place = Place(last.work, tmp_path, variables, [str(binaries / "kiln")])
    with serving("kiln serve engine/demo", place) as url:
        assert url.startswith("http://127.0.0.1:")
