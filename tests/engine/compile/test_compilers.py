"""What Inductor and AOTInductor make of pieces; compiled once, and kept between runs of the tests.

The key of an artefact covers the code that builds it, so an artefact of older code is never used.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kiln
from kiln import LLM, SamplingParams
from kiln.cache.keys import digest_of
from kiln.engine.compile import aot, compiled_model, inductor
from kiln.engine.compile.code import Call, Value
from kiln.engine.compile.program import Input, Piece
from kiln.engine.compile.prove import difference
from kiln.engine.errors import PieceError
from kiln.engine.models.registry import known_families
from kiln.engine.runner import loaded_model
from kiln.jit_kernels.declare.settings import settings

ROOT = Path(kiln.__file__).resolve().parents[3]
DEMO = ROOT / "engine" / "demo"
CPU = torch.device("cpu")
COUNTS = (7, 1, 2, 33, 3, 64)  # tokens of a step
PROMPTS = ["What is 123 + 456?", "Reverse the word planet.", "a"]


@pytest.fixture
def kept(pytestconfig):
    """The folder of the cache that outlives this run, one for each place where torch may lie.

    The place is part of Inductor's own keys: it compiles its C++ again for another one.
    """
    place = digest_of(torch.__file__.encode()).hex()[:8]
    return {"kernel_cache_dir": pytestconfig.option.programs / f"kernels-{place}"}


def demo(monkeypatch, mode, kept):
    env = replace(settings(), compile=mode, **kept)
    monkeypatch.setattr(loaded_model, "settings", lambda: env)
    return LLM(str(DEMO), device="cpu", dtype="float32", max_model_len=128, max_chunk_tokens=5)


def answers(llm):
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=16))
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.quick(1)
@pytest.mark.parametrize("mode", ["inductor", "aot"])
def test_greedy_tokens_and_hidden_states_are_the_models(monkeypatch, hidden, kept, mode):
    plain, compiled = demo(monkeypatch, "off", kept), demo(monkeypatch, mode, kept)
    assert answers(compiled) == answers(plain)
    model, pieces = plain.core.runner.loaded.model, compiled.core.runner.loaded.model
    assert isinstance(pieces, compiled_model.CompiledModel)
    for tokens in COUNTS:
        torch.testing.assert_close(hidden(pieces, tokens), hidden(model, tokens))


@pytest.mark.deep
@pytest.mark.parametrize("architecture", sorted(known_families()))
def test_inductor_compiles_every_family(make_model, start, hidden, kept, architecture):
    model = make_model(architecture)
    pieces = start(model, "inductor", **kept)
    for tokens in COUNTS:
        torch.testing.assert_close(hidden(pieces, tokens), hidden(model, tokens))


SECOND_START = """
import json, sys
from kiln import LLM, SamplingParams
from kiln.engine.compile import aot, compiled_model, inductor

def refuse(*arguments, **named):
    raise AssertionError("a second start must not do this")

compiled_model.trace = aot.build = inductor.build = refuse
if sys.argv[2] == "inductor":
    from torch._inductor import cpp_builder
    cpp_builder.CppBuilder.build = cpp_builder.run_compile_cmd = refuse
llm = LLM(sys.argv[1], device="cpu", dtype="float32", max_model_len=64)
[output] = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4))
heavy = [name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules]
print(json.dumps([list(output.outputs[0].token_ids), heavy]))
"""


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("mode", "heavy"), [("inductor", ["torch._dynamo", "torch._inductor", "sympy"]), ("aot", [])]
)
def test_a_second_start_runs_no_compiler(monkeypatch, kept, mode, heavy):
    llm = demo(monkeypatch, mode, kept)
    [output] = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4))
    environ = {"KILN_COMPILE": mode, "KILN_KERNEL_CACHE_DIR": str(kept["kernel_cache_dir"])}
    environ |= {"PYTHONPATH": str(ROOT / "tools" / "import_root")}
    out = subprocess.check_output(
        [sys.executable, "-c", SECOND_START, str(DEMO), mode], env=os.environ | environ, timeout=300
    )
    assert json.loads(out.splitlines()[-1]) == [list(output.outputs[0].token_ids), heavy]


TENSOR = Input("float32", ("n", 4), (4, 1), "cpu")
# y = relu(x), then x += y, and memory that nobody writes.
PIECE = Piece(
    (TENSOR,),
    (
        Call("torch.relu", (Value(0),), {}, (1,)),
        Call("Tensor.add_", (Value(0), Value(1)), {}, ()),
        Call("Tensor.new_empty", (Value(1), (3, 4)), {}, (2,)),
    ),
    (1, 2),
)


def relu(x, *, off=0.0, add=True, width=4):
    y = x.relu()
    x.add_(y * add)
    return [y[:, :width] + off, torch.full((3, 4), torch.nan)]


def test_a_package_is_compared_with_its_piece():
    assert difference(PIECE, PIECE.function(), 5) == ""
    assert difference(PIECE, relu, 5) == ""  # memory that nobody writes is not compared
    assert "off by" in difference(PIECE, lambda x: relu(x, off=1e-2), 5)
    assert "off by" in difference(PIECE, lambda x: relu(x, off=torch.nan), 5)
    assert "off by" in difference(PIECE, lambda x: relu(x, add=False), 5)  # what it must mutate
    assert "[5, 3]" in difference(PIECE, lambda x: relu(x, width=3), 5)


@pytest.mark.parametrize(
    ("boot", "message"),
    [
        (aot._BOOT, "exit code 1: .*AOTInductor cannot load"),
        ("import os; os.abort()", "exit code -6"),
        ("import sys; sys.exit('for 2 tokens a result is off')", "result is off"),
    ],
)
def test_a_package_that_fails_in_another_process_is_refused(tmp_path, monkeypatch, boot, message):
    monkeypatch.setattr(aot, "_BOOT", boot)
    (tmp_path / "piece.pt2").write_bytes(b"no package")
    with pytest.raises(PieceError, match=f"does not run with torch.*{message}.*KILN_COMPILE="):
        aot._prove(PIECE, tmp_path / "piece.pt2", CPU)


@pytest.mark.parametrize("compiler", [aot, inductor])
def test_what_is_no_artefact_is_refused(compiler):
    with pytest.raises(PieceError, match="cannot load a compiled piece"):
        compiler.load(b"no artefact", CPU)


@pytest.mark.parametrize("compiler", [aot, inductor])
def test_a_compiler_that_fails_is_named(compiler):
    broken = replace(PIECE, calls=(Call("ops.kiln.moe.default", (Value(0),), {}, (1,)),))
    with pytest.raises(PieceError, match=r"Inductor cannot compile a piece.*missing value"):
        compiler.build(replace(broken, outputs=(1,)), CPU)
