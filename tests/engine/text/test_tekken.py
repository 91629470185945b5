"""Tokenizers from a tekken.json alone: the ids of the format's own rule."""

from __future__ import annotations

import json
import random
import sys

import numpy as np
import pytest
from depth import at_depth
from grammar_walks import Walker
from tekken_files import NUM_SPECIAL, SPECIAL_TOKENS, split, tekken, write_tekken

from kiln.engine.errors import ModelError
from kiln.engine.grammar.grammar import grammar_of
from kiln.engine.models.eos import eos_token_ids
from kiln.engine.models.model_folder import ModelFiles
from kiln.engine.models.tekken_file import read_tekken
from kiln.engine.requests.structured_outputs import StructuredOutputsParams
from kiln.engine.text.detokenizer import Detokenizer
from kiln.engine.text.tokenizer import Tokenizer

POOLS = (
    "the hello world an in",
    "ab",
    "aab b\n\t ",
    "日本語éñ\u0300",
    "😀👩‍👧 A'sBC",
    "12.5e-3\r\n//",
)
HARD = (
    "",
    " ",
    "  hello",
    "hello  \n the",
    "x" * 300,
    "ab" * 99,
    " " * 50 + "the",
    "\x00\x7f\u2028",
)


def load(folder, **choices):
    return Tokenizer.load(write_tekken(folder, **choices), with_chats=False)


def texts(count, seed=0):
    rng = random.Random(seed)
    for _ in range(count):
        pool = rng.choice(POOLS) + rng.choice(POOLS)
        yield "".join(rng.choices(pool, k=rng.randint(1, 40)))


def test_texts_have_the_ids_of_the_rule(tmp_path):
    tokenizer, content = load(tmp_path), tekken()
    for text in (*HARD, *texts(at_depth(300, 20_000))):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == split(content, text), repr(text)
        assert tokenizer.decode(ids) == text
        assert not tokenizer.surely_exceeds(text, len(ids))
        stream = Detokenizer(tokenizer)
        assert "".join(stream.push([token]) for token in ids) + stream.finish() == text


def test_pieces_that_are_made_in_several_ways_are_made_as_by_the_rule(tmp_path):
    """Of the pairs with the same union the leftmost is merged, whichever pair it is."""
    for seed in range(at_depth(8, 300)):
        rng = random.Random(seed)
        made = {bytes(rng.choices(b"abc", k=rng.randint(2, 6))): None for _ in range(60)}
        content = tekken(pieces=tuple(made))
        tokenizer = load(tmp_path, pieces=tuple(made))
        for _ in range(60):
            text = "".join(rng.choices("abc", k=rng.randint(1, 30)))
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert ids == split(content, text), (seed, text)


def test_special_tokens_are_read_and_shown_as_those_of_other_tokenizers(tmp_path):
    tokenizer = load(tmp_path)
    assert tokenizer.encode("hello")[0] == 1 == tokenizer.special_id("<s>")
    assert tokenizer.encode("[INST]the[/INST]", add_special_tokens=False)[::2] == [3, 4]
    assert tokenizer.special_ids == frozenset(range(NUM_SPECIAL))
    assert tokenizer.decode([3, 4, NUM_SPECIAL + 65]) == "A"
    assert tokenizer.decode([3, 29], skip_special_tokens=False) == "[INST]<SPECIAL_29>"
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.vocab_size == len(read_tekken(tmp_path / "tekken.json").pieces) + NUM_SPECIAL
    assert tokenizer.token_text(NUM_SPECIAL + 0xC3) == "\N{REPLACEMENT CHARACTER}"


def test_the_end_of_a_text_is_known_without_a_config(tmp_path):
    assert eos_token_ids(ModelFiles(write_tekken(tmp_path))) == {2}
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "[/INST]"}')
    assert eos_token_ids(ModelFiles(tmp_path)) == {4}


def test_a_file_without_special_tokens_has_the_first_twenty(tmp_path):
    content = load(tmp_path, special=None).backend.get_added_tokens_decoder()
    named = [content[index].content for index in range(NUM_SPECIAL)]
    assert named == [*SPECIAL_TOKENS[:20], *(f"<SPECIAL_{i}>" for i in range(20, NUM_SPECIAL))]


def test_tokenizer_json_comes_first(tokenizer_folders, tmp_path):
    other = tokenizer_folders["byte-level"]
    for path in other.iterdir():
        (tmp_path / path.name).symlink_to(path)
    write_tekken(tmp_path)
    ours, theirs = Tokenizer.load(tmp_path), Tokenizer.load(other)
    assert ours.encode("hello") == theirs.encode("hello")
    assert ours.eos_token_ids == theirs.eos_token_ids


def test_a_template_in_the_folder_needs_no_library(tmp_path, monkeypatch):
    for name in ("mistral_common", "mistral_common.protocol.instruct.request"):
        monkeypatch.setitem(sys.modules, name, None)
    write_tekken(tmp_path)
    with pytest.raises(ModelError, match=r"pip install 'kiln\[mistral\]', or give .*--chat-temp"):
        Tokenizer.load(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}[INST]{{ messages[0].content }}")
    chat = [{"role": "user", "content": "the"}]
    ids = Tokenizer.load(tmp_path).apply_chat_template(chat)
    assert ids == [1, 3, *split(tekken(), "the")]
    (tmp_path / "chat_template.jinja").unlink()
    assert Tokenizer.load(tmp_path, "{{ bos_token }}").apply_chat_template(chat) == [1]


def test_grammars_are_compiled_over_its_vocabulary(tmp_path):
    walker = Walker(load(tmp_path))
    schema = {"type": "object", "properties": {"a": {"enum": ["the", "[INST]"]}}, "required": ["a"]}
    grammar = grammar_of(StructuredOutputsParams(json=schema))
    rng = np.random.default_rng(0)
    drawn = [walker.walk(grammar, rng) for _ in range(8)]
    assert {json.loads(text)["a"] for text in drawn if text} <= {"the", "[INST]"}
    assert any(drawn)


def damaged(change):
    content = tekken()
    change(content)
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "contains a list"),
        ("{}", "'config'"),
        (damaged(lambda one: one.pop("vocab")), "'vocab'"),
        (damaged(lambda one: one["vocab"].pop(0)), "the first pieces are not the bytes"),
        (
            damaged(lambda one: one["vocab"].__delitem__(slice(9, None))),
            "pieces are not as counted",
        ),
        (
            damaged(lambda one: one["vocab"][260].update(token_bytes="?")),
            "tekken tok",
        ),
        (damaged(lambda one: one["config"].update(default_vocab_size="x")), "tekken tokenizer"),
        (damaged(lambda one: one["config"].update(default_num_special_tokens=3)), "as counted"),
        (damaged(lambda one: one["config"].update(pattern=3)), "the pattern is no text"),
        (damaged(lambda one: one["config"].update(pattern="(")), "is no regular expression"),
        (damaged(lambda one: one["special_tokens"][2].update(token_str="x")), "</s> is missing"),
        (
            damaged(lambda one: one["special_tokens"][2].update(rank=3)),
            "special token 2 has the rank",
        ),
    ],
)
def test_a_damaged_file_is_a_model_error_naming_it(tmp_path, text, problem):
    (tmp_path / "tekken.json").write_text(text)
    with pytest.raises(ModelError, match=rf"tekken\.json: .*{problem}"):
        Tokenizer.load(tmp_path, with_chats=False)
