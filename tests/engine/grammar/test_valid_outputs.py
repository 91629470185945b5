"""A model of random weights gives valid outputs, alone and beside others, whose tokens stay."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from pathlib import Path

import pytest
from depth import at_depth
from random_grammars import random_form

from kiln.engine.errors import RequestError
from kiln.engine.llm import LLM
from kiln.engine.requests.sampling_params import SamplingParams

NUM_CASES = at_depth(50, 500)
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "vocab_size": 420,  # more than the tokenizer has
    "eos_token_id": 2,
}
SETTINGS = [
    {"temperature": 0},
    {"temperature": 1},
    {"temperature": 3, "top_k": 20},
    {"temperature": 1, "logprobs": 2},
    {"temperature": 1, "repetition_penalty": 1.3},
]


def nested(depth):
    schema = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


FREE = [
    SamplingParams(temperature=1, seed=seed, max_tokens=40, ignore_eos=True) for seed in range(6)
]


@pytest.fixture(scope="module")
def folder(tokenizer_folders, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "random"
    shutil.copytree(tokenizer_folders["byte-level"], folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(
        str(folder), device="cpu", dtype="float32", load_format="dummy", num_kv_blocks=200
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafting(folder):
    speculative = {"method": "ngram", "num_speculative_tokens": 4}
    settings = {"load_format": "dummy", "num_kv_blocks": 130, "max_num_batched_tokens": 32}
    with LLM(
        str(folder), device="cpu", dtype="float32", speculative_config=speculative, **settings
    ) as llm:
        yield llm


def cases(kind):
    chance = random.Random(kind)
    for number in range(NUM_CASES):
        form, judge = random_form(chance, kind)
        params = SamplingParams(
            max_tokens=1500,
            seed=number,
            structured_outputs=form,
            **SETTINGS[number % len(SETTINGS)],
        )
        yield f"{kind} {number}", params, form, judge


def completions(llm, params):
    return [
        one.outputs[0] for one in llm.generate([f"p{i % 7}" for i in range(len(params))], params)
    ]


@pytest.mark.parametrize("kind", ["json", "regex", "choice", "grammar"])
def test_every_output_is_valid(llm, kind):
    made = list(cases(kind))
    alone = completions(llm, FREE)
    found = completions(llm, [*FREE, *(params for _, params, _, _ in made)])
    free, own = found[: len(FREE)], found[len(FREE) :]
    assert [one.token_ids for one in free] == [one.token_ids for one in alone], (
        "others change nothing"
    )
    for (name, _, form, judge), one in zip(made, own, strict=True):
        assert one.finish_reason == "stop", (name, form, one.text, one.error)
        assert judge(one.text), (name, form, one.text)


@pytest.mark.parametrize("kind", ["json", "grammar"])
def test_drafts_chunks_and_preemption_change_no_token(llm, drafting, kind):
    made = [params for _, params, _, _ in cases(kind)][:24]
    wanted = [one.token_ids for one in completions(llm, made)]
    before = drafting.core.stats()
    assert [one.token_ids for one in completions(drafting, made)] == wanted
    after = drafting.core.stats()
    assert after.spec_decode_num_accepted_tokens > before.spec_decode_num_accepted_tokens


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("kiln.engine.grammar.constraint.time.thread_time", itertools.count().__next__),
        ("kiln.engine.requests.late_masks.Pace.patience", 0.0),
    ],
)
def test_masks_that_take_long_change_no_token(llm, monkeypatch, place, value):
    made = [params for _, params, _, _ in cases("json")][:12]
    wanted = [one.token_ids for one in completions(llm, [*FREE, *made])]
    before = llm.core.stats()
    monkeypatch.setattr(place, value)
    assert [one.token_ids for one in completions(llm, [*FREE, *made])] == wanted
    after = llm.core.stats()
    if "Pace" in place:
        assert after.structured_outputs_missed > before.structured_outputs_missed


def test_log_probabilities_are_those_before_the_mask(llm):
    params = SamplingParams(
        temperature=0, logprobs=3, structured_outputs={"choice": ["zz", "yy"]}, max_tokens=5
    )
    free = SamplingParams(temperature=0, logprobs=3, max_tokens=1, ignore_eos=True)
    (own,), (without,) = completions(llm, [params]), completions(llm, [free])
    top = sorted(own.logprobs[0].items(), key=lambda one: one[1].rank)
    assert top[0][1] == next(iter(without.logprobs[0].values()))
    assert own.logprobs[0][own.token_ids[0]].rank > 3


def test_outputs_of_n_differ_and_are_all_valid(llm):
    form, judge = random_form(random.Random(4), "json")
    params = SamplingParams(n=5, seed=1, max_tokens=600, structured_outputs=form)
    texts = [one.text for one in llm.generate(["x"], params)[0].outputs]
    assert all(map(judge, texts))
    assert len(set(texts)) > 1


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"regex": "(?=a)b"}, "look-around"),
        ({"json": {"properties": {"a": {"not": {}}}}}, "not"),
        ({"json": "{"}, "is not JSON"),
        ({"json": {"type": 5}}, "type must be"),
        ({"json": {"$ref": "http://other/schema"}}, "http://other/schema"),
        ({"grammar": "root ::= unknown"}, "unknown"),
        ({"grammar": "start: /a"}, "lexer error"),
        ({"choice": ["x" * 200_000]}, "at most"),
        ({"json": "[" * 300 + "]" * 300}, "must be a JSON Schema"),
        ({"json": nested(150)}, "levels"),
    ],
)
def test_a_bad_grammar_is_refused_by_name(llm, form, says):
    with pytest.raises(RequestError, match="prompt 0: structured_outputs") as error:
        completions(llm, [SamplingParams(structured_outputs=form)])
    assert says in str(error.value)
    assert completions(llm, [SamplingParams(max_tokens=1)]), "the engine continues"


def test_one_that_fails_later_ends_its_request_alone(llm):
    params = SamplingParams(structured_outputs={"regex": "(a|aa|aaa){500}b"}, max_tokens=9)
    free, failed = completions(llm, [FREE[0], params])
    assert failed.finish_reason == "error"
    assert "structured_outputs: lexer error: too many expressions" in failed.error
    assert free.token_ids == completions(llm, FREE[:1])[0].token_ids


def test_the_parameters_are_of_one_kind_and_named():
    for given, says in [
        ({}, "exactly one of"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice"),
        ({"regexp": "a"}, "no field 'regexp'"),
        ({"choice": []}, "choice"),
        ({"structural_tag": "{}"}, "structural_tag"),
        ("a", "StructuredOutputsParams"),
    ]:
        with pytest.raises(RequestError, match="structured_outputs") as error:
            SamplingParams(structured_outputs=given)
        assert says in str(error.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"allowed_token_ids": [5]}, "leave no token"),
        ({"min_tokens": 5}, "lower min_tokens"),
    ],
)
def test_settings_that_leave_no_token_end_the_request_by_name(llm, settings, says):
    params = SamplingParams(structured_outputs={"choice": ["yes"]}, max_tokens=9, **settings)
    (failed,) = completions(llm, [params])
    assert failed.finish_reason == "error"
    assert says in failed.error


def test_adapters_and_grammars_in_one_batch():
    demo = Path(__file__).resolve().parents[3] / "engine" / "demo"
    adapters = {path.name: str(path) for path in sorted((demo / "adapters").iterdir())}
    form, judge = random_form(random.Random(7), "json")
    names = [None, *adapters, None, *adapters]
    params = [
        SamplingParams(
            temperature=0.7,
            seed=index,
            max_tokens=900,
            structured_outputs=form if index < 3 else None,
        )
        for index in range(len(names))
    ]
    with LLM(str(demo), device="cpu", dtype="float32", lora_modules=adapters) as llm:
        found = llm.generate(["What is 17 + 25?"] * len(names), params, lora=names)
        free = llm.generate(["What is 17 + 25?"] * 3, params[3:], lora=names[3:])
    texts = [one.outputs[0].text for one in found]
    assert all(map(judge, texts[:3]))
    assert texts[3:] == [one.outputs[0].text for one in free]


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["json", "regex"])
def test_ranks_give_the_same_tokens(folder, llm, kind):
    made = [params for _, params, _, _ in cases(kind)][:12]
    wanted = [one.token_ids for one in completions(llm, made)]
    with LLM(
        str(folder), device="cpu", dtype="float32", load_format="dummy", num_kv_blocks=200,
        tensor_parallel_size=2,
    ) as two:  # fmt: skip
        assert [one.token_ids for one in completions(two, made)] == wanted
