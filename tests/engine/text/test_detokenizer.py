"""Detokenisation: what is emitted adds up to the text, in whole characters."""

from __future__ import annotations

import itertools

import pytest
from depth import at_depth
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kiln.engine.text.detokenizer import (
    MAX_PENDING_TOKENS,
    REPLACEMENT,
    Detokenizer,
    WindowStream,
)
from kiln.engine.text.token_bytes import piece_decoder
from kiln.engine.text.tokenizer import Tokenizer

KINDS = ["byte-level", "llama", "metaspace", "wordpiece"]
PROPERTY = settings(
    max_examples=at_depth(100, 3000),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
TEXTS = st.one_of(
    st.text(max_size=30),
    st.lists(st.sampled_from(["Hello", " ", "é", "日本", "😀", "👩‍👩‍👧", "\n", "<|im_end|>"])).map(
        "".join
    ),
)
TOKENS = st.lists(st.integers(0, 999), max_size=40)  # some beyond the vocabulary


@pytest.fixture(scope="module")
def tokenizers(tokenizer_folders):
    return {name: Tokenizer.load(folder) for name, folder in tokenizer_folders.items()}


def stream(detokenizer, token_ids):
    emitted = []
    for token_id in token_ids:
        emitted.append(detokenizer.push([token_id]))
        assert not emitted[-1].endswith(REPLACEMENT) or REPLACEMENT in emitted[-1]
    return emitted, "".join(emitted) + detokenizer.finish()


@pytest.mark.parametrize("kind", KINDS)
@PROPERTY
@given(text=TEXTS, skip=st.booleans())
def test_what_is_emitted_adds_up_to_the_text(tokenizers, kind, text, skip):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text)
    emitted, whole = stream(Detokenizer(tokenizer, skip_special_tokens=skip), ids)
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    assert whole == expected
    if REPLACEMENT not in expected:
        assert not any(REPLACEMENT in piece for piece in emitted), "half a character got out"


@pytest.mark.parametrize("kind", ["byte-level", "wordpiece"])
@PROPERTY
@given(ids=TOKENS, skip=st.booleans())
def test_any_tokens_at_all_add_up_to_their_decode(tokenizers, kind, ids, skip):
    tokenizer = tokenizers[kind]
    _, whole = stream(Detokenizer(tokenizer, skip_special_tokens=skip), ids)
    assert whole == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["llama", "metaspace"])
@PROPERTY
@given(ids=TOKENS, skip=st.booleans())
def test_any_tokens_add_up_where_byte_tokens_make_whole_characters(tokenizers, kind, ids, skip):
    # A run of byte tokens that is no UTF-8 decodes to one U+FFFD for each byte, valid characters
    # before it included; a stream that has already shown those cannot, so it differs there.
    tokenizer = tokenizers[kind]
    expected = tokenizer.decode(ids, skip_special_tokens=skip)
    assume(REPLACEMENT not in expected)
    _, whole = stream(Detokenizer(tokenizer, skip_special_tokens=skip), ids)
    assert whole == expected


def test_byte_tokens_that_are_no_character_become_the_replacement_character(tokenizers):
    tokenizer = tokenizers["llama"]
    first = tokenizer.backend.token_to_id("<0x00>")
    # 語 in three bytes, then a byte that begins nothing, then half of 語.
    ids = [first + byte for byte in (0xE8, 0xAA, 0x9E, 0xFF, 0xE8, 0xAA)]
    emitted, whole = stream(Detokenizer(tokenizer), ids)
    assert emitted == ["", "", "語", REPLACEMENT, "", ""]
    assert whole == "語" + REPLACEMENT * 2


@pytest.mark.parametrize("kind", KINDS)
@PROPERTY
@given(text=TEXTS, split=st.integers(0, 30))
def test_after_a_prompt_the_text_is_what_follows_it_in_the_whole(tokenizers, kind, text, split):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    prompt, answer = ids[:split], ids[split:]
    before = tokenizer.decode(prompt)
    assume(REPLACEMENT not in before)
    assume(before)  # a prompt of special tokens alone is no context
    _, whole = stream(Detokenizer(tokenizer, context=prompt), answer)
    assert before + whole == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@PROPERTY
@given(text=TEXTS, sizes=st.lists(st.integers(1, 7), min_size=1))
def test_tokens_may_come_in_batches_of_any_size(tokenizers, kind, text, sizes):
    ids = tokenizers[kind].encode(text, add_special_tokens=False)
    one_by_one, batches = (Detokenizer(tokenizers[kind]) for _ in range(2))
    emitted, _ = stream(one_by_one, ids)
    start = 0
    for size in itertools.cycle(sizes):
        end = start + size
        assert batches.push(ids[start:end]) == "".join(emitted[start:end])
        assert batches.num_tokens == len(ids[:end])
        start = end
        if start >= len(ids):
            break


