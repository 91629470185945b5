"""A model is split at its attention operators; equal layers share a piece."""

from __future__ import annotations

import json

import pytest
import torch
from depth import at_depth

from kiln.engine.attention.context import AttentionStep, attention_step
from kiln.engine.attention.operator import attention
from kiln.engine.compile.code import Call, Value, assemble
from kiln.engine.compile.functions import function_of, name_of
from kiln.engine.compile.parameters import named_tensors, structure_of
from kiln.engine.compile.program import Program, dumps, loads
from kiln.engine.compile.split import split
from kiln.engine.compile.trace import trace
from kiln.engine.errors import PieceError
from kiln.engine.models.registry import known_families

CPU = torch.device("cpu")
ATTENTION = name_of(attention)


def program_of(model):
    return split(trace(model, CPU))


def test_many_layers_have_three_pieces(make_model):
    count = at_depth(8, 32)
    program = program_of(make_model("LlamaForCausalLM", num_hidden_layers=count))
    assert len(program.pieces) == 3
    targets = [step.target for step in program.steps]
    begin, *between, end = [target for target in targets if target != ATTENTION]
    assert targets[1::2] == [ATTENTION] * count
    layers = [step.args[3] for step in program.steps if step.target == ATTENTION]
    assert layers == list(range(count))
    assert (len(between), set(between)) == (count - 1, {"piece 1"})
    assert (begin, end) == ("piece 0", "piece 2")


def test_layers_of_two_kinds_have_a_piece_for_each_way_into_the_next(make_model):
    """Layer 1 is dense, layers 0 and 2 have experts."""
    model = make_model("Qwen2MoeForCausalLM", num_hidden_layers=4)
    targets = [step.target for step in program_of(model).steps if step.target != ATTENTION]
    assert targets == ["piece 0", "piece 1", "piece 2", "piece 1", "piece 3"]


def test_every_input_but_tokens_is_a_weight_and_every_weight_of_the_layers_is_read(make_model):
    model = make_model("Qwen3ForCausalLM")
    program = program_of(model)
    weights = set(named_tensors(model)) - {"head.weight.values"}
    assert set(program.inputs) == {"token_ids", "positions"} | weights


@pytest.mark.quick(3)
@pytest.mark.parametrize("architecture", sorted(known_families()))
@torch.inference_mode()
def test_a_program_survives_saving(make_model, architecture):
    program = program_of(make_model(architecture))
    text = dumps(program)
    assert loads(Program, text) == program
    assert dumps(program_of(make_model(architecture, num_hidden_layers=3))) == text


def test_equal_structure_gives_equal_text_and_each_difference_another(make_model):
    one = structure_of(make_model("LlamaForCausalLM"))
    assert structure_of(make_model("LlamaForCausalLM", seed=1)) == one
    for other in (
        make_model("LlamaForCausalLM", rms_norm_eps=1e-3),
        make_model("LlamaForCausalLM", intermediate_size=64),
        make_model("LlamaForCausalLM", hidden_act="gelu"),
        make_model("LlamaForCausalLM", num_hidden_layers=4),
        make_model("LlamaForCausalLM", dtype=torch.bfloat16),
    ):
        assert structure_of(other) != one


class Broken:
    """A model whose forward pass is ``step``."""

    def __init__(self, step):
        self.step = step
        self.weight = torch.ones(4, 4)

    def forward(self, token_ids, positions):
        return self.step(self.weight, token_ids, positions)


