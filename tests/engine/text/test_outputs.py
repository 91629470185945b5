"""Assembling an answer from the engine's outputs."""

from __future__ import annotations

import shutil

import pytest

from kiln.engine.requests.request import TokenLogprobs, TokenOutput
from kiln.engine.requests.sampling_params import SamplingParams
from kiln.engine.text.outputs import CompletionStream, begin_answers
from kiln.engine.text.prompts import Prompt
from kiln.engine.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folders):
    return Tokenizer.load(tokenizer_folders["byte-level"])


def push_all(stream, token_ids, reason="length"):
    deltas = []
    for index, token in enumerate(token_ids):
        last = index == len(token_ids) - 1
        deltas.append(stream.push(TokenOutput("r", [token], reason if last else None)))
        if stream.stopped_early:
            break
    return deltas


def test_the_deltas_add_up_to_the_completion(tokenizer):
    ids = tokenizer.encode("Hello 😀, wörld")
    stream = CompletionStream(tokenizer, SamplingParams(), index=2)
    deltas = push_all(stream, ids)
    assert stream.completion.text == "".join(delta.text for delta in deltas) == "Hello 😀, wörld"
    assert stream.completion.token_ids == ids
    assert [delta.finish_reason for delta in deltas] == [None] * (len(ids) - 1) + ["length"]
    assert (stream.completion.index, stream.completion.finish_reason) == (2, "length")


def test_text_held_back_comes_with_the_last_delta(tokenizer):
    ids = tokenizer.encode("wait ST")
    stream = CompletionStream(tokenizer, SamplingParams(stop="STOP"))
    deltas = push_all(stream, ids)
    assert deltas[-1].text.endswith("ST")
    assert stream.completion.text == "wait ST"
    assert not stream.stopped_early


def test_a_stop_string_ends_the_answer_before_the_core_knows(tokenizer):
    ids = tokenizer.encode("one STOP two")
    stream = CompletionStream(tokenizer, SamplingParams(stop="STOP"))
    deltas = push_all(stream, ids)
    assert len(deltas) < len(ids)
    assert stream.stopped_early
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "STOP")
    assert stream.completion.text == "one "


@pytest.mark.parametrize("reason", [None, "length"])
def test_tokens_that_came_together_end_where_they_would_one_by_one(tokenizer, reason):
    ids = tokenizer.encode("one STOP two")
    params = SamplingParams(stop="STOP", logprobs=0)
    logprobs = [TokenLogprobs(token, -1.0, 1, []) for token in ids]
    alone = CompletionStream(tokenizer, params)
    for token, entry in zip(ids, logprobs, strict=True):
        alone.push(TokenOutput("r", [token], logprobs=[entry]))
        if alone.stopped_early:
            break
    together = CompletionStream(tokenizer, params)
    together.push(TokenOutput("r", ids, reason, logprobs=logprobs))
    assert together.completion == alone.completion
    assert len(together.completion.token_ids) < len(ids)
    assert together.stopped_early == (reason is None)


def test_a_stop_string_completed_by_the_last_token_needs_no_abort(tokenizer):
    ids = tokenizer.encode("one STOP")
    stream = CompletionStream(tokenizer, SamplingParams(stop="STOP"))
    push_all(stream, ids)
    assert not stream.stopped_early
    assert (stream.completion.finish_reason, stream.completion.text) == ("stop", "one ")


def test_a_stop_token_is_text_only_if_asked_for(tokenizer):
    ids = [*tokenizer.encode("Hi"), 2]
    for include, skip, text in [
        (False, False, "Hi"),
        (True, False, "Hi<|im_end|>"),
        (True, True, "Hi"),
    ]:
        params = SamplingParams(include_stop_str_in_output=include, skip_special_tokens=skip)
        stream = CompletionStream(tokenizer, params)
        push_all(stream, ids, reason="stop")
        assert (stream.completion.text, stream.completion.token_ids) == (text, ids)


def test_a_word_after_the_prompt_keeps_its_space(tokenizer_folders):
    llama = Tokenizer.load(tokenizer_folders["llama"])
    prompt, answer = llama.encode("The quick"), llama.encode("brown fox", add_special_tokens=False)
    stream = CompletionStream(llama, SamplingParams(), prompt_token_ids=prompt)
    push_all(stream, answer)
    assert stream.completion.text == " brown fox"


