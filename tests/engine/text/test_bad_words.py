"""Bad words as tokens: at the start of a text, and behind a space."""

from __future__ import annotations

import pytest

from kiln.engine.errors import RequestError
from kiln.engine.requests.sampling_params import SamplingParams
from kiln.engine.text.bad_words import with_bad_words
from kiln.engine.text.tokenizer import Tokenizer


@pytest.mark.parametrize("name", ["byte-level", "llama"])
@pytest.mark.parametrize("word", ["fox", "jumps over", "😀", " lazy", " "])
def test_each_form_of_a_word_is_listed_once_and_spells_it(tokenizer_folders, name, word):
    tokenizer = Tokenizer.load(tokenizer_folders[name])
    listed = with_bad_words(SamplingParams(bad_words=[word]), tokenizer).bad_words_token_ids
    assert 1 <= len(listed) <= 2
    assert len({tuple(form) for form in listed}) == len(listed)
    for form in listed:
        assert tokenizer.decode(form).strip() == word.strip()


def test_a_word_that_begins_a_token_behind_a_space_has_both_forms(tokenizer_folders):
    tokenizer = Tokenizer.load(tokenizer_folders["byte-level"])
    text = tokenizer.encode("The quick brown fox jumps", add_special_tokens=False)
    listed = with_bad_words(SamplingParams(bad_words=["fox"]), tokenizer).bad_words_token_ids
    found = [
        form for form in listed for at in range(len(text)) if text[at : at + len(form)] == form
    ]
    assert len(listed) == 2
    assert len(found) == 1, "the form behind the space"


def test_ids_that_are_given_stay():
    ids = [[1, 2], [3]]
    params = SamplingParams(bad_words_token_ids=ids)
    assert with_bad_words(params, None) is params
    assert params.bad_words_token_ids == ids


def test_without_a_tokenizer_bad_words_are_refused_by_name():
    with pytest.raises(
        RequestError, match="without a tokenizer: give bad_words_token_ids"
    ) as found:
        with_bad_words(SamplingParams(bad_words=["x"]), None)
    assert found.value.param == "bad_words"


def test_a_word_of_too_many_tokens_is_refused_by_name(tokenizer_folders):
    tokenizer = Tokenizer.load(tokenizer_folders["byte-level"])
    said = r"bad_words: '\u033a.* has \d+ tokens, .* 1 to 64"
    with pytest.raises(RequestError, match=said) as found:
        with_bad_words(SamplingParams(bad_words=["fox", "\u033a" * 256]), tokenizer)
    assert found.value.param == "bad_words"
