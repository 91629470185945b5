"""Models from the hub: this machine's copy first, and plain words when there is none."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RevisionNotFoundError

from kiln.engine.errors import ModelError
from kiln.engine.models.hub import download


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub with a local copy in tmp_path / local, if that is there; records who was asked."""

    class Hub:
        asked: list[str] = []  # noqa: RUF012 (one a test)
        revisions: set[str | None] = set()  # noqa: RUF012
        files: tuple[str, ...] = ()  # of the repository
        fetched: list[str] = []  # noqa: RUF012
        remote = None  # a folder, or an error

        def __call__(self, model, revision=None, allow_patterns=("*",), local_files_only=False):
            self.revisions.add(revision)
            names = [] if local_files_only else fnmatch_all(self.files, allow_patterns)
            self.fetched += [name for name in names if name not in self.fetched]
            self.asked.append("disk" if local_files_only else "network")
            if local_files_only:
                if not (tmp_path / "local").exists():
                    raise LocalEntryNotFoundError("nothing here")
                return str(tmp_path / "local")
            if isinstance(self.remote, Exception):
                raise self.remote
            return str(self.remote)

    hub = Hub()
    hub.asked, hub.fetched, hub.revisions = [], [], set()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    return hub


def fnmatch_all(names, patterns):
    """Return the names that a pattern matches, as the hub does it: ``*`` takes in ``/``."""
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def fill(folder, *names):
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")


def test_a_complete_copy_is_taken_without_the_network(hub, tmp_path):
    fill(tmp_path / "local", "config.json", "model.safetensors")
    assert download("org/name") == tmp_path / "local"
    assert hub.asked == ["disk"]


@pytest.mark.parametrize("there", [["config.json"], ["model.safetensors"], ["a.safetensors"]])
def test_an_incomplete_copy_is_completed(hub, tmp_path, there):
    fill(tmp_path / "local", *there)
    hub.remote = tmp_path / "remote"
    assert download("org/name") == tmp_path / "remote"
    assert set(hub.asked) == {"disk", "network"}


@pytest.mark.parametrize(
    "shards",
    [
        ["model.safetensors"],
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        ["weights.safetensors"],
    ],
)
def test_the_weights_are_fetched_once_and_not_in_another_format(hub, tmp_path, shards):
    small = ["config.json", "tokenizer.model", "chat_template.jinja"]
    hub.remote = tmp_path / "remote"
    fill(hub.remote, *small)
    if shards != ["model.safetensors"]:
        small.append("model.safetensors.index.json")
        index = {"weight_map": {f"tensor {shard}": shard for shard in shards}}
        (hub.remote / small[-1]).write_text(json.dumps(index))
    others = ["consolidated.safetensors", "original/model.safetensors", "model.fp16.safetensors"]
    hub.files = (*small, *shards, *others, "pytorch_model.bin")
    assert download("org/name") == hub.remote
    assert sorted(hub.fetched) == sorted([*small, *shards])


@pytest.mark.parametrize(("shard", "asked"), [("a", ["disk"]), ("b", ["disk", "network"])])
def test_a_sharded_copy_is_complete_with_every_shard(hub, tmp_path, shard, asked):
    fill(tmp_path / "local", "config.json", "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": f"{shard}.safetensors"}}
    (tmp_path / "local" / "model.safetensors.index.json").write_text(json.dumps(index))
    hub.remote = tmp_path / "remote"
    download("org/name")
    assert list(dict.fromkeys(hub.asked)) == asked


def test_a_revision_is_asked_for_everywhere(hub, tmp_path):
    hub.remote = tmp_path / "remote"
    fill(hub.remote, "config.json")
    download("org/name", "v2")
    assert hub.revisions == {"v2"}
    hub.remote = RevisionNotFoundError("404", response=SimpleNamespace(headers={}, request=None))
    with pytest.raises(ModelError, match=r"'org/name': the hub has no revision 'v9' of it\ngive"):
        download("org/name", "v9")


def test_the_files_of_a_tokenizer_are_fetched_without_weights(hub, tmp_path):
    hub.remote = tmp_path / "remote"
    fill(hub.remote, "tekken.json")
    hub.files = ("tekken.json", "model.safetensors")
    assert download("org/name", weights=False) == hub.remote
    assert hub.fetched == ["tekken.json"]
    fill(tmp_path / "local", "tekken.json")
    hub.asked.clear()
    assert download("org/name", weights=False) == tmp_path / "local"
    assert hub.asked == ["disk"]


def test_an_incomplete_copy_is_what_there_is_when_the_network_fails(hub, tmp_path):
    fill(tmp_path / "local", "config.json")
    hub.remote = OSError("unreachable")
    assert download("org/name") == tmp_path / "local"


def test_offline_and_without_a_copy_the_error_says_what_to_do_in_two_lines(hub):
    hub.remote = LocalEntryNotFoundError("cannot reach the hub\nand much more text")
    with pytest.raises(ModelError) as caught:
        download("org/name")
    first, second = str(caught.value).splitlines()
    assert "'org/name'" in first
    assert "cannot reach the hub" in first
    assert "hf download org/name" in second
