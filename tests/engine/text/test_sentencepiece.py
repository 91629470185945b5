"""Tokenizers from a sentencepiece file alone: the ids of sentencepiece, over hard strings."""

from __future__ import annotations

import io
import json
import random
import sys
from functools import cache
from pathlib import Path

import pytest
import sentencepiece
from depth import at_depth

from kiln.engine.errors import ModelError
from kiln.engine.models.eos import eos_token_ids
from kiln.engine.models.model_folder import ModelFiles
from kiln.engine.models.sentencepiece_file import read_sentencepiece
from kiln.engine.text.detokenizer import Detokenizer
from kiln.engine.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello, world! 1234 + 5678 = 6912.",
    "Größe, naïve café, Ελληνικά, русский текст, 日本語のテキスト, 中文, 한국어, עברית",
    "emoji: 😀 tabs new lines   spaces aaaa aaaaaa ababab ====== ------ ______ the theme there",
    "def f(x):    return {'a': [1, 2.5e-3], \"b\": None}  # comment    indented        more",
    "hello hello banana bananas anana aba abab ababa nnn nnnn nnnnn",
] * 4
LLAMA = {
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
}
SYMBOLS = ["<tool>", "ox j", "==", "<tool>x"]
FORMS = {  # what differs from sentencepiece's defaults
    "llama": LLAMA,
    "defaults": {"vocab_size": 230},
    "nfkc and bytes": {**LLAMA, "normalization_rule_name": "nmt_nfkc_cf"},
    "no space in front": {**LLAMA, "add_dummy_prefix": False},
    "pieces across words": {**LLAMA, "split_by_whitespace": False, "vocab_size": 520},
    "symbols": {**LLAMA, "user_defined_symbols": SYMBOLS, "control_symbols": ["[INST]"]},
}
SPECIAL = ("<unk>", "<s>", "</s>", "[INST]")
HARD = [
    *("", " ", "  ", "   ", "hello", " hello", "  hello", "hello ", "hello  ", "a  b", " ▁ "),
    *("\n", "\n\n", "\n hello", "hello\n", "\t", "a\tb", "\r\n", "\x00", "a\x00b", "\x01\x02"),
    *("\x7f", "\x85", "\u2028", "\u2029", "\ufeff", "\u200b", "a\u00a0b", "\u3000x", "▁", "▁▁"),
    *("a▁b", "▁hello", "hello▁", "<0x41>", "<0x0A>x", "<", "s>", "e\u0301", "é", "\u212b", "ﬁ"),
    *("①", "ＡＢＣ", "½", "\u1100\u1161\u11a8", "가", "👩‍👩‍👧", "🇩🇪", "😀", "\ud7ff", "\U0010ffff"),
    *("\ufffd", "İ", "ẞ", "ǅ", "日本語", "a" * 50, "ab" * 30, "aba" * 20, "n" * 33, "=" * 17),
    *("-" * 31, " " * 40 + "x", "x" + " " * 40, "aaaaab", "baaaaa", "\u0300", "\u0300a", "ﷺ"),
    *("x\u0300\u0301\u0302", "<tool>", "a<tool>b", "<tool>x y", "fox jumps", "a==b", "===="),
]
POOLS = ["ab ", "aban= -_", "hello wrd", "".join(map(chr, range(32))), "e\u0301\u0300ﬁ가\u11a8A "]
POOLS += ["the quick brown Größe 日本 😀\n\t", "".join(map(chr, range(0x80, 0x600, 7)))]


def texts(count: int) -> list[str]:
    """Return the hard strings, and others of characters that sentencepiece treats in own ways."""
    draw = random.Random(5)
    made = ["".join(draw.choices(draw.choice(POOLS), k=draw.randrange(40))) for _ in range(count)]
    symbols = [
        "".join(draw.choices([*SYMBOLS, "=", "ox", " ", "a"], k=9)) for _ in range(count // 9)
    ]
    return [*HARD, *made, *symbols]


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    @cache
    def train(kind: str, form: str) -> Path:
        out, settings = io.BytesIO(), {"vocab_size": 460, **FORMS[form]}
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS),
            model_writer=out,
            model_type=kind,
            character_coverage=0.995,
            hard_vocab_limit=False,
            minloglevel=2,
            **settings,
        )
        folder = tmp_path_factory.mktemp("sentencepiece")
        (folder / "tokenizer.model").write_bytes(out.getvalue())
        return folder

    return train