END = "<|im_end|>"


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("stop", [END, ["nothing", END, "<|im_start|>"]])
def test_a_stop_string_that_is_a_special_token_is_a_stop_token(tokenizer, skip, include, stop):
    params = SamplingParams(
        stop=stop, ignore_eos=True, skip_special_tokens=skip, include_stop_str_in_output=include
    )
    (answer,) = begin_answers("r", Prompt([5]), params, tokenizer)
    assert set(answer.new.stop_string_ids) == ({2} if stop == END else {1, 2})
    push_all(answer.stream, [*tokenizer.encode("Hi"), 2], reason="stop")
    done = answer.stream.completion
    assert (done.finish_reason, done.stop_reason) == ("stop", END)
    assert done.text == ("Hi" + END if include else "Hi")
    assert done.token_ids == [*tokenizer.encode("Hi"), 2]


def test_a_stop_string_before_the_stop_token_wins(tokenizer):
    params = SamplingParams(stop=["STOP", END], logprobs=0)
    stream = CompletionStream(tokenizer, params)
    ids = [*tokenizer.encode("one STOP two"), 2]
    entries = [TokenLogprobs(token, -1.0, 1, []) for token in ids]
    stream.push(TokenOutput("r", ids, "stop", logprobs=entries))
    done = stream.completion
    assert (done.text, done.stop_reason) == ("one ", "STOP")
    assert len(done.token_ids) == len(done.logprobs) == len(done.text_offsets) < len(ids)


def test_a_special_token_that_the_model_cannot_draw_is_no_stop_token(tokenizer_folders, tmp_path):
    folder = shutil.copytree(tokenizer_folders["byte-level"], tmp_path / "model")
    (folder / "config.json").write_text('{"vocab_size": 2}')
    small = Tokenizer.load(folder)
    assert small.special_id("<|im_start|>") == 1
    params = SamplingParams(stop=[END, "<|im_start|>"])
    (answer,) = begin_answers("r", Prompt([5]), params, small)
    assert answer.new.stop_string_ids == (1,)


@pytest.mark.parametrize("kind", ["byte-level", "llama", "metaspace", "wordpiece"])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("prompt", [[], "The"])
def test_each_token_says_at_which_character_it_begins(tokenizer_folders, kind, skip, prompt):
    tokenizer = Tokenizer.load(tokenizer_folders[kind])
    ids = tokenizer.encode("Hé😀日 world<|im_end|> 👩‍👩‍👧 x</s>y", add_special_tokens=False)
    before = tokenizer.encode(prompt) if prompt else []
    params = SamplingParams(skip_special_tokens=skip, logprobs=0)
    whole = CompletionStream(tokenizer, params, prompt_token_ids=before)
    entries = [TokenLogprobs(token, -1.0, 1, []) for token in ids]
    whole.push(TokenOutput("r", ids, "length", logprobs=entries))
    parts = CompletionStream(tokenizer, params, prompt_token_ids=before)
    for token, entry in zip(ids, entries, strict=True):
        parts.push(TokenOutput("r", [token], logprobs=[entry]))
    text, offsets = whole.completion.text, whole.completion.text_offsets
    assert parts.completion.text_offsets == offsets
    assert offsets == sorted(offsets)
    if kind == "wordpiece":
        return
    for token, start, end in zip(ids, offsets, [*offsets[1:], len(text)], strict=True):
        own = tokenizer.token_bytes(token).decode(errors="replace")
        shown = "" if skip and token in tokenizer.special_ids else own
        if "\N{REPLACEMENT CHARACTER}" not in shown and (start or not shown.startswith(" ")):
            assert text[start:end] == shown


def test_the_parts_of_a_character_have_its_offset(tokenizer_folders):
    llama = Tokenizer.load(tokenizer_folders["llama"])
    first = llama.backend.token_to_id("<0x00>")
    world = llama.encode("world", add_special_tokens=False)
    broken = [first + 0xE8, first + 0xAA, first + 0xFF, *world[:1]]
    for ids, wanted in [
        ([*(first + byte for byte in "😀".encode()), *world[:1], 2], [0, 0, 0, 0, 1]),
        (broken, [0, 0, 1, 2]),  # two bytes of a character, and one that begins nothing
    ]:
        stream = CompletionStream(llama, SamplingParams(logprobs=0), prompt_token_ids=world)
        entries = [TokenLogprobs(token, -1.0, 1, []) for token in ids]
        stream.push(TokenOutput("r", ids, "length", logprobs=entries))
        assert stream.completion.text_offsets[: len(wanted)] == wanted
        assert stream.completion.text_offsets[4:] in ([], [1, len(stream.completion.text)])
