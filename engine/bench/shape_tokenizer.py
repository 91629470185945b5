"""A tokenizer for models that have only a shape: servers want one, and the load sends token ids."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel


def write_shape_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write tokenizer.json, in which the text of token 7 is "t7", and its configuration."""
    words = {f"t{index}": index for index in range(vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "t0",
        "bos_token": "t1",
        "eos_token": "t2",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
