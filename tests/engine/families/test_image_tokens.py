"""Kiln serves the texts of models with images: tokens that stand for images are refused."""

from __future__ import annotations

import json
import shutil

import pytest
from tiny_answers import serve

from kiln import SamplingParams
from kiln.engine.errors import RequestError

IMAGE, BEGIN, END = 7, 8, 299


@pytest.fixture
def llm(made, tmp_path):
    folder = shutil.copytree(made("gemma3-with-images")[0], tmp_path / "model")
    path = folder / "config.json"
    tokens = {"image_token_index": IMAGE, "boi_token_index": BEGIN, "eoi_token_index": END}
    path.write_text(json.dumps({**json.loads(path.read_text()), **tokens}))
    return serve(folder)


@pytest.mark.parametrize("token", [IMAGE, BEGIN, END])
def test_a_prompt_with_an_image_is_refused_by_name(llm, token):
    short = SamplingParams(max_tokens=1)
    with pytest.raises(RequestError, match=f"token id {token} at position 2, which stands for an"):
        llm.generate([[3, 4, token, 5]], short)
    assert llm.generate([[3, 4, 9, 5]], short)


def test_such_tokens_may_be_banned(llm):
    params = SamplingParams(max_tokens=4, logit_bias={IMAGE: -100.0}, stop_token_ids=[END])
    assert llm.generate([[3, 4]], params)
