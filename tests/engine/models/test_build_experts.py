"""Sparse layers of every kind, against the modules of transformers, from files that it writes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from depth import at_depth
from packers.mxfp4 import PACKERS
from quantised_modules import config as read_quantization
from safetensors.torch import load_file, save_file

from kiln.engine.errors import ModelError
from kiln.engine.layers.activation import CLAMPED, Activation
from kiln.engine.layers.linear import Linear
from kiln.engine.layers.mlp import GATES, GatedMLP
from kiln.engine.layers.router import Routing
from kiln.engine.layers.sparse_mlp import SparseMLP
from kiln.engine.models.build_experts import ExpertBuilder
from kiln.engine.models.dummy_weights import DummyWeights
from kiln.engine.models.experts import ExpertNames, Experts, Layout, read_groups
from kiln.engine.models.fields import Fields
from kiln.engine.models.fused_experts import FusedExperts
from kiln.engine.models.kernel_needs import kernels_of
from kiln.engine.models.parameters import Parameters, Projection
from kiln.engine.models.quantization import UNQUANTIZED, Quantization
from kiln.engine.models.safetensors_weights import SafetensorsWeights
from kiln.engine.models.split import WHOLE, Share, Split, all_of
from kiln.engine.models.weights import Weights

CPU = torch.device("cpu")
LAYER, HIDDEN, INNER = 1, 32, 24
COMMON = {
    "vocab_size": 50, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "eos_token_id": None,
    "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A family's sparse layer: keys of its config, Kiln's record, and where its module is."""

    keys: dict[str, Any]
    experts: Experts
    module: str = "mlp"
    config: str = ""  # the class, without "Config", if named otherwise than the model's


def experts_of(count: int, top_k: int, names: ExpertNames | None = None, **more: Any) -> Experts:
    routing = Routing(top_k, **more.pop("routing", {}))
    names = names or ExpertNames()
    return Experts(count, INNER, (False, True), routing, names=names, **more)


def names_of(layout: Layout | None = None, **more: str) -> ExpertNames:
    return ExpertNames(layout=layout or Layout(), **more)


