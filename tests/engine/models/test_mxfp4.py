"""MXFP4 experts as gpt-oss stores them: exact values, rows in turns, and shares of ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from packers.mxfp4 import PACKERS, VALUES
from packers.packer import Packed
from quantised_modules import CPU
from quantised_modules import config as read
from safetensors.torch import load_file, save_file

from kiln import LLM, SamplingParams
from kiln.engine.errors import ModelError
from kiln.engine.layers.mxfp4_weight import MXFP4Weight
from kiln.engine.models.safetensors_weights import SafetensorsWeights
from kiln.engine.models.scheme import DENSE, Part
from kiln.engine.models.split import Share, Split, all_of

(PACKER,) = PACKERS
LAYER = "model.layers.0.mlp.experts"
INNER, HIDDEN, COUNT = 96, 64, 3


def experts(
    layer: str = LAYER, inner: int = INNER, hidden: int = HIDDEN, count: int = COUNT
) -> dict[str, Packed]:
    """Random modules of all experts of a layer, by name."""
    generator = torch.Generator().manual_seed(len(layer))
    sizes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return {
        f"{layer}.{index}.{name}": PACKER.pack(
            torch.randn(*size, generator=generator, dtype=torch.float64) * 0.3, generator
        )
        for index in range(count)
        for name, size in sizes.items()
    }


def write(folder: Path, tensors: Any) -> SafetensorsWeights:
    save_file(tensors, folder / "model.safetensors")
    return SafetensorsWeights(folder)


def part(source: Any, name: str, outputs: Share, inputs: Share) -> Part:
    return Part(source, "layers.0.experts", name, outputs, inputs, torch.float32, CPU)


def scheme(folder: Path, source: Any, name: str = f"{LAYER}.0.up_proj") -> Any:
    return read(folder, PACKER.config).scheme(name, "gate_up_proj", source)


def test_every_code_with_every_scale_is_exact():
    codes = torch.arange(16, dtype=torch.uint8).repeat(253, 2)  # [scales, 32]
    scales = torch.arange(253, dtype=torch.uint8)[:, None]
    weight = MXFP4Weight.of(codes, scales)
    powers = torch.tensor([math.ldexp(1.0, s - 127) for s in range(253)], dtype=torch.float64)
    wanted = VALUES[codes.long()] * powers[:, None]
    for dtype in (torch.float32, torch.bfloat16):
        got = weight.dequantized(slice(None), dtype)[:, :32]
        assert torch.equal(got, wanted.to(dtype))
        assert torch.isfinite(got).all()


def test_all_experts_are_read_from_the_rows_of_one_tensor(tmp_path):
    made = experts()
    source = write(tmp_path, PACKER.stored(made))
    own = scheme(tmp_path, source)
    names = [
        f"{LAYER}.{index}.{name}" for index in range(COUNT) for name in ("gate_proj", "up_proj")
    ]
    inner = Share(32, 40, INNER, 48)
    parts = [part(source, name, inner, all_of(HIDDEN)) for name in names]
    got = own.experts(parts, COUNT).dequantized(slice(None), torch.float32)[..., :HIDDEN]
    assert got.shape == (COUNT, 96, HIDDEN)
    for expert, values in zip(range(COUNT), got, strict=True):
        for name, rows in zip(names[2 * expert :], values.split(48), strict=False):
            assert torch.equal(rows[:40], made[name].weight[inner.place].float())
            assert not rows[40:].any()
    downs = [
        part(source, f"{LAYER}.{e}.down_proj", all_of(HIDDEN), all_of(INNER)) for e in (0, 1, 2)
    ]
    got = own.experts(downs, COUNT).dequantized(slice(None), torch.float32)[..., :INNER]
    assert torch.equal(got, torch.stack([made[one.name].weight for one in downs]).float())
    source.finish()


def test_four_ranks_share_90_blocks(tmp_path):
    made = experts(inner=2880, hidden=32, count=1)
    source = write(tmp_path, PACKER.stored(made))
    own, down = scheme(tmp_path, source), f"{LAYER}.0.down_proj"
    shares = [Split(rank, 4).equal(2880, "experts", "inner elements") for rank in range(4)]
    assert {share.size % 32 for share in shares} == {16}  # 22.5 blocks
    whole = [own.read(part(source, down, all_of(32), share)) for share in shares]
    every = zip(whole, shares, strict=True)
    got = torch.cat(
        [one.dequantized(slice(None), torch.float32)[:, : share.size] for one, share in every], 1
    )
    assert torch.equal(got, made[down].weight.float())
    x = torch.randn(5, 2880, generator=torch.Generator().manual_seed(0))
    sums = torch.zeros(5, 32)
    for one, share in zip(whole, shares, strict=True):
        out = torch.empty(5, 32)
        one.product(x[:, share.place].contiguous(), out, None)
        sums += out
    torch.testing.assert_close(sums, x @ made[down].weight.float().T, rtol=1e-4, atol=1e-4)
    odd = own.read(part(source, down, all_of(32), Share(0, 45, 2880, 45)))
    got = odd.dequantized(slice(None), torch.float32)[:, :45]
    assert torch.equal(got, made[down].weight[:, :45].float())


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        ("scales", lambda one: one.clone().fill_(255), "has the scale 255: want at most 252"),
        ("scales", lambda one: one.clone().fill_(253), "has the scale 253: want at most 252"),
        ("scales", lambda one: one[:, 1:], r"is U8 \[3, 191, 2\], config.json implies"),
        ("scales", None, "is missing"),
        ("blocks", None, "is missing"),
        ("blocks", lambda one: one[1:], r"is \[2, 192, 2, 16\], but config.json implies 3 experts"),
        ("blocks", lambda one: one[:, ::2], r"is U8 \[3, 96, 2, 16\], config.json implies"),
        ("blocks", lambda one: one.view(torch.int8), "is int8, but"),
    ],
)
def test_damaged_tensors_are_named(tmp_path, suffix, change, message):
    name = f"{LAYER}.gate_up_proj_{suffix}"
    tensors = PACKER.stored(experts())
    tensor = tensors.pop(name)
    if change is not None:
        tensors[name] = change(tensor).contiguous()
    source = write(tmp_path, tensors)
    parts = [
        part(source, f"{LAYER}.{index}.{one}", all_of(INNER), all_of(HIDDEN))
        for index in range(COUNT)
        for one in ("gate_proj", "up_proj")
    ]
    with pytest.raises(ModelError, match=rf"{name} .*{message}"):
        scheme(tmp_path, source).experts(parts, COUNT)


def test_only_experts_that_are_not_listed_are_quantised(tmp_path):
    source = write(tmp_path, PACKER.stored(experts()))
    quantization = read(tmp_path, PACKER.config)
    for name, role in (
        ("model.layers.0.self_attn.q_proj", "qkv_proj"),
        ("model.layers.0.mlp.gate", "router"),
        ("model.layers.0.mlp.shared_expert.up_proj", "gate_up_proj"),
        ("lm_head", "lm_head"),
        ("model.embed_tokens", "embed_tokens"),
    ):
        assert quantization.scheme(name, role, source) == DENSE
    listed = {**PACKER.config, "modules_to_not_convert": ["model.layers.*.mlp.experts"]}
    name = f"{LAYER}.0.up_proj"
    assert quantization.scheme(name, "gate_up_proj", source) != DENSE
    assert read(tmp_path, listed).scheme(name, "gate_up_proj", source) == DENSE
    with pytest.raises(ModelError, match=r"experts.0.w1: Kiln reads MXFP4 only for experts'"):
        scheme(tmp_path, source).read(part(source, f"{LAYER}.0.w1", all_of(1), all_of(HIDDEN)))
    with pytest.raises(ModelError, match="rounding is 'up', Kiln does not know this field"):
        read(tmp_path, {**PACKER.config, "rounding": "up"})


def test_a_model_computes_what_its_twin_of_floats_computes(tmp_path, small_config):
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER}
    save_random(plain, small_config("Qwen3MoeForCausalLM", **sizes))
    tensors = load_file(plain / "model.safetensors")
    layers = sorted({name.rsplit(".", 3)[0] for name in tensors if ".experts." in name})
    assert layers
    count = 1 + max(int(name.split(".")[-3]) for name in tensors if ".experts." in name)
    made = {name: one for layer in layers for name, one in experts(layer, count=count).items()}
    rest = {name: one for name, one in tensors.items() if ".experts." not in name}
    twin = {f"{name}.weight": one.weight.float() for name, one in made.items()}
    save_file(rest | twin, plain / "model.safetensors")
    packed.mkdir()
    save_file(rest | PACKER.stored(made), packed / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = PACKER.config
    (packed / "config.json").write_text(json.dumps(config))
    wanted, got = log_probabilities(plain), log_probabilities(packed)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)
    assert wanted.std() > 0.01


def save_random(folder: Path, fields: Any) -> None:
    """Write a model of random weights in float32."""
    import transformers

    torch.manual_seed(1)
    config = transformers.Qwen3MoeConfig.from_dict({**fields, "eos_token_id": None})
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)
    model.save_pretrained(folder)


def log_probabilities(folder: Path) -> torch.Tensor:
    """Return those of some greedy tokens and their rivals."""
    llm = LLM(str(folder), device="cpu", dtype="float32", num_kv_blocks=8)
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=5)
    (answer,) = llm.generate([[5, 9, 2, 33, 7, 11]], params)
    rows = answer.outputs[0].logprobs
    return torch.tensor([[one.logprob for one in row.values()] for row in rows])
