"""Weights of every form: joined, padded, stacked and multiplied as their formulas say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from depth import at_depth

from kiln.engine.layers import weight as weight_module
from kiln.engine.layers.block_weight import BlockGroupWeight, BlockWeight
from kiln.engine.layers.channel_weight import ChannelWeight, StaticWeight, TokenWeight
from kiln.engine.layers.group_weight import Group4Weight, Group8Weight
from kiln.engine.layers.weight import DenseWeight, Weight
from kiln.engine.layers.weight_parts import MixedWeight, join, stack, weight_of

FP8 = torch.float8_e4m3fn


def codes(outputs: int, inputs: int) -> torch.Tensor:
    return (30 * torch.randn(outputs, inputs)).to(FP8)


def scales(*shape: int) -> torch.Tensor:
    return 0.001 + 0.01 * torch.rand(*shape)


def channel(outputs: int, inputs: int) -> Weight:
    return ChannelWeight(codes(outputs, inputs), scales(outputs, 1))


def int8(outputs: int, inputs: int) -> Weight:
    return TokenWeight(codes(outputs, inputs).float().to(torch.int8), scales(outputs, 1))


def static(outputs: int, inputs: int, own: float = 0.02) -> Weight:
    return StaticWeight(codes(outputs, inputs), scales(outputs, 1), torch.tensor([own]))


def block(outputs: int, inputs: int, first: int = 0, kind: type = BlockWeight) -> Weight:
    rows = -(-(first + outputs) // 128)
    return kind.of(codes(outputs, inputs), scales(rows, -(-inputs // 128)), first)


def group4(outputs: int, inputs: int, order: bool = False) -> Weight:
    zeros = torch.randint(0, 17, (outputs, inputs // 32)).short()
    own = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    draw = torch.Generator().manual_seed(inputs)
    group_of = torch.randperm(inputs, generator=draw).int() // 32 if order else None
    return Group4Weight.of(own, scales(outputs, inputs // 32), zeros, group_of)


def group8(outputs: int, inputs: int) -> Weight:
    own = torch.randint(0, 256, (outputs, inputs), dtype=torch.uint8)
    return Group8Weight(own, scales(outputs, inputs // 64))


FORMS: dict[str, Callable[[int, int], Weight]] = {
    "dense": lambda *size: DenseWeight(torch.randn(*size)),
    "channel": channel,
    "token": lambda *size: TokenWeight(codes(*size), scales(size[0], 1)),
    "int8": int8,
    "static": static,
    "block": block,
    "block from the middle": lambda *size: block(*size, first=40),
    "block group": lambda *size: block(*size, kind=BlockGroupWeight),
    "group4": group4,
    "group4 in any order": lambda *size: group4(*size, order=True),
    "group8": group8,
}
INPUTS = 192


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(4)


def whole(weight: Weight) -> torch.Tensor:
    """Return all weights, without the inputs that a form has behind."""
    return weight.dequantized(slice(None), torch.float32)[..., :INPUTS]


def exact(weight: Weight, x: torch.Tensor) -> torch.Tensor:
    """Return the product in float64, of what the form makes of x."""
    if isinstance(weight, MixedWeight):
        return torch.cat([exact(part, x) for part in weight.parts], dim=1)
    seen = weight.activations(x).double()
    return seen @ weight.dequantized(slice(None), torch.float32).double().T


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape
    error = (found.double() - wanted).abs() / wanted.abs().amax().clamp(min=1e-9)
    assert float(error.max()) < 2e-6


@pytest.mark.parametrize("name", FORMS)
def test_parts_of_one_form_are_joined_and_padded(name):
    parts = [FORMS[name](rows, INPUTS) for rows in (128, 64, 20)]
    weight = join(parts)
    assert type(weight) is type(parts[0])
    assert torch.equal(whole(weight), torch.cat([whole(part) for part in parts]))
    longer = weight.padded(300)
    assert torch.equal(whole(longer), torch.cat([whole(weight), torch.zeros(88, INPUTS)]))
    assert weight.padded(212) is weight
    rows = slice(100, 205)
    assert torch.equal(whole(longer)[rows], longer.dequantized(rows, torch.float32)[:, :INPUTS])


@pytest.mark.parametrize("name", FORMS)
def test_outputs_are_put_in_another_order(name):
    weight = FORMS[name](256, INPUTS)
    inside = [*range(1, 128), 0, *range(128, 256)]  # every output stays in its block of 128
    for order in (inside, torch.randperm(256).tolist()):
        again = weight.reordered(order)
        assert type(again) is type(weight)
        assert torch.equal(whole(again), whole(weight)[order])
        if isinstance(again, BlockWeight) and name != "block from the middle":
            assert again.is_by_block == (order is inside)


def test_outputs_of_several_forms_stay_within_theirs():
    mixed = join([FORMS["dense"](6, INPUTS), static(4, INPUTS)])
    order = [5, 0, 1, 2, 3, 4, 7, 6, 9, 8]
    again = mixed.reordered(order)
    assert again.form == mixed.form
    assert torch.equal(whole(again), whole(mixed)[order])
    with pytest.raises(ValueError, match="from one form of weights to another"):
        mixed.reordered([6, *range(6), 7, 8, 9])


@pytest.mark.parametrize("name", FORMS)
def test_an_operator_makes_the_weight_again(name):
    weight = FORMS[name](64, INPUTS)
    again = weight_of(weight.form, weight.tensors)
    assert type(again) is type(weight)
    assert torch.equal(whole(again), whole(weight))
    mixed = join([weight, FORMS["channel" if name == "dense" else "dense"](20, INPUTS), weight])
    again = weight_of(mixed.form, mixed.tensors)
    assert isinstance(again, MixedWeight)
    assert len(again.parts) == 3
    assert torch.equal(whole(again), whole(mixed))


def test_only_neighbours_of_one_form_and_one_input_scale_become_one():
    dense, one, other = DenseWeight(torch.randn(8, INPUTS)), static(8, INPUTS), static(8, INPUTS, 1)
    mixed = join([dense, dense, one, one, other, MixedWeight((other, dense)), dense])
    assert isinstance(mixed, MixedWeight)
    assert [part.out_features for part in mixed.parts] == [16, 16, 16, 16]
    assert mixed.out_features == 64
    ordered, otherwise = group4(8, INPUTS, order=True), group4(8, INPUTS)
    assert [part.out_features for part in join([ordered, otherwise, ordered]).parts] == [8, 8, 8]
    assert torch.equal(whole(mixed), torch.cat([whole(part) for part in mixed.parts]))
    assert torch.equal(mixed.dequantized(slice(10, 50), torch.float32), whole(mixed)[10:50])
    unequal = join([block(130, INPUTS), dense])  # blocks have inputs behind
    assert unequal.dequantized(slice(120, 135), torch.float32).shape == (15, 256)
    assert torch.equal(
        unequal.dequantized(slice(130, None), torch.float32)[:, :INPUTS], dense.values
    )


@pytest.mark.parametrize("tile_bytes", [1, 3 * 128 * INPUTS * 4, 2**26])
@pytest.mark.parametrize("name", [*FORMS, "mixed"])
def test_products_in_tiles_are_those_of_the_formula(monkeypatch, name, tile_bytes):
    monkeypatch.setattr(weight_module, "TILE_BYTES", tile_bytes)
    if name == "mixed":
        weight = join([static(200, INPUTS), static(100, INPUTS, 0.5), block(300, INPUTS)])
    else:
        weight = FORMS[name](600, INPUTS)
    for rows in at_depth((1, 7), (1, 2, 7, 33)):
        x, bias = torch.randn(rows, INPUTS), torch.randn(600)
        wanted = exact(weight, x)
        for own in (None, bias):
            out = torch.full((rows, 600), torch.nan)
            weight.product(x, out, own)
            full = wanted if own is None else wanted + own.double()
            assert_near(out, full)
            assert_near(weight.linear(x, own), full)


@pytest.mark.parametrize("tile_bytes", [1, 2**26])
@pytest.mark.parametrize("name", [*FORMS, "mixed"])
def test_grouped_products_take_each_row_to_its_expert(monkeypatch, name, tile_bytes):
    monkeypatch.setattr(weight_module, "TILE_BYTES", tile_bytes)
    if name == "mixed":
        experts = [
            join([static(160, INPUTS, 0.02 + 0.3 * i), channel(32, INPUTS)]) for i in (1, 2, 3)
        ]
    elif name == "static":
        experts = [static(192, INPUTS, own) for own in (0.02, 0.3, 0.007)]
    else:
        experts = [FORMS[name](192, INPUTS) for _ in range(3)]
    weight = stack(iter(experts), 3)
    assert weight.out_features == 192
    assert torch.equal(whole(weight), torch.stack([whole(one) for one in experts]))
    x, counts = torch.randn(11, INPUTS), (4, 0, 5)
    ends = torch.tensor(counts).cumsum(0).int()
    of_rows = torch.tensor([0] * 4 + [2] * 5 + [1] * 2)  # two rows behind the last end
    found = weight.grouped(x, ends, of_rows)
    assert found.shape == (11, 192)
    assert_near(found[:4], exact(experts[0], x[:4]))
    assert_near(found[4:9], exact(experts[2], x[4:9]))


def test_experts_that_differ_are_told():
    for first, second, said in (
        (channel(8, 64), int8(8, 64), "expert 1 is int8"),
        (channel(8, 64), ChannelWeight(codes(9, 64), scales(9, 1)), r"\[9, 64\], the first"),
        (group4(8, 64), Group4Weight(*group4(8, 64).tensors[:2]), "other tensors"),
    ):
        with pytest.raises(ValueError, match=said):
            stack(iter([first, second]), 2)


def test_two_files_cannot_declare_one_form():
    with pytest.raises(TypeError, match="declare ChannelWeight"):
        type("ChannelWeight", (Weight,), {"__module__": "elsewhere"})
