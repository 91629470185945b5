"""Two ranks answer as transformers does, whatever the family."""

from __future__ import annotations

from functools import cache

import pytest
from tiny.model import all_tiny
from tiny_answers import ask, assert_agrees, draw_prompts

pytestmark = pytest.mark.usefixtures("in_threads")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    @cache
    def make(name):
        one, folder = all_tiny()[name], tmp_path_factory.mktemp(name)
        model = one.save(folder)
        return folder, lambda token_ids, total: one.logits(model, token_ids, total)

    return make


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", all_tiny())
def test_ranks_answer_as_transformers(saved, llm_of, name):
    folder, logits = saved(name)
    llm = llm_of(folder, 2)
    assert_agrees(logits, ask(llm, draw_prompts(), whole=True))
