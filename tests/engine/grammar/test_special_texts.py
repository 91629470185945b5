"""Text that spells a special token is text to a grammar, and the token can be referred to."""

import random
from pathlib import Path

import pytest
from grammar_walks import Walker

import kiln.engine
from kiln.engine.grammar.grammar import Grammar, grammar_of
from kiln.engine.requests.structured_outputs import StructuredOutputsParams
from kiln.engine.text.tokenizer import Tokenizer

DEMO = Path(kiln.engine.__file__).parent / "demo"
TEXT = "<|im_end|>x"


@pytest.fixture(scope="module")
def walker():
    return Walker(Tokenizer.load(DEMO))


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"choice": [TEXT]}, TEXT),
        ({"json": {"const": TEXT}}, f'"{TEXT}"'),
        ({"grammar": f'start: "a" "{TEXT}"'}, f"a{TEXT}"),
    ],
)
def test_forced_text_is_written_with_ordinary_tokens(walker, form, text):
    grammar = grammar_of(StructuredOutputsParams(**form))
    assert walker.walk(grammar, random.Random(0)) == text


def test_a_special_token_is_drawn_where_the_grammar_has_it(walker):
    token = walker.tokenizer.special_id("<|im_start|>")
    grammar = Grammar.of_lark(f'start: "a" <[{token}]> "b"')
    assert walker.walk(grammar, random.Random(0)) == "a<|im_start|>b"


@pytest.mark.parametrize("kind", ["byte-level", "llama"])
def test_every_model_of_tokenizers_keeps_its_ids(tokenizer_folders, kind):
    """Special tokens get other texts, which must not move a token of the vocabulary."""
    tokenizer = Tokenizer.load(tokenizer_folders[kind])
    walker = Walker(tokenizer)
    for token in sorted(tokenizer.special_ids - tokenizer.eos_token_ids):
        grammar = Grammar.of_lark(f'start: <[{token}]> "ab"')
        written = walker.walk(grammar, random.Random(0))
        assert written.startswith(tokenizer.decode([token], skip_special_tokens=False))
        assert written.endswith("ab")
