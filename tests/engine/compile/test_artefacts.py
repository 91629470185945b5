"""Artefacts are found again by their content alone, and are never loaded from a stranger."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import piece_keys
import pytest
import torch
from piece_keys import all_ingredients

import kiln
from kiln.engine.compile import compiled_model, keys
from kiln.engine.compile.keys import piece_ingredients, program_ingredients
from kiln.engine.compile.program import Piece, dumps, loads
from kiln.engine.compile.split import split
from kiln.engine.compile.trace import trace
from kiln.engine.errors import ConfigError, PieceError, SealedCacheError
from kiln.jit_kernels.compile.ingredients import differing, key_of

ROOT = Path(kiln.__file__).resolve().parents[3]
CPU = torch.device("cpu")
STRANGER = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


class Compiler:
    """Compiles nothing, and counts."""

    def __init__(self):
        self.built, self.loaded = [], []

    def build(self, piece, device):
        self.built.append(piece.digest)
        return dumps(piece)

    def load(self, artefact, device):
        piece = loads(Piece, artefact)
        self.loaded.append(piece.digest)
        return piece.function()


@pytest.fixture
def compiler(monkeypatch):
    compiler = Compiler()
    monkeypatch.setattr(compiled_model, "_COMPILERS", {"inductor": compiler})
    return compiler


@pytest.fixture
def stored(tmp_path):
    """Return a function that lists the files of the cache."""
    return lambda: sorted((tmp_path / "cache").rglob("*.kk"))


def test_a_second_start_loads_what_the_first_built(make_model, start, compiler, hidden, stored):
    model = make_model("LlamaForCausalLM")
    first = start(model, "inductor")
    assert len(compiler.built) == len(set(compiler.built)) == 3
    second = start(model, "inductor")
    assert len(compiler.built) == 3
    assert compiler.loaded == compiler.built * 2
    assert torch.equal(hidden(first, 5), hidden(second, 5))
    assert len(stored()) == 4  # the program, and its pieces


def test_models_share_the_pieces_that_are_equal(make_model, start, compiler):
    start(make_model("LlamaForCausalLM", num_hidden_layers=3), "inductor")
    start(make_model("LlamaForCausalLM", num_hidden_layers=9, seed=1), "inductor")
    assert len(compiler.built) == 3


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "spoil",
    [
        _flip,
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(b""),
        lambda path: path.chmod(0o666),
        pytest.param(lambda path: os.chown(path, STRANGER, STRANGER), marks=as_root),
        lambda path: path.replace(path.with_suffix(".gone")),
    ],
    ids=["flipped", "truncated", "empty", "writable by all", "of a stranger", "gone"],
)
def test_what_is_damaged_or_foreign_is_built_again(
    make_model, start, compiler, hidden, stored, spoil
):
    model = make_model("LlamaForCausalLM")
    start(model, "inductor")
    for path in stored():
        spoil(path)
    again = start(model, "inductor")
    assert len(compiler.built) == 6
    assert torch.equal(hidden(again, 4), hidden(model, 4))
    start(model, "inductor")
    assert len(compiler.built) == 6  # and healed


def test_an_artefact_under_the_name_of_another_is_not_loaded(make_model, start, compiler, stored):
    start(make_model("LlamaForCausalLM"), "inductor")
    ours, theirs = stored()[:2]
    theirs.write_bytes(ours.read_bytes())
    start(make_model("LlamaForCausalLM"), "inductor")
    assert len(compiler.built) in (3, 4)  # 3: it was the program, which is traced again
    assert compiler.loaded[3:] == compiler.loaded[:3]


def test_the_modes_of_the_cache_hold_for_pieces(make_model, start, compiler, stored):
    model = make_model("LlamaForCausalLM")
    start(model, "inductor", kernel_cache="ro")
    assert (len(compiler.built), stored()) == (3, [])
    with pytest.raises(SealedCacheError, match="program of a model for cpu"):
        start(model, "inductor", kernel_cache="sealed")
    start(model, "inductor")
    start(model, "inductor", kernel_cache="sealed")
    assert (len(compiler.built), len(stored())) == (6, 4)
    start(model, "inductor", kernel_cache="refresh")
    assert len(compiler.built) == 9


def test_a_failed_build_leaves_nothing_behind(make_model, start, compiler, stored, monkeypatch):
    def fail(piece, device):
        raise PieceError("no compiler")

    monkeypatch.setattr(compiler, "build", fail)
    with pytest.raises(PieceError, match="no compiler"):
        start(make_model("LlamaForCausalLM"), "inductor")
    assert len(stored()) == 1  # the program


@pytest.mark.parametrize("mode", ["inductor", "aot"])
def test_graphs_on_a_cpu_cannot_record_compiled_pieces(make_model, env, mode):
    with pytest.raises(ConfigError, match="KILN_CPU_GRAPHS=emulate"):
        compiled_model.compiled(
            make_model("LlamaForCausalLM"), CPU, env(mode, cpu_graphs="emulate"), print
        )


def test_keys_do_not_depend_on_environment_folder_or_host(tmp_path, small_config):
    (tmp_path / "config.json").write_text(json.dumps(small_config("Qwen3MoeForCausalLM")))
    copy = tmp_path / "elsewhere" / "of another name"
    for folder in ("cache", "engine", "jit_kernels", "kernel_sources", "tools/import_root"):
        ignored = shutil.ignore_patterns("__pycache__", "demo")
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=ignored)
    (tmp_path / "home").mkdir()
    other = {
        "HOME": str(tmp_path / "home"),
        "TMPDIR": str(tmp_path / "home"),
        "HOSTNAME": "another",
        "KILN_JIT_JOBS": "2",
        "KILN_KERNEL_CACHE_DIR": str(tmp_path / "home" / "kernels"),
        "POD_IP": "10.0.0.7",
        "PYTHONHASHSEED": "7",
        "OMP_NUM_THREADS": "2",
    }
    here = json.loads(json.dumps(all_ingredients(tmp_path, 0)))
    out = subprocess.check_output(
        [sys.executable, piece_keys.__file__, str(tmp_path), "1"],
        env=os.environ | other | {"PYTHONPATH": str(copy / "tools" / "import_root")},
        cwd=copy,
        timeout=120,
    )
    there = json.loads(out.splitlines()[-1])
    for one, other_ in zip(here, there, strict=True):
        assert differing([*map(tuple, one)], [*map(tuple, other_)]) == []
        assert key_of([*map(tuple, one)]) == key_of([*map(tuple, other_)])


def test_whatever_changes_a_piece_changes_its_key(make_model, monkeypatch):
    model = make_model("LlamaForCausalLM")
    first, between, _ = split(trace(model, CPU)).pieces
    shape = between.inputs[0]
    pieces = {
        piece_key(first),
        piece_key(between),
        piece_key(replace(between, calls=between.calls[:-1])),
        piece_key(replace(between, outputs=between.outputs[::-1])),
        *(
            piece_key(replace(between, inputs=(replace(shape, **change), *between.inputs[1:])))
            for change in (
                {"dtype": "bfloat16"},
                {"shape": ("n", 33)},
                {"stride": (33, 1)},
                {"device": "cuda:0"},
            )
        ),
        piece_key(between, backend="aot"),
        piece_key(between, options="O3"),
    }
    assert len(pieces) == 10
    for name, value in (
        ("_cpu_instructions", lambda: "AVX9"),
        ("_triton", lambda: "9.9"),
        ("_sources", lambda *folders: "changed"),
        ("target_of", lambda device: "sm_90a"),
        ("schemas_of", lambda names: ["kiln::other(Tensor x) -> ()"]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(keys, name, value)
            pieces.add(piece_key(between))
    monkeypatch.setattr(torch, "__version__", "99.0")
    pieces.add(piece_key(between))
    assert len(pieces) == 16


def piece_key(piece, backend="inductor", options=""):
    return key_of(piece_ingredients(piece, backend, options, CPU))


def test_whatever_changes_a_trace_changes_the_key_of_the_program(make_model, monkeypatch):
    model = make_model("LlamaForCausalLM")
    found = {
        key_of(program_ingredients(model)),
        key_of(program_ingredients(make_model("LlamaForCausalLM", num_hidden_layers=4))),
        key_of(program_ingredients(make_model("LlamaForCausalLM", rms_norm_eps=1e-3))),
    }
    monkeypatch.setattr(keys, "_sources", lambda *folders: "changed")
    found.add(key_of(program_ingredients(model)))
    monkeypatch.setattr(keys, "all_specs", dict)
    found.add(key_of(program_ingredients(model)))
    assert len(found) == 5