@pytest.mark.parametrize("kind", ["byte-level", "llama", "wordpiece"])
@PROPERTY
@given(text=TEXTS)
def test_the_general_path_agrees_with_the_decode(tokenizers, kind, text):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    window = WindowStream(tokenizer, [])
    whole = "".join(window.push([token]) for token in ids) + window.finish()
    assert whole == tokenizer.decode(ids, skip_special_tokens=False)


def test_the_general_path_lets_broken_text_out_after_a_while(tokenizers):
    tokenizer = tokenizers["byte-level"]
    broken = tokenizer.backend.token_to_id("Ã")  # the byte 0xC3, which begins a character
    window = WindowStream(tokenizer, [])
    emitted = [window.push([broken]) for _ in range(100)]
    assert max(map(len, emitted)) < 20
    assert "".join(emitted) + window.finish() == REPLACEMENT * 100


def test_whole_characters_come_out_with_the_token_that_ends_them(tokenizers):
    tokenizer = tokenizers["byte-level"]
    ids = [token for char in "a😀é" for token in tokenizer.encode(char)]
    emitted, _ = stream(Detokenizer(tokenizer), ids)
    assert [piece for piece in emitted if piece] == ["a", "😀", "é"]
    assert len(ids) > 3


@pytest.mark.parametrize("kind", KINDS)
@PROPERTY
@given(
    text=st.lists(st.sampled_from(["Hello", " ", "world", "é", "日", "😀", "x"])).map("".join),
    stop=st.lists(st.sampled_from(["o w", "ld", "é", "日😀", "xx", " ", "lo"]), max_size=3),
    include=st.booleans(),
)
def test_text_ends_at_the_first_stop_string(tokenizers, kind, text, stop, include):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text)
    full = tokenizer.decode(ids)
    ends = [(full.find(each) + len(each), full.find(each), each) for each in stop if each in full]
    expected, by = full, None
    if ends:
        end, begin, by = min(ends)
        expected = full[: end if include else begin]
    detokenizer = Detokenizer(tokenizer, stop=stop, include_stop=include)
    emitted, whole = stream(detokenizer, ids)
    assert whole == expected
    assert detokenizer.stopped_by == by
    shown = ""
    for piece in emitted:
        shown += piece
        assert expected.startswith(shown)


def test_a_stop_string_within_the_first_min_tokens_does_not_count(tokenizers):
    tokenizer = tokenizers["byte-level"]
    ids = tokenizer.encode("x.x.x.")
    assert len(ids) == 6
    detokenizer = Detokenizer(tokenizer, stop=["."], min_tokens=2)
    assert stream(detokenizer, ids)[1] == "x.x"
    assert detokenizer.stopped_by == "."


def test_several_tokens_in_one_push_are_the_same_as_one_by_one(tokenizers):
    tokenizer = tokenizers["byte-level"]
    ids = tokenizer.encode("one two STOP three")
    detokenizer = Detokenizer(tokenizer, stop=["STOP"])
    assert detokenizer.push(ids) + detokenizer.finish() == "one two "


def test_the_cost_of_a_token_does_not_grow_with_the_text(tokenizers, monkeypatch):
    decoded = []
    decode = Tokenizer.decode

    def counting(self, token_ids, skip_special_tokens=True):
        decoded.append(len(token_ids))
        return decode(self, token_ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    for kind, longest in [("byte-level", 0), ("wordpiece", 2 * MAX_PENDING_TOKENS)]:
        decoded.clear()
        ids = tokenizers[kind].encode("The quick brown fox jumps over the lazy dog. ") * 40
        detokenizer = Detokenizer(tokenizers[kind], stop=["no such text"])
        stream(detokenizer, ids)
        assert max(decoded, default=0) <= longest


def test_unfamiliar_decoders_take_the_general_path(tokenizers):
    kinds = {name: piece_decoder(each.backend) is not None for name, each in tokenizers.items()}
    assert kinds == {"byte-level": True, "llama": True, "metaspace": True, "wordpiece": False}


@pytest.mark.parametrize("kind", ["byte-level", "llama"])
def test_the_bytes_of_each_token_are_what_it_adds_to_a_text(tokenizers, kind):
    tokenizer = tokenizers[kind]
    anchor = tokenizer.encode("x", add_special_tokens=False)
    before = tokenizer.decode(anchor)
    for token_id in range(tokenizer.vocab_size):
        added = tokenizer.decode([*anchor, token_id], skip_special_tokens=False)
        if REPLACEMENT not in added:
            assert tokenizer.token_bytes(token_id) == added.removeprefix(before).encode()


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_special_tokens_that_are_to_be_shown_appear(tokenizers, kind):
    tokenizer = tokenizers[kind]
    shown, other = sorted(tokenizer.special_ids)[-2:]
    name = tokenizer.backend.id_to_token(shown)
    assert tokenizer.ids_of([name, "no token at all"]) == {shown}
    ids = [*tokenizer.encode("world", add_special_tokens=False), other, shown, other]
    _, text = stream(Detokenizer(tokenizer, shown=tokenizer.ids_of([name])), ids)
    assert text.split(name) == ["world", ""] or text.split(f" {name}") == ["world", ""]
