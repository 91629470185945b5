"""AWQ: which fields and tensors are read, what is refused, and by which name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from packers.awq import PACKERS, config
from quantised_modules import Module, save
from quantised_modules import config as read

from kiln.engine.errors import ModelError
from kiln.engine.models.scheme import DENSE

NAME = "model.layers.0.mlp.gate_proj"
SIZE = (16, 64)
CONFIG = config(32)


def packed(outputs: int = 16, inputs: int = 64, size: int = 32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator, dtype=torch.float64)
    packer = next(one for one in PACKERS if one.config["group_size"] == size)
    return dict(packer.pack(weight, generator).tensors)


def module(folder: Any, tensors: dict[str, torch.Tensor], fields: Any = CONFIG, **more: Any) -> Any:
    save(folder, NAME, tensors)
    return Module(folder, fields, NAME, **{"size": SIZE, **more})


def test_a_word_holds_its_outputs_in_the_order_of_awq(tmp_path):
    words = torch.full((32, 1), 0x75316420, dtype=torch.int32)
    tensors = {
        "qweight": words,
        "qzeros": torch.zeros(1, 1, dtype=torch.int32),
        "scales": torch.ones(1, 8, dtype=torch.float16),
    }
    values = module(tmp_path, tensors, size=(8, 32)).values()
    assert torch.equal(values, torch.arange(8.0, dtype=torch.float64)[:, None].expand(8, 32))


def test_both_spellings_and_the_file_beside_say_the_same(tmp_path):
    older = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
    wanted = read(tmp_path, CONFIG)
    assert read(tmp_path, {"quant_method": "awq", **older}) == wanted
    (tmp_path / "quant_config.json").write_text(json.dumps(older))
    assert read(tmp_path, None) == wanted
    assert read(tmp_path, CONFIG) == wanted
    (tmp_path / "quant_config.json").write_text(json.dumps({**older, "q_group_size": 64}))
    with pytest.raises(ModelError, match=r"quant_config.json says something else"):
        read(tmp_path, CONFIG)
    (tmp_path / "quant_config.json").unlink()
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32}))
    with pytest.raises(ModelError, match=r"quantize_config.json says something else"):
        read(tmp_path, CONFIG)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(({"version": one}, f"version is '{one}'") for one in ("gemv", "gemv_fast", "llm-awq")),
        ({"version": "marlin"}, "of AWQ Kiln supports only 'gemm'"),
        ({"checkpoint_format": "gemv"}, "checkpoint_format is 'gemv'"),
        ({"zero_point": False}, "zero_point is False, .* load the base model instead"),
        ({"bits": 3}, "bits is 3, AWQ has 4 bits"),
        ({"bits": 4, "w_bit": 8}, "bits is 4, but w_bit is 8"),
        ({"group_size": 0}, "group_size is 0, want a number of inputs, or -1"),
        ({"group_size": "32"}, "group_size is '32', want an integer"),
        ({"modules_to_not_convert": "lm_head"}, "want a list of strings"),
        ({"rotation": "hadamard"}, "rotation is 'hadamard', Kiln does not know this field"),
    ],
    ids=str,
)
def test_what_kiln_does_not_read_is_named(tmp_path, fields, message):
    with pytest.raises(ModelError, match=rf"quantization_config\.{message}|{message}"):
        read(tmp_path, {**CONFIG, **fields})


def test_a_module_without_a_list_is_quantised_unless_it_has_a_float_weight(tmp_path):
    assert module(tmp_path, packed()).scheme() != DENSE
    assert module(tmp_path, {"weight": torch.ones(SIZE)}).scheme() == DENSE
    with pytest.raises(ModelError, match=rf"{NAME}\.qweight is missing"):
        module(tmp_path, {"scales": torch.ones(2, 16)}).read()


def test_a_list_names_parts_of_names_and_must_agree_with_the_tensors(tmp_path):
    listed = {**CONFIG, "modules_to_not_convert": ["visual", "layers.0.mlp"]}
    other = {**CONFIG, "modules_to_not_convert": ["visual"]}
    dense = {"weight": torch.ones(SIZE)}
    assert module(tmp_path, dense, listed).scheme() == DENSE
    with pytest.raises(ModelError, match=rf"is quantised, but .* tensor {NAME}\.weight and no"):
        module(tmp_path, dense, other).scheme()
    assert module(tmp_path, dense, other, role="router").scheme() == DENSE
    assert module(tmp_path, packed(), other).scheme() != DENSE
    with pytest.raises(ModelError, match=rf"is not quantised, but .* tensor {NAME}\.qweight"):
        module(tmp_path, packed(), listed).scheme()


def change(tensors: dict[str, torch.Tensor], suffix: str, value: Any) -> None:
    if value is None:
        del tensors[suffix]
    else:
        tensors[suffix] = value(tensors[suffix])


def nan_at(place: tuple[int, ...]) -> Any:
    def put(tensor: torch.Tensor) -> torch.Tensor:
        tensor[place] = torch.nan
        return tensor

    return put


@pytest.mark.parametrize(
    ("suffix", "value", "message"),
    [
        ("qzeros", None, "is missing"),
        ("scales", None, "is missing"),
        ("qweight", lambda one: one.to(torch.int64), "is int64, but quantization_config implies"),
        ("qweight", lambda one: one[:-1], r"is I32 \[63, 2\], config.json implies \[64, 2\]"),
        ("qzeros", lambda one: one[:1], r"is I32 \[1, 2\], config.json implies \[2, 2\]"),
        ("scales", lambda one: one.T, r"is F16 \[16, 2\], config.json implies \[2, 16\]"),
        ("scales", lambda one: -one, "has the scale -"),
        ("scales", nan_at((1, 3)), "has the scale nan"),
        ("scales", lambda one: one.to(torch.int32), "is int32, but"),
    ],
)
def test_damaged_tensors_are_named(tmp_path, suffix, value, message):
    tensors = packed()
    change(tensors, suffix, value)
    with pytest.raises(ModelError, match=rf"tensor {NAME}\.{suffix} .*{message}"):
        module(tmp_path, tensors).read()


def test_sizes_that_the_format_cannot_hold_are_told_in_numbers(tmp_path):
    with pytest.raises(ModelError, match=r"qweight has 8 outputs in a word, .* the 12 of it"):
        module(tmp_path, packed(), size=(12, 64)).read()
    with pytest.raises(ModelError, match=r"qweight has 48 inputs, no multiple of group_size 32"):
        module(tmp_path, packed(), size=(16, 48)).read()
