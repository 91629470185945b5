"""Models of a shape alone have a tokenizer that servers can load."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from kiln.engine.bench.shape_tokenizer import write_shape_tokenizer
from kiln.engine.bench.shapes import write_shape
from kiln.engine.text.tokenizer import Tokenizer


@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama3-8b"])
def test_every_token_is_a_word_for_kiln_and_for_transformers(name, tmp_path):
    folder = write_shape(name, tmp_path)
    write_shape_tokenizer(folder, 5000)
    own, other = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    ids = [3, 4999, 7, 7, 250]
    assert own.decode(ids) == other.decode(ids) == "t3 t4999 t7 t7 t250"
    assert own.encode("t3 t4999", add_special_tokens=False) == [3, 4999]
    assert other.encode("t3 t4999", add_special_tokens=False) == [3, 4999]
