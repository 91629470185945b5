"""Two ranks answer as transformers does, and with adapters as PEFT, whatever the family."""

from __future__ import annotations

from functools import cache

import pytest
from depth import at_depth
from packed_gpt_oss import save_packed
from tiny.model import all_tiny
from tiny_adapters import adapt, check
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


@pytest.mark.parametrize("name", at_depth(["phi4-mini"], list(all_tiny())))
def test_adapters_of_ranks_are_pefts(tmp_path, llm_of, name):
    folder, adapters, logits = adapt(name, tmp_path)
    check(llm_of(folder, 2, lora_modules=adapters, max_loras=2), logits)


def test_ranks_share_the_blocks_of_gpt_oss_in_mxfp4(tmp_path, llm_of):
    logits = save_packed(tmp_path)
    assert_agrees(logits, ask(llm_of(tmp_path, 2), draw_prompts((3, 26)), whole=True))