KINDS = {
    "Mixtral": Kind(
        {"num_local_experts": 5, "intermediate_size": INNER, "hidden_act": "gelu"},
        experts_of(
            5,
            2,
            names_of(layer="block_sparse_moe.", gate="w1", up="w3", down="w2"),
            activation=Activation("gelu"),
        ),
    ),
    "Qwen2Moe": Kind(
        {
            "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": INNER,
            "shared_expert_intermediate_size": 40, "hidden_act": "gelu_pytorch_tanh",
        },
        experts_of(
            6,
            3,
            routing={"renormalise": False},
            shared_size=40,
            activation=Activation("gelu_pytorch_tanh"),
        ),
    ),
    "GptOss": Kind(
        {
            "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": INNER,
            "swiglu_alpha": 1.5, "swiglu_limit": 0.9,
        },
        experts_of(
            5,
            2,
            names_of(Layout(in_out=True, alternating=True), router="router"),
            activation=Activation(CLAMPED, (1.5, 0.9)),
            biases=True,
            router_bias=True,
        ),
    ),
    "Glm4Moe": Kind(
        {
            "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": INNER,
            "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "first_k_dense_replace": 1,
            "intermediate_size": 40, "routed_scaling_factor": 2.5,
        },
        experts_of(
            8,
            3,
            names_of(shared="shared_experts"),
            routing={"scoring": "sigmoid", "groups": (4, 2), "factor": 2.5},
            router_in_float32=True,
            choice_bias=(8,),
            shared_size=2 * INNER,
            shared_gate=False,
        ),
    ),
    "Llama4": Kind(
        {
            "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": INNER,
            "intermediate_size_mlp": 40,
        },
        experts_of(
            5,
            2,
            names_of(Layout(in_out=True), layer="feed_forward.", router="router"),
            routing={"scoring": "sigmoid", "renormalise": False},
            weighs_inputs=True,
            shared_size=INNER,
            shared_gate=False,
        ),
        module="feed_forward",
        config="Llama4Text",
    ),
    "Ernie4_5_Moe": Kind(
        {
            "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": INNER,
            "moe_num_shared_experts": 2, "intermediate_size": 40, "moe_norm_min": 0.7,
        },
        experts_of(
            6,
            2,
            names_of(
                shared="shared_experts",
                choice_bias="moe_statics.e_score_correction_bias",
                raw_choice_bias="gate.moe_statics.e_score_correction_bias",
            ),
            routing={"least_sum": 0.7},
            router_in_float32=True,
            choice_bias=(1, 6),
            shared_size=2 * INNER,
            shared_gate=False,
        ),
    ),
    "MiniMaxM2": Kind(
        {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": INNER},
        experts_of(
            6,
            2,
            names_of(
                layer="block_sparse_moe.", gate="w1", up="w3", down="w2",
                choice_bias="e_score_correction_bias",
            ),
            routing={"scoring": "sigmoid"},
            choice_bias=(6,),
        ),
    ),
}  # fmt: skip
IN_OUT = [name for name, kind in KINDS.items() if kind.experts.names.layout.in_out]


def write(folder: Path, family: str, raw: bool = False) -> Any:
    """Write a tiny random model of a family, and return its last sparse module."""
    import transformers

    torch.manual_seed(3)
    kind = KINDS[family]
    config = getattr(transformers, f"{kind.config or family}Config")(**COMMON, **kind.keys)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    biases = [one for name, one in model.named_buffers() if "e_score" in name]
    for one in (*model.parameters(), *biases):
        torch.nn.init.normal_(one, 0.0, 0.3)
    model.save_pretrained(folder, save_original_format=not raw)
    return getattr(model.model.layers[LAYER], kind.module)


def wanted(module: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        out = module(x[None])
    return (out[0] if isinstance(out, tuple) else out).view(x.shape)


def build(
    source: Weights,
    experts: Experts,
    split: Split = WHOLE,
    dtype: torch.dtype = torch.float32,
    quantization: Quantization = UNQUANTIZED,
) -> SparseMLP:
    """Build the sparse layer of a model, or a rank's part of it."""
    make = Parameters(FusedExperts(source, experts), quantization, dtype, CPU)
    hidden, name = all_of(HIDDEN), experts.activation.name
    activation = name if name in GATES else "silu"

    def mlp(name: str, prefix: str, size: int) -> GatedMLP:
        def linear(role: str, parts: list[str], outputs: Share, inputs: Share) -> Linear:
            placed = tuple((prefix + part, outputs) for part in parts)
            return make.linear(Projection(name + role, placed, inputs))

        inner = split.equal(size, prefix, "outputs")
        gate_up = linear("gate_up_proj", ["gate_proj", "up_proj"], inner, hidden)
        return GatedMLP(gate_up, activation, linear("down_proj", ["down_proj"], hidden, inner))

    builder = ExpertBuilder(experts, hidden, make, split, mlp)
    return builder.layer(f"layers.{LAYER}.", f"model.layers.{LAYER}.")


def tokens(count: int = 40) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(7))


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert want.abs().max() > 0.1, "or the test says nothing"
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("family", KINDS)
def test_a_layer_computes_what_that_of_transformers_does(tmp_path, family, raw):
    module = write(tmp_path, family, raw)
    layer, x = build(SafetensorsWeights(tmp_path), KINDS[family].experts), tokens()
    want = wanted(module, x)
    close(layer(x), want)
    assert layer(x[:0]).shape == (0, HIDDEN)
    close(torch.cat([layer(one) for one in x.split(13)]), want)


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize(("world", "raw"), [(2, False), *at_depth([], [(2, True), (4, False)])])
def test_the_sum_over_ranks_is_the_whole(tmp_path, family, world, raw):
    module = write(tmp_path, family, raw)
    parts, x = [], tokens(9)
    for rank in range(world):
        source = SafetensorsWeights(tmp_path)
        split = Split(rank, world, "tp")
        parts.append(build(source, KINDS[family].experts, split)(x))
    close(torch.stack(parts).sum(0), wanted(module, x))


@pytest.mark.parametrize("family", KINDS)
def test_a_layer_is_one_graph(tmp_path, family):
    write(tmp_path, family)
    layer, x = build(SafetensorsWeights(tmp_path), KINDS[family].experts), tokens(9)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for count in (9, 2):
        assert torch.equal(compiled(x[:count]), layer(x[:count]))


@pytest.mark.parametrize("family", ["GptOss", *at_depth([], [*KINDS])])
def test_the_sources_of_its_kernels_give_the_same(tmp_path, family, environment):
    module = write(tmp_path, family)
    environment(KILN_CPU_KERNELS="host")
    close(
        build(SafetensorsWeights(tmp_path), KINDS[family].experts)(tokens(9)),
        wanted(module, tokens(9)),
    )


def test_routers_stay_float32_in_a_bf16_model_where_a_family_says_so(tmp_path):
    for family, kind in KINDS.items():
        write(tmp_path / family, family)
        source = SafetensorsWeights(tmp_path / family)
        layer = build(source, kind.experts, dtype=torch.bfloat16)
        router, wide = layer.router, family in ("Glm4Moe", "Ernie4_5_Moe")
        assert router.linear.weight.dtype == (torch.float32 if wide else torch.bfloat16)
        x = tokens().bfloat16()
        weights, ids = router(x)
        assert (weights.dtype, layer(x).dtype) == (torch.float32, torch.bfloat16)
        bias = router.choice_bias
        assert (bias is not None) == bool(kind.experts.choice_bias)
        if bias is not None:
            (name,) = [n for n in source.names if f".{LAYER}." in n and "e_score" in n]
            stored = load_file(tmp_path / family / "model.safetensors")[name]
            assert bias.dtype == torch.float32
            assert torch.equal(bias, stored.flatten())
        if wide:
            again = build(SafetensorsWeights(tmp_path / family), kind.experts).router(x.float())
            assert torch.equal(ids, again[1])


class Counting(Weights):
    """A source that counts what is read of it."""

    def __init__(self, source: Weights) -> None:
        self.source, self.read = source, 0

    names = property(lambda self: self.source.names)

    def has(self, name):
        return self.source.has(name)

    def dtype(self, name):
        return self.source.dtype(name)

    def shape(self, name):
        return self.source.shape(name)

    def ignore(self, name):
        self.source.ignore(name)

    def finish(self):
        self.source.finish()

    def fill(self, name, out, shape, index=()):
        if ".experts." in name:
            self.read += out.numel()
        self.source.fill(name, out, shape, index)


@pytest.mark.parametrize("family", IN_OUT)
def test_a_rank_reads_its_part_of_in_out_tensors(tmp_path, family):
    write(tmp_path, family)
    sizes = []
    for split in (WHOLE, Split(0, 4, "tp")):
        source = Counting(SafetensorsWeights(tmp_path))
        build(source, KINDS[family].experts, split)
        sizes.append(source.read)
    biases = {"GptOss": (2 * INNER + HIDDEN, 2 * INNER // 4 + HIDDEN), "Llama4": (0, 0)}[family]
    weights = 3 * INNER * HIDDEN
    assert sizes == [5 * (weights + biases[0]), 5 * (weights // 4 + biases[1])]


def test_single_experts_are_read_in_any_order(tmp_path):
    write(tmp_path, "GptOss")
    source = FusedExperts(SafetensorsWeights(tmp_path), KINDS["GptOss"].experts)
    place = f"model.layers.{LAYER}.mlp.experts."
    stored = load_file(tmp_path / "model.safetensors")
    both, bias = stored[f"{place}gate_up_proj"], stored[f"{place}gate_up_proj_bias"]
    for expert, half in ((0, 0), (2, 0), (0, 1), (2, 1), (2, 1), (2, 0), (1, 0), (1, 1)):
        name = f"{place}{expert}.{('gate', 'up')[half]}_proj"
        for rows in (slice(0, INNER), slice(5, 9)):
            out = torch.empty(rows.stop - rows.start, HIDDEN)
            source.fill(f"{name}.weight", out, (INNER, HIDDEN), (rows,))
            assert torch.equal(out, both[expert, :, half::2].T[rows])
        source.fill(f"{name}.bias", out[:, 0], (INNER,), (rows,))
        assert torch.equal(out[:, 0], bias[expert, half::2][rows])


def test_both_containers_of_gpt_oss_give_the_same_layer(tmp_path):
    """Floats with inputs in front of outputs, and MXFP4; the biases are stored in the same way."""
    (packer,) = PACKERS
    kind = KINDS["GptOss"]
    write(tmp_path, "GptOss")
    tensors = load_file(tmp_path / "model.safetensors")
    place = f"model.layers.{LAYER}.mlp.experts."
    inner, generator = 64, torch.Generator().manual_seed(1)
    sizes = {"gate_proj": (inner, HIDDEN), "up_proj": (inner, HIDDEN), "down_proj": (HIDDEN, inner)}
    made = {
        f"{place}{index}.{name}": packer.pack(
            torch.randn(*size, generator=generator, dtype=torch.float64) * 0.3, generator
        )
        for index in range(5)
        for name, size in sizes.items()
    }

    def matrix(index: int, name: str) -> torch.Tensor:
        return made[f"{place}{index}.{name}_proj"].weight.float()

    pairs = [torch.stack((matrix(e, "gate"), matrix(e, "up")), 1).flatten(0, 1) for e in range(5)]
    bias = torch.randn(5, 2 * inner, generator=generator)
    rest = {name: one for name, one in tensors.items() if place not in name}
    rest |= {f"{place}gate_up_proj_bias": bias}
    rest |= {f"{place}down_proj_bias": tensors[f"{place}down_proj_bias"]}
    floats = {
        f"{place}gate_up_proj": torch.stack(pairs).transpose(1, 2).contiguous(),
        f"{place}down_proj": torch.stack([matrix(e, "down").T for e in range(5)]).contiguous(),
    }
    experts, layers = replace(kind.experts, intermediate_size=inner), []
    config = read_quantization(tmp_path, packer.config)
    for own, quantization in ((floats, UNQUANTIZED), (packer.stored(made), config)):
        save_file(rest | own, tmp_path / "model.safetensors")
        for split in (WHOLE, Split(0, 2, "tp"), Split(1, 2, "tp")):
            source = SafetensorsWeights(tmp_path)
            layers.append(build(source, experts, split, quantization=quantization))
    for one, other in zip(layers[:3], layers[3:], strict=True):
        assert torch.equal(one.gate_up_bias, other.gate_up_bias)
        assert torch.equal(one.down_bias, other.down_bias)
        close(other(tokens(9)), one(tokens(9)))
    assert torch.equal(layers[0].gate_up_bias, torch.cat((bias[:, ::2], bias[:, 1::2]), 1))
    assert not layers[2].down_bias.any()
    assert layers[1].down_bias.any()


def test_a_missing_bias_is_named(tmp_path):
    write(tmp_path, "GptOss")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"model.layers.{LAYER}.mlp.experts.down_proj_bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"tensor model\.layers\.{LAYER}\.mlp\.experts\.down_pr"):
        build(SafetensorsWeights(tmp_path), KINDS["GptOss"].experts)


@pytest.mark.parametrize(
    ("family", "activation"), [("GptOss", "clamped_swiglu"), ("Mixtral", "gelu_and_mul")]
)
def test_a_layer_says_which_kernels_it_calls(family, activation):
    layer = build(DummyWeights(0, torch.float32), KINDS[family].experts)
    called = {spec.name for spec in kernels_of(layer)}
    assert called == {"route_tokens", "align_tokens", activation}


@pytest.mark.parametrize("family", KINDS)
def test_random_weights_make_a_layer_that_computes(family):
    out = build(DummyWeights(0, torch.float32), KINDS[family].experts)(tokens(3))
    assert out.isfinite().all()
    assert out.any()


def test_experts_of_any_size_compute_in_16_bits(tmp_path):
    """Grouped products want rows at multiples of 16 bytes: there are zeros behind the others."""
    small = replace(KINDS["Mixtral"].experts, intermediate_size=20)
    layer = build(DummyWeights(0, torch.bfloat16), small, dtype=torch.bfloat16)
    assert layer.down.dequantized(slice(None), torch.bfloat16).shape == (5, HIDDEN, 24)
    out = layer(tokens(9).bfloat16())
    assert out.isfinite().all()
    assert out.any()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_group": 3}, "n_group is 3, want a divisor of 8 experts, at most 32"),
        ({"n_group": 4, "topk_group": 5}, r"topk_group is 5, want at most 4 \(n_group\)"),
        ({"n_group": 8, "topk_group": 4}, "n_group is 8, groups are ranked by two experts"),
        ({"n_group": 4, "topk_group": 1}, "topk_group is 1, want groups of 3 experts or more"),
        ({"n_group": 0}, "n_group is 0, want an integer of 1 or more"),
    ],
)
def test_groups_that_cannot_be_are_named(fields, message):
    experts = KINDS["Glm4Moe"].experts
    with pytest.raises(ModelError, match=message):
        read_groups(Fields(fields, Path("config.json")), experts)
    assert read_groups(Fields({"n_group": None}, Path("config.json")), experts) == (1, 1)