OUTSIDE = torch.ones(4)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda w, ids, positions: w[ids.item()], "cannot trace"),
        (lambda w, ids, positions: w[ids] + OUTSIDE, "no part of it"),
        (lambda w, ids, positions: w[ids] * (2 if ids.shape[0] > 16 else 1), "how many tokens"),
        (lambda w, ids, positions: w[ids] * (2 if ids.shape[0] == 37 else 1), "cannot trace"),
        (lambda w, ids, positions: torch.linalg.inv(w)[ids], "cannot be saved"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(step, message, caplog):
    Broken.__module__ = "kiln.test"  # as a model of Kiln's
    with pytest.raises(PieceError, match=message):
        program_of(Broken(step))


def test_a_size_that_is_not_the_number_of_tokens_may_not_cross_the_operator(make_model):
    Broken.__module__ = "kiln.test"

    def step(weight, ids, positions):
        twice = weight[torch.cat([ids, ids])]
        out = twice.new_empty(twice.shape[0], 4)
        attention(twice, positions, out, 0)
        return out[: ids.shape[0]]

    with pytest.raises(PieceError, match="want tokens alone"):
        program_of(Broken(step))


def test_order_is_kept_where_operators_write_to_their_arguments(make_model):
    """The residual is written by a piece, read by none of the operators, and written again."""
    Broken.__module__ = "kiln.test"
    calls = []

    class Layer:
        def __call__(self, step, qkv, positions, out):
            calls.append(qkv.clone())
            out.copy_(qkv * 3)
            qkv.fill_(7)

    def step(weight, ids, positions):
        x = weight[ids]
        total = torch.zeros_like(x)
        for index in range(3):
            total.add_(x)
            out = torch.empty_like(x)
            attention(x, positions, out, index)
            total.add_(x)  # what the operator left there
            x = out + total
        return x

    model = Broken(step)
    program = program_of(model)
    run = program.bind([piece.function() for piece in program.pieces], named_tensors(model))
    ids, positions = torch.tensor([0, 3, 1]), torch.arange(3)
    with attention_step(AttentionStep([Layer()] * 3, None, None)):
        wanted, seen = model.forward(ids, positions), list(calls)
        calls.clear()
        assert torch.equal(run(ids, positions), wanted)
    assert all(map(torch.equal, calls, seen))


@torch.inference_mode()
def test_every_kind_of_argument_survives_saving(make_model):
    Broken.__module__ = "kiln.test"

    def step(weight, ids, positions):
        x = torch.cat([weight[ids], torch.ones_like(positions[:, None], dtype=torch.float64)], 1)
        out = x.new_empty((positions.shape[0], 2))
        attention(x, positions, out, 0)
        return torch.sum(x[:, 1:3] * 0.5, dim=1, keepdim=True).to(torch.float32) - torch.inf

    model = Broken(step)
    program = loads(Program, dumps(program_of(model)))
    assert program == program_of(model)
    run = program.bind([piece.function() for piece in program.pieces], named_tensors(model))
    ids, positions = torch.tensor([0, 3, 1]), torch.arange(3)
    with attention_step(AttentionStep([lambda *arguments: None], None, None)):
        assert torch.equal(run(ids, positions), model.forward(ids, positions))


def test_a_saved_graph_can_only_call_what_has_a_name():
    assert function_of("torch.nn.functional.linear") is torch.nn.functional.linear
    for name in ("os.system", "torch.load", "builtins.eval", "ops.kiln.nothing.default", "print"):
        with pytest.raises(PieceError, match="does not have"):
            function_of(name)
    with pytest.raises(PieceError, match="cannot be saved"):
        name_of(print)


@pytest.mark.parametrize("text", [b"", b"{}", b"[1]", json.dumps({"inputs": 3}).encode()])
def test_a_text_that_is_no_program_is_refused(text):
    with pytest.raises(PieceError, match="cannot be read"):
        loads(Program, text)


def test_values_are_released_after_their_last_use():
    alive = []

    class Big:
        def __init__(self):
            alive.append(self)

        def __del__(self):
            pass

    import weakref

    seen = []

    def make():
        big = Big()
        alive.clear()
        seen.append(weakref.ref(big))
        return big

    def look(*values):
        return [one() is not None for one in seen]

    calls = [
        Call("make", (), {}, (0,)),
        Call("make", (), {}, (1,)),
        Call("look", (Value(0),), {}, (2,)),
        Call("look", (Value(1),), {}, (3,)),
    ]
    run = assemble([], calls, (2, 3), {"make": make, "look": look}.__getitem__)
    assert run() == ([True, True], [False, True])
