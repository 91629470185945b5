"""Log-probabilities in OpenAI's formats, and stop strings that are special tokens, over HTTP."""

from __future__ import annotations

import json

import pytest

from kiln.engine.requests.request import CompletionOutput, Logprob
from kiln.engine.server.logprobs import LogprobWriter
from kiln.engine.text.tokenizer import Tokenizer

URL = "/v1/completions"


@pytest.mark.parametrize("byte_first", [True, False])
def test_of_two_tokens_with_one_text_the_sampled_one_is_listed(tokenizer_folders, byte_first):
    """In a vocabulary like Llama's the letter and its byte have the same text."""
    llama = Tokenizer.load(tokenizer_folders["llama"])
    letter, byte = (llama.backend.token_to_id(form) for form in ("a", "<0x61>"))
    other = llama.backend.token_to_id("b")
    sampled, likely = (byte, letter) if byte_first else (letter, byte)
    entries = {
        sampled: Logprob(-3.0, 3, "a"),
        other: Logprob(-2.0, 2, "b"),
        likely: Logprob(-1.0, 1, "a"),
    }
    part = CompletionOutput(0, "a", [sampled], logprobs=[entries], text_offsets=[0])
    written = LogprobWriter(llama, 2).completion(part)
    assert written["top_logprobs"] == [{"a": -3.0, "b": -2.0}]
    assert written["token_logprobs"] == [-3.0]


def _streamed(server, body):
    offsets, reasons = [], []
    with server.stream("POST", URL, json={**body, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                offsets += (choice["logprobs"] or {}).get("text_offset", [])
                reasons.append(choice.get("stop_reason"))
    return offsets, reasons[-1]


def test_bytes_that_begin_no_character_have_offsets_of_their_own(server, tokenizer):
    lead = tokenizer.backend.token_to_id("ð")  # the first byte of four, again and again
    body = {
        **{"prompt": "x", "temperature": 0, "ignore_eos": True, "logprobs": 0},
        **{"max_tokens": 5, "logit_bias": {str(lead): 100}},
    }
    choice = server.post(URL, json=body).json()["choices"][0]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    assert choice["text"] == "\N{REPLACEMENT CHARACTER}" * 5
    assert _streamed(server, body)[0] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("least", [0, 3])
def test_a_stop_string_that_is_a_special_token_ends_an_answer(server, least):
    body = {
        **{"prompt": "x", "temperature": 0, "ignore_eos": True, "max_tokens": 8, "logprobs": 0},
        **{"min_tokens": least, "stop": ["nothing", "<|im_end|>"], "logit_bias": {"2": 100}},
    }
    answer = server.post(URL, json=body).json()
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "<|im_end|>")
    assert "<|im_end|>" not in choice["text"]
    assert answer["usage"]["completion_tokens"] == least + 1
    assert _streamed(server, body) == (choice["logprobs"]["text_offset"], "<|im_end|>")
