"""Assembling an answer from the engine's outputs."""

from __future__ import annotations

import pytest

from kiln.engine.requests.request import TokenLogprobs, TokenOutput
from kiln.engine.requests.sampling_params import SamplingParams
from kiln.engine.text.outputs import CompletionStream
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
