"""What --hf-overrides says is merged into config.json, for every reader of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kiln import LLM, SamplingParams
from kiln.engine.bench.datasets import RandomTokens
from kiln.engine.cli.options import DEMO_FOLDER
from kiln.engine.errors import ModelError
from kiln.engine.models import registry
from kiln.engine.models.model_folder import ModelFiles, merged
from kiln.engine.models.registry import known_families, read_model, vocabulary_size

YARN = {"rope_type": "yarn", "factor": 2.0}


def folder_with(tmp_path, changes):
    for path in DEMO_FOLDER.iterdir():
        if path.is_file():
            (tmp_path / path.name).symlink_to(path)
    config = json.loads((DEMO_FOLDER / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(merged(config, changes)))
    return tmp_path


def test_objects_are_merged_key_by_key():
    content = {"a": 1, "b": {"c": {"d": 1}, "e": 2}, "f": {"g": 1}, "h": [1, 2]}
    given = {"a": None, "b": {"c": {"i": 3}}, "f": 4, "h": [5], "j": {"k": 6}}
    kept = json.dumps(content)
    assert merged(content, given) == {
        "a": None,
        "b": {"c": {"d": 1, "i": 3}, "e": 2},
        "f": 4,
        "h": [5],
        "j": {"k": 6},
    }
    assert json.dumps(content) == kept


def test_a_model_is_that_of_a_file_with_these_values(tmp_path):
    changes = {"rope_parameters": YARN, "rms_norm_eps": 0.01, "eos_token_id": None}
    changed = folder_with(tmp_path, changes)
    assert read_model(changed) == read_model(DEMO_FOLDER, overrides=changes)
    assert read_model(changed) != read_model(DEMO_FOLDER)

    def logprobs(folder, **settings):
        with LLM(str(folder), device="cpu", dtype="float32", max_model_len=64, **settings) as llm:
            params = SamplingParams(temperature=0, max_tokens=4, logprobs=2)
            return llm.generate("What is 17 + 25?", params)[0].outputs[0].logprobs

    assert logprobs(changed) == logprobs(DEMO_FOLDER, hf_overrides=changes)
    assert logprobs(changed) != logprobs(DEMO_FOLDER)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sparse_sinks": 3}, r"^--hf-overrides: sparse_sinks is 3, Kiln does not support this"),
        ({"rope_parameters": {"beam": 1}}, r"^--hf-overrides: rope_parameters\.beam is 1, Kiln"),
        (
            {"rope_parameters": {"type": "x"}},
            r"^--hf-overrides: rope_parameters\.type is 'x', but rope_type",
        ),
        ({"hidden_act": "x"}, r"^--hf-overrides: hidden_act is 'x'"),
        ({"vocab_size": None}, r"^--hf-overrides: vocab_size is missing, want an integer"),
        ({"architectures": ["T5Model"]}, r"^--hf-overrides: architectures is \['T5Model'\]"),
        ({"dtype": "int3"}, r"^--hf-overrides: dtype is 'int3'"),
        ({"quantization_config": {"quant_method": "x"}}, r"^--hf-overrides: quantization_config"),
    ],
)
def test_a_value_that_cannot_be_served_is_refused_as_from_the_flag(given, message):
    with pytest.raises(ModelError, match=message):
        read_model(DEMO_FOLDER, overrides=given)


def test_values_of_the_file_are_still_refused_as_from_the_file(tmp_path):
    changed = folder_with(tmp_path, {"hidden_act": "x"})
    with pytest.raises(ModelError, match=r"^/.*config\.json: hidden_act is 'x'"):
        read_model(changed, overrides={"rms_norm_eps": 1e-5})


def test_an_architecture_without_a_head_embeds_texts():
    settings = {"device": "cpu", "dtype": "float32", "max_model_len": 64}
    architecture = json.loads((DEMO_FOLDER / "config.json").read_text())["architectures"][0]
    headless = architecture.replace("ForCausalLM", "Model")
    with LLM(str(DEMO_FOLDER), hf_overrides={"architectures": [headless]}, **settings) as llm:
        assert len(llm.embed("a")[0].outputs.embedding) == 192


def test_a_load_draws_from_the_vocabulary():
    for size in (9, 768):
        drawn = vocabulary_size(ModelFiles(DEMO_FOLDER, {"vocab_size": size}))
        samples = RandomTokens(drawn, input_tokens=40, output_tokens=1).draw(99, seed=0)
        assert max(token for sample in samples for token in sample.prompt) == size - 1


def test_a_wrapped_text_model_gets_what_is_in_text_config(tmp_path, monkeypatch):
    own = known_families()["MistralForCausalLM"]
    wrapped = replace(own, wrappers=("WrapperForConditionalGeneration",))
    monkeypatch.setattr(registry, "known_families", lambda: {"MistralForCausalLM": wrapped})
    config = json.loads((DEMO_FOLDER / "config.json").read_text())
    path = tmp_path / "config.json"
    text = {**config, "model_type": wrapped.model_type, "sliding_window": None}
    path.write_text(json.dumps({"architectures": [wrapped.wrappers[0]], "text_config": text}))
    _, plain = read_model(tmp_path)
    _, changed = read_model(tmp_path, overrides={"text_config": {"rms_norm_eps": 0.5}})
    assert (plain.norm_eps, changed.norm_eps) == (1e-6, 0.5)
    with pytest.raises(ModelError, match=r"^--hf-overrides: hidden_act is 'x'"):
        read_model(tmp_path, overrides={"text_config": {"hidden_act": "x"}})
    with pytest.raises(ModelError, match=r"^--hf-overrides: rms_norm_eps is 0\.5, .*text_config"):
        read_model(tmp_path, overrides={"rms_norm_eps": 0.5})
