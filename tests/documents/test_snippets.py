"""Programs and requests of README and docs/ run, and print what the pages say.

Here those that need no server, or one of the demo model without other flags. ``test_newcomer.py``
runs all, with the servers that the pages start.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from document_blocks import ROOT, all_blocks
from document_runs import Place, run, serving

ADAPTERS = "engine/demo/adapters"
# Answers as the servers of the first two do, and has the adapters of the third.
WITH_ADAPTERS = f"kiln serve --lora-modules sentence={ADAPTERS}/sentence chatty={ADAPTERS}/chatty"
SHARED = ("", "make serve", "kiln serve", WITH_ADAPTERS)
RUNNING = [block for block in all_blocks() if block.runs and block.note != "deep"]
CLIENTS = [block for block in RUNNING if block.is_client and block.server in SHARED]
PROGRAMS = [block for block in RUNNING if block.language == "python" and not block.is_client]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where kiln is
    return Place(ROOT, folder, {"HOME": str(folder), "PATH": path})


@pytest.fixture(scope="module")
def url(place):
    with serving(WITH_ADAPTERS, place) as url:
        yield url


@pytest.mark.parametrize("block", CLIENTS, ids=lambda block: block.name)
def test_a_request_gets_the_answer_that_its_page_shows(block, url, place):
    run(block, url, place)


@pytest.mark.parametrize("block", PROGRAMS, ids=lambda block: block.name)
def test_a_program_prints_what_its_page_shows(block, place):
    run(block, "", place)
