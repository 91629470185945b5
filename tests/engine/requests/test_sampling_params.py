"""Sampling settings: every range is checked, and the field at fault is named."""

from __future__ import annotations

from enum import Enum

import pytest

from kiln.engine.errors import RequestError
from kiln.engine.requests.neutral_settings import NEUTRAL_SETTINGS
from kiln.engine.requests.sampling_params import (
    MAX_COUNT,
    MAX_SEED,
    MAX_STOP_TOKEN_IDS,
    MIN_REPETITION_PENALTY,
    SamplingParams,
)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", MAX_COUNT + 1),
        ("top_k", 2**63),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("max_tokens", 0),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("truncate_prompt_tokens", "3"),
        ("stop", 5),
        ("stop_token_ids", 5),
        ("allowed_token_ids", []),
        ("allowed_token_ids", 5),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", ["1"]),
        ("bad_words", "one text"),
        ("bad_words", [""]),
        ("bad_words", ["a", 1]),
        ("bad_words", ["x"] * 1025),
        ("bad_words_token_ids", [1]),
        ("bad_words_token_ids", [[]]),
        ("bad_words_token_ids", [[1] * 65]),
        ("bad_words_token_ids", [[1, -1]]),
        ("max_tokens", 1.0),
        ("max_tokens", MAX_COUNT + 1),
        ("min_tokens", -1),
        ("min_tokens", 17),  # more than max_tokens
        ("presence_penalty", 2.5),
        ("presence_penalty", "1"),
        ("frequency_penalty", -2.5),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0),
        ("repetition_penalty", 11),
        ("repetition_penalty", 1e-46),  # zero in float32
        ("temperature", 10**400),  # no float holds it
        ("logit_bias", {-1: 1}),
        ("logit_bias", {"5": 1}),
        ("logit_bias", {5: 100.5}),
        ("logit_bias", {5: float("nan")}),
        ("logit_bias", [5]),
        ("logit_bias", {MAX_COUNT + 1: 1}),
        ("logit_bias", dict.fromkeys(range(1025), 1)),
        ("seed", MAX_SEED + 1),
        ("seed", "7"),
        ("logprobs", -1),
        ("logprobs", 21),
        ("stop", ["x"] * 17),
        ("stop", [""]),
        ("stop", ["x" * 257]),
        ("stop", [5]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["1"]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [MAX_COUNT + 1]),
        ("stop_token_ids", [0] * (MAX_STOP_TOKEN_IDS + 1)),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(RequestError, match=f"^{field} must be") as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert len(str(caught.value)) < 200


def test_an_integer_that_python_does_not_print_is_refused_in_words():
    with pytest.raises(RequestError, match=r"^top_k must be .*, got an integer of 16610 bits"):
        SamplingParams(top_k=10**5000)


def test_min_tokens_is_bounded_even_without_max_tokens():
    with pytest.raises(RequestError, match=r"^min_tokens must be at most 2147483647"):
        SamplingParams(min_tokens=MAX_COUNT + 1, max_tokens=None)


def test_the_edges_of_the_ranges_are_inside():
    SamplingParams(temperature=0, top_p=1, top_k=-1, min_p=1, n=128, max_tokens=None, min_tokens=99)
    SamplingParams(seed=-MAX_SEED, logprobs=20, stop=["x" * 256] * 16, max_tokens=1, min_tokens=1)
    SamplingParams(presence_penalty=-2, frequency_penalty=2, repetition_penalty=10)
    SamplingParams(repetition_penalty=MIN_REPETITION_PENALTY, top_k=MAX_COUNT, max_tokens=MAX_COUNT)
    SamplingParams(stop_token_ids=[MAX_COUNT] * MAX_STOP_TOKEN_IDS)
    SamplingParams(logit_bias=dict.fromkeys(range(1024), -100))
    SamplingParams(seed=MAX_SEED, logprobs=0, stop_token_ids=[0], temperature=100)


@pytest.mark.parametrize("field", ["stop", "bad_words"])
def test_half_of_a_surrogate_pair_is_refused(field):
    with pytest.raises(RequestError, match=r"half of a surrogate pair, U\+D800") as caught:
        SamplingParams(**{field: ["a\ud800"]})
    assert caught.value.param == field


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


def test_each_answer_has_a_seed_of_its_own_within_the_range():
    params = SamplingParams(n=3, seed=5)
    assert [params.for_answer(i).seed for i in range(3)] == [5, 6, 7]
    assert {params.for_answer(i).n for i in range(3)} == {1}
    assert SamplingParams(n=2, seed=MAX_SEED).for_answer(1).seed == -MAX_SEED
    assert SamplingParams(n=2, seed=-3).for_answer(0).seed == -3
    assert SamplingParams(n=2).for_answer(1).seed is None


VLLM = {  # the keywords of vLLM 0.22's SamplingParams and their defaults, its private ones aside
    **{"n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
    **{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "stop": None},
    **{"stop_token_ids": None, "ignore_eos": False, "max_tokens": 16, "min_tokens": 0},
    **{"logprobs": None, "prompt_logprobs": None, "flat_logprobs": False, "detokenize": True},
    **{"skip_special_tokens": True, "spaces_between_special_tokens": True, "bad_words": None},
    **{"include_stop_str_in_output": False, "skip_clone": False, "output_text_buffer_length": 0},
    **{"structured_outputs": None, "logit_bias": None, "allowed_token_ids": None},
    **{"extra_args": None, "skip_reading_prefix_cache": None, "thinking_token_budget": None},
    **{"logprob_token_ids": None, "repetition_detection": None, "truncate_prompt_tokens": None},
    **{"logits_processors": None, "guided_decoding": None, "best_of": None},
}


def test_every_keyword_of_vllm_is_accepted_at_its_default():
    for settings in ({name: value} for name, value in VLLM.items()):
        assert SamplingParams(**settings) == SamplingParams()
    assert SamplingParams(**VLLM) == SamplingParams()


@pytest.mark.parametrize("kind", ["CUMULATIVE", "FINAL_ONLY", "DELTA"])
def test_an_output_kind_of_vllm_is_known_by_its_name(kind):
    member = Enum("RequestOutputKind", ["CUMULATIVE", "DELTA", "FINAL_ONLY"])[kind]
    if kind == "DELTA":
        with pytest.raises(RequestError, match="output_kind is not supported yet"):
            SamplingParams(output_kind=member)
    else:
        assert SamplingParams(output_kind=member) == SamplingParams()


@pytest.mark.parametrize("name", NEUTRAL_SETTINGS)
def test_a_keyword_of_vllm_that_would_act_is_refused_by_name(name):
    with pytest.raises(RequestError, match=f"^{name} is not supported yet: leave it out") as caught:
        SamplingParams(**{name: [7]})
    assert caught.value.param == name


def test_an_unknown_keyword_names_the_nearest():
    with pytest.raises(RequestError, match=r"^temprature is not .*; did you mean temperature\?"):
        SamplingParams(temprature=1)
    with pytest.raises(RequestError, match=r"^zzz is not a sampling parameter$"):
        SamplingParams(zzz=1)


def test_a_text_that_is_not_made_has_no_stop_strings():
    with pytest.raises(RequestError, match=r"^detokenize must be true with stop strings"):
        SamplingParams(detokenize=False, stop="x")
