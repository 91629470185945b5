"""Finding a model's folder and its end-of-answer tokens."""

from __future__ import annotations

import json

import pytest

from kiln.engine.config import ModelConfig
from kiln.engine.errors import ModelError
from kiln.engine.models import model_folder
from kiln.engine.models.eos import eos_token_ids
from kiln.engine.models.model_folder import (
    ModelFiles,
    find_model_files,
    model_vocab_size,
    read_json,
    resolve_model_folder,
)


def write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def test_a_folder_is_itself(tmp_path):
    assert resolve_model_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("model", ["/no/such/folder", "./missing", "missing", "a/b/c", "~/no-such"])
def test_a_path_that_is_no_folder_is_a_model_error_and_asks_no_hub(model, monkeypatch):
    monkeypatch.setattr(model_folder, "download", lambda model: pytest.fail("asked the hub"))
    with pytest.raises(ModelError, match="no such folder"):
        resolve_model_folder(model)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "model.gguf").write_text("")
    with pytest.raises(ModelError, match="no such folder"):
        resolve_model_folder(str(tmp_path / "model.gguf"))


def test_a_hub_id_that_cannot_be_had_is_a_model_error(monkeypatch):
    import huggingface_hub

    def fails(model, **options):
        raise FileNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    with pytest.raises(ModelError, match=r"'org/name'.*\(offline\)"):
        resolve_model_folder("org/name")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "cannot be read as JSON"), (b"\xff", "cannot be read"), (b"[1]", "contains a list")],
)
def test_a_broken_json_file_is_a_model_error_naming_it(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        read_json(tmp_path / "config.json")
    assert "config.json" in str(caught.value)


TOO_MUCH = {"nesting": "[" * 100_000, "digits": '{"a": ' + "9" * 5000 + "}"}


@pytest.mark.parametrize("text", TOO_MUCH)
def test_json_beyond_the_limits_of_python_is_a_model_error(tmp_path, text):
    (tmp_path / "config.json").write_text(TOO_MUCH[text])
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        read_json(tmp_path / "config.json")


def test_the_generation_config_comes_before_the_config(tmp_path):
    assert eos_token_ids(ModelFiles(tmp_path)) == frozenset()
    write(tmp_path, config={"eos_token_id": 3})
    assert eos_token_ids(ModelFiles(tmp_path)) == {3}
    write(tmp_path, generation_config={"eos_token_id": [4, 5]})
    assert eos_token_ids(ModelFiles(tmp_path)) == {4, 5}
    write(tmp_path, generation_config={"temperature": 1.0})
    assert eos_token_ids(ModelFiles(tmp_path)) == {3}


@pytest.mark.parametrize("token", ["<end>", {"content": "<end>", "lstrip": False}])
def test_the_tokenizers_own_is_added_wherever_its_id_stands(tmp_path, token):
    write(tmp_path, config={"eos_token_id": 3})
    write(tmp_path, tokenizer={"added_tokens": [{"id": 8, "content": "<end>"}]})
    write(tmp_path, special_tokens_map={"eos_token": token})
    assert eos_token_ids(ModelFiles(tmp_path)) == {3, 8}
    (tmp_path / "special_tokens_map.json").unlink()
    write(tmp_path, tokenizer_config={"eos_token": token})
    assert eos_token_ids(ModelFiles(tmp_path)) == {3, 8}
    decoder = {"9": {"content": "<end>"}}
    write(tmp_path, tokenizer_config={"eos_token": token, "added_tokens_decoder": decoder})
    assert eos_token_ids(ModelFiles(tmp_path)) == {3, 9}


@pytest.mark.parametrize(
    "files",
    [
        {"added_tokens": {"<end>": 8}},
        {"tokenizer": {"model": {"vocab": {"<end>": 8}}}},
        {"tokenizer": {"model": {"vocab": [["<end>", 0.0]]}}, "added_tokens": {"<end>": 8}},
    ],
)
def test_the_tokenizers_own_is_found_in_older_folders(tmp_path, files):
    write(tmp_path, tokenizer_config={"eos_token": "<end>"}, **files)
    assert eos_token_ids(ModelFiles(tmp_path)) == {8}


OUTSIDE = [-1, 50, 2**40]


@pytest.mark.parametrize("place", ["config", "generation_config"])
def test_ids_outside_of_the_vocabulary_are_dropped_with_a_warning(tmp_path, caplog, place):
    write(tmp_path, config={"vocab_size": 50})
    write(tmp_path, **{place: {"eos_token_id": [3, *OUTSIDE], "vocab_size": 50}})
    assert eos_token_ids(ModelFiles(tmp_path)) == {3}
    assert [record.args[1] for record in caplog.records] == OUTSIDE
    assert "vocabulary has 50 tokens" in caplog.text


def test_a_tokenizer_with_one_token_too_many_has_no_eos_that_the_model_cannot_draw(tmp_path):
    write(tmp_path, config={"eos_token_id": 3, "vocab_size": 50})
    write(tmp_path, tokenizer_config={"eos_token": "<end>"}, added_tokens={"<end>": 50})
    assert eos_token_ids(ModelFiles(tmp_path)) == {3}


@pytest.mark.parametrize("place", ["config", "generation_config"])
@pytest.mark.parametrize("ids", ["2", [[2]], [2, "3"], True, 2.0, {"a": 1}, "9" * 200])
def test_an_entry_that_is_no_token_id_is_refused_by_name(tmp_path, place, ids):
    write(tmp_path, **{place: {"eos_token_id": ids}})
    with pytest.raises(ModelError, match=rf"{place}\.json: eos_token_id is ") as caught:
        eos_token_ids(ModelFiles(tmp_path))
    assert len(str(caught.value)) < len(str(tmp_path)) + 200


@pytest.mark.parametrize(
    "files",
    [
        {
            "tokenizer_config": {
                "eos_token": "</s>",
                "added_tokens_decoder": {"x": {"content": "</s>"}},
            }
        },
        {"tokenizer_config": {"eos_token": "</s>", "added_tokens_decoder": [1]}},
        {"tokenizer_config": {"eos_token": ["</s>"]}, "added_tokens": {"</s>": 2}},
        {"tokenizer_config": {"eos_token": "</s>"}, "added_tokens": {"</s>": "two"}},
        {"tokenizer_config": {"eos_token": "</s>"}, "tokenizer": {"added_tokens": ["</s>"]}},
    ],
)
def test_a_tokenizer_whose_eos_cannot_be_read_is_refused_by_name(tmp_path, files):
    write(tmp_path, **files)
    with pytest.raises(ModelError, match=r"the id of the tokenizer's eos_token .*</s>.* cannot be"):
        eos_token_ids(ModelFiles(tmp_path))


def test_overrides_of_the_config_come_before_all_files(tmp_path):
    write(
        tmp_path,
        config={"eos_token_id": 3, "vocab_size": 50},
        generation_config={"eos_token_id": 4},
    )
    files = ModelFiles(tmp_path, {"eos_token_id": [5, 60], "vocab_size": 60})
    assert eos_token_ids(files) == {5}
    assert model_vocab_size(files) == 60
    assert eos_token_ids(ModelFiles(tmp_path, {"eos_token_id": None})) == {4}
    with pytest.raises(ModelError, match=r"^--hf-overrides: eos_token_id is '5'"):
        eos_token_ids(ModelFiles(tmp_path, {"eos_token_id": "5"}))


def test_a_model_that_wraps_a_language_model_has_its_vocabulary_and_eos(tmp_path):
    null = {"eos_token_id": None}
    write(tmp_path, config={**null, "text_config": {"eos_token_id": [3, 50], "vocab_size": 50}})
    assert model_vocab_size(ModelFiles(tmp_path)) == 50
    assert eos_token_ids(ModelFiles(tmp_path)) == {3}
    write(tmp_path, config={"eos_token_id": 4, "text_config": {"eos_token_id": 3}})
    assert eos_token_ids(ModelFiles(tmp_path)) == {4}
    assert eos_token_ids(ModelFiles(tmp_path), vocab_size=4) == frozenset()
    write(tmp_path, config={"vocab_size": 9, "text_config": {"vocab_size": None}})
    assert model_vocab_size(ModelFiles(tmp_path)) == 9


def test_another_tokenizer_brings_its_own_eos(tmp_path):
    model, other = tmp_path / "model", tmp_path / "other"
    for folder in (model, other):
        folder.mkdir()
    write(model, config={"eos_token_id": 3}, tokenizer_config={"eos_token": "<a>"})
    write(model, added_tokens={"<a>": 7})
    write(other, tokenizer_config={"eos_token": "<b>"}, added_tokens={"<b>": 8}, tokenizer={})
    files = find_model_files(ModelConfig(str(model), tokenizer=str(other)))
    assert files == ModelFiles(model, {}, other)
    assert eos_token_ids(files) == {3, 8}
    assert find_model_files(ModelConfig(str(model)).at(model, other)) == files


def test_a_revision_belongs_to_a_repository(tmp_path, monkeypatch):
    asked = []

    def download(*name, weights):
        asked.append((*name, weights))
        return tmp_path

    monkeypatch.setattr(model_folder, "download", download)
    (tmp_path / "tokenizer.json").touch()
    for settings in (
        {"revision": "v2", "tokenizer": "org/other"},
        {"revision": "v2", "tokenizer_revision": "v3"},
    ):
        find_model_files(ModelConfig("org/name", **settings))
    both = [("org/name", "v2", True), ("org/other", None, False)]
    assert asked == [*both, both[0], ("org/name", "v3", False)]
    for settings in ({"revision": "v2"}, {"tokenizer_revision": "v2"}):
        with pytest.raises(ModelError, match=rf"revision 'v2': {tmp_path} is a folder, which has"):
            find_model_files(ModelConfig(str(tmp_path), **settings))


def test_another_tokenizer_must_be_one(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer '.*': .* has none: give a folder"):
        find_model_files(ModelConfig(str(tmp_path), tokenizer=str(tmp_path)))
