"""``kiln warmup --model`` builds the pieces that a start of the model then finds."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from weakref import WeakValueDictionary

import pytest
import torch

from kiln.engine.cli.main import main
from kiln.engine.compile import compiled_model
from kiln.engine.config import EngineConfig, KVConfig, ModelConfig
from kiln.engine.distributed import group as distributed_group
from kiln.engine.distributed.group import Group
from kiln.engine.errors import SealedCacheError
from kiln.engine.runner import loaded_model
from kiln.engine.runner.model_runner import ModelRunner
from kiln.jit_kernels.compile import warmup
from kiln.jit_kernels.declare.settings import settings


@pytest.fixture
def kiln(tmp_path, monkeypatch, capsys):
    """Run a command line over a cache of its own; no kernels, for they have their own tests."""
    monkeypatch.setattr(warmup, "jobs_for", lambda *arguments: [])

    def run(*arguments, **environment):
        with monkeypatch.context() as patch:
            patch.setenv("KILN_KERNEL_CACHE_DIR", str(tmp_path / "cache"))
            for name, value in environment.items():
                patch.setenv(name, value)
            settings.cache_clear()
            code = main([str(argument) for argument in arguments])
        settings.cache_clear()
        return code, *capsys.readouterr()

    return run


def start(folder, tmp_path, monkeypatch, group=None):
    sealed = {"kernel_cache": "sealed", "kernel_cache_dir": tmp_path / "cache"}
    env = replace(settings(), compile="eager", **sealed)
    monkeypatch.setattr(loaded_model, "settings", lambda: env)
    model = ModelConfig(str(folder), device="cpu", load_format="dummy", max_model_len=32)
    return ModelRunner(EngineConfig(model, KVConfig(num_blocks=8)), None, group)


def test_a_start_finds_what_a_warm_up_built(kiln, folder, tmp_path, monkeypatch):
    model = folder(num_hidden_layers=4)
    with pytest.raises(SealedCacheError, match="kiln warmup --model"):
        start(model, tmp_path, monkeypatch)
    for built in (1, 0):  # the program; pieces that are not compiled have no artefacts
        code, out, _ = kiln("warmup", "--model", model, "--json", KILN_COMPILE="eager")
        told = json.loads(out)
        assert (code, told["pieces"], told["piece_artefacts_built"]) == (0, 3, built)
    runner = start(model, tmp_path, monkeypatch)
    assert isinstance(runner.loaded.model, compiled_model.CompiledModel)


def test_every_rank_finds_what_a_warm_up_for_several_built(kiln, folder, tmp_path, monkeypatch):
    model = folder(num_attention_heads=4, num_key_value_heads=2)
    alone = SimpleNamespace(allreduce=lambda *_: None, shutdown=lambda: None)  # nobody is asked
    monkeypatch.setattr(loaded_model, "sum_by_kernels", lambda *_: {})
    # Groups of earlier tests may still have the names that programs are kept under.
    monkeypatch.setattr(distributed_group, "_groups", WeakValueDictionary())

    def begin(rank):
        group = Group(rank, 2, torch.device("cpu"), alone)
        try:
            return start(model, tmp_path, monkeypatch, group)
        finally:
            group.close()

    kiln("warmup", "--model", model, KILN_COMPILE="eager")
    with pytest.raises(SealedCacheError):
        begin(0)
    code, out, _ = kiln("warmup", "--model", model, "--tp", "2", "--json", KILN_COMPILE="eager")
    assert (code, json.loads(out)["pieces"]) == (0, 3)
    for rank in range(2):
        assert isinstance(begin(rank).loaded.model, compiled_model.CompiledModel)


def test_a_warm_up_tells_what_it_built(kiln, folder):
    _, out, err = kiln("warmup", "--model", folder(), KILN_COMPILE="eager")
    assert "3 pieces by eager for cpu: 1 artefacts built in" in out
    assert "compiled pieces" in err


def test_without_the_toggle_there_are_no_pieces(kiln, folder, tmp_path):
    _, out, _ = kiln("warmup", "--model", folder(), "--json")
    assert "pieces" not in json.loads(out)
    assert not (tmp_path / "cache" / "pieces").exists()


def test_pieces_are_pruned_as_kernels_are(kiln, folder, tmp_path):
    kiln("warmup", "--model", folder(), KILN_COMPILE="eager")
    assert len(list((tmp_path / "cache" / "pieces").rglob("*.kk"))) == 1
    _, out, _ = kiln("kernels", "prune", "--max-mb", "0")
    assert out.startswith("removed 1 entries")
    assert list((tmp_path / "cache").rglob("*.kk")) == []
    kiln("warmup", "--model", folder(), KILN_COMPILE="eager", KILN_KERNEL_CACHE_MAX_MB="0")
    assert list((tmp_path / "cache").rglob("*.kk")) == []