def configured(folder: Path, tmp_path: Path, **config: object) -> Tokenizer:
    (tmp_path / "tokenizer.model").write_bytes((folder / "tokenizer.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(tmp_path)


def oracle(folder: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_ids_are_those_of_sentencepiece(trained, kind, form):
    folder = trained(kind, form)
    ours, theirs = Tokenizer.load(folder), oracle(folder)
    bos, eos = theirs.bos_id(), theirs.eos_id()
    for text in texts(at_depth(150, 10_000)):
        ids = theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.encode(text) == [bos, *ids]
    for text in HARD:  # each text between special tokens is a text of its own
        ids = theirs.encode(text)
        assert ours.encode(f"<s>{text}</s>{text}", False) == [bos, *ids, eos, *ids], text


@pytest.mark.parametrize(("kind", "form"), [("bpe", "llama"), ("unigram", "symbols")])
def test_only_a_text_at_the_start_gets_a_space_unless_legacy(trained, tmp_path, kind, form):
    folder = trained(kind, form)
    theirs = oracle(folder)
    bare = oracle(trained(kind, form))
    proto = (folder / "tokenizer.model").read_bytes() + b"\x1a\x02\x18\x00"
    bare = sentencepiece.SentencePieceProcessor(model_proto=proto)
    ours = configured(folder, tmp_path, legacy=False, tokenizer_class="LlamaTokenizer")
    for text in HARD:
        inner = bare.encode(text)
        assert ours.encode(text) == [1, *theirs.encode(text)], text
        assert ours.encode(f"<s>{text}</s>{text}", False) == [1, *inner, 2, *inner], text
    for legacy in (True, False):
        without = configured(folder, tmp_path, legacy=legacy, add_prefix_space=False)
        assert all(without.encode(text, False) == bare.encode(text) for text in HARD)


def test_the_config_says_which_special_tokens_are_added(trained, tmp_path):
    folder = trained("bpe", "llama")
    ids = oracle(folder).encode("hello")
    for config, expected in (
        ({}, [1, *ids]),
        ({"add_bos_token": False}, ids),
        ({"add_eos_token": True, "eos_token": "</s>"}, [1, *ids, 2]),
        ({"bos_token": {"content": "</s>"}}, [2, *ids]),
        ({"bos_token": None}, ids),
    ):
        assert configured(folder, tmp_path, **config).encode("hello") == expected


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_text_comes_back_whole_and_streamed(trained, kind):
    folder = trained(kind, "llama")
    ours, theirs = Tokenizer.load(folder), oracle(folder)
    for text in texts(50):
        ids = theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids)
        stream = Detokenizer(ours)
        assert stream.push(ids) + stream.finish() == ours.decode(ids)


def test_the_names_of_special_tokens_are_in_the_file(trained, tmp_path):
    folder = trained("bpe", "symbols")
    ours = Tokenizer.load(folder)
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    assert ours.special_tokens == named
    assert ours.eos_token_ids == {2}
    assert {ours.special_id(text) for text in SPECIAL} == ours.special_ids
    configured(folder, tmp_path, eos_token="[INST]")
    assert eos_token_ids(ModelFiles(tmp_path)) == {oracle(folder).piece_to_id("[INST]")}


def test_models_like_llama_need_no_library(trained, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert Tokenizer.load(trained("bpe", "llama")).encode("hello")
    with pytest.raises(ModelError, match=r"tokenizer\.model: .* pip install sentencepiece"):
        Tokenizer.load(trained("unigram", "llama"))


def test_a_broken_file_and_another_type_of_model_are_named(trained, tmp_path):
    content = (trained("bpe", "llama") / "tokenizer.model").read_bytes()
    path = tmp_path / "tokenizer.model"
    draw = random.Random(1)
    most = len(content) * 3 // 4  # the pieces alone
    for size in (1, 2, 3, 17, *draw.sample(range(1, most), at_depth(30, 1000))):
        path.write_bytes(content[:size])
        with pytest.raises(
            ModelError, match=r"tokenizer\.model: cannot be read as a sentencepiece"
        ):
            read_sentencepiece(path)
    unknown_type = content.replace(b"<unk>\x15\0\0\0\0\x18\x02", b"<unk>\x15\0\0\0\0\x18\x09", 1)
    path.write_bytes(unknown_type)
    with pytest.raises(ModelError, match=r"tokenizer\.model: cannot .*9 is not a valid Kind"):
        Tokenizer.load(tmp_path)
    broken = (trained("unigram", "llama") / "tokenizer.model").read_bytes()
    path.write_bytes(broken.replace(b"<0x41>", b"<0x4_>"))
    with pytest.raises(ModelError, match=r"tokenizer\.model: sentencepiece cannot read it"):
        Tokenizer.load(tmp_path)
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=out, model_type="char", minloglevel=2
    )
    path.write_bytes(out.getvalue())
    with pytest.raises(ModelError, match=r"model type 4: want .* unigram \(1\) or bpe \(2\)"):
        Tokenizer.load(tmp_path)
