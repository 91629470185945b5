"""Adapters that PEFT saved are read as PEFT reads them; what does not fit is refused by name."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from kiln.engine.errors import AdapterError
from kiln.engine.lora.adapter import read_adapter

Q = "base_model.model.model.layers.0.self_attn.q_proj"
MODELS = ["llama", "qwen3-tied", "qwen2-moe"]


@pytest.mark.parametrize("name", MODELS)
def test_pairs_and_scales_are_those_of_peft(made, sites, name):
    own, model_sites = made(name), sites(made(name).folder)
    rows = {part.name: part.row for part in model_sites.parts}
    modules = {
        module_name: module
        for module_name, module in own.model.base_model.model.named_modules()
        if isinstance(getattr(module, "scaling", None), dict)
    }
    for form, folder in own.adapters.items():
        pairs = dict(read_adapter(form, folder, model_sites, torch.float32).pairs)
        for module_name, module in modules.items():
            if form not in module.scaling:
                continue
            pair = pairs.pop(rows[module_name])
            embeds = form in module.lora_embedding_A
            a = module.lora_embedding_A[form] if embeds else module.lora_A[form].weight
            b = module.lora_embedding_B[form] if embeds else module.lora_B[form].weight
            assert torch.equal(pair.a, a), (form, module_name)
            assert torch.equal(pair.b, b), (form, module_name)
            assert pair.scale == module.scaling[form], (form, module_name)
        assert not pairs, form


@pytest.fixture
def copied(made, tmp_path):
    """Return a function that copies an adapter of the Llama model and changes it."""

    def copy(form, *, of=None, tensors=None, **config):
        folder = tmp_path / form
        shutil.copytree(made("llama").adapters[of or form], folder)
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
        if tensors is not None:
            path = folder / "adapter_model.safetensors"
            save_file(tensors(load_file(path)), path)
        return folder

    return copy


@pytest.fixture
def refused(made, sites):
    """Return a function from an adapter's folder to why it is refused."""

    def reason(folder):
        with pytest.raises(AdapterError) as caught:
            read_adapter("mine", folder, sites(made("llama").folder), torch.float32)
        assert str(caught.value).startswith("LoRA adapter 'mine': ")
        return str(caught.value)

    return reason


KEYS = {
    "peft_type": "IA3",
    "use_dora": True,
    "bias": "lora_only",
    "lora_bias": True,
    "modules_to_save": ["lm_head"],
    "alora_invocation_tokens": [1, 2],
    "trainable_token_indices": [3],
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "layer_replication": [[0, 2], [1, 2]],
    "use_qalora": True,
    "use_bdlora": {"nblocks": 2},
    "megatron_config": {"hidden_size": 4},
    "loftq_config": {"loftq_bits": 4},
    "corda_config": {"corda_method": "ipm"},
    "lora_ga_config": {"direction": "ArBr"},
    "velora_config": {"rank": 1},
    "monteclora_config": {"num_samples": 2},
    "arrow_config": {"top_k": 2},
    "kasa_config": {"beta": 1.0},
    "init_lora_weights": "pissa_niter_4",
    "a_key_of_next_year": 1,
}
WRONG = [
    {"peft_type": None},
    {"r": 0},
    {"r": "8"},
    {"r": True},
    {"r": 10**30},
    {"lora_alpha": None},
    {"lora_alpha": float("nan")},
    {"lora_alpha": 10**400},
    {"use_rslora": "yes"},
    {"fan_in_fan_out": 1},
    {"rank_pattern": ["q_proj"]},
    {"rank_pattern": {"q_proj": 2.0}},
    {"rank_pattern": {"q_(proj": 2}},
    {"alpha_pattern": {"q_proj": "16"}},
    {"target_modules": 3},
    {"target_modules": [1]},
    {"target_modules": "*"},
    {"exclude_modules": "["},
    {"layers_to_transform": [-1]},
    {"layers_to_transform": "0"},
    {"layers_to_transform": [0], "layers_pattern": ["("]},
    {"ensure_weight_tying": "no"},
    {"init_lora_weights": {}},
]


@pytest.mark.parametrize("key", KEYS)
def test_a_key_that_is_not_supported_is_refused_by_name(copied, refused, key):
    assert f"{key} is " in refused(copied("q-and-up", **{key: KEYS[key]}))


@pytest.mark.parametrize("config", WRONG, ids=str)
def test_a_malformed_key_is_refused_by_name(copied, refused, config):
    told = refused(copied("q-and-up", **config))
    assert any(f"{key} is " in told for key in config)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": []},
        {"target_modules": r".*q_proj"},
        {"target_modules": "all-linear", "exclude_modules": ["model.layers.1.mlp.up_proj"]},
        {"exclude_modules": r".*\.1\..*"},
        {"layers_to_transform": [1]},
        {"layers_to_transform": 0},
        {"layers_to_transform": [0, 1], "layers_pattern": ["h"]},
    ],
    ids=str,
)
def test_tensors_of_modules_that_the_config_leaves_out_are_refused(copied, refused, config):
    assert "target_modules" in refused(copied("q-and-up", **config))


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": None},
        {"target_modules": "all-linear"},
        {"target_modules": r".*(q|up)_proj"},
        {"layers_to_transform": [0, 1], "layers_pattern": "layers"},
        {"fan_in_fan_out": True},
        {"init_lora_weights": "gaussian"},
        {"a_key_of_next_year": False},
        {"layers_to_transform": [], "modules_to_save": []},
    ],
    ids=str,
)
def test_other_forms_of_a_config_are_accepted(copied, made, sites, config):
    folder = copied("q-and-up", **config)
    adapter = read_adapter("mine", folder, sites(made("llama").folder), torch.float32)
    assert len(adapter.pairs) == 4


def renamed(old, new):
    return lambda tensors: {name.replace(old, new): value for name, value in tensors.items()}


def with_one(name, tensor):
    return lambda tensors: {**tensors, name: tensor}


TENSORS = {
    "prefix": (renamed("base_model.model.", "model."), "base_model.model."),
    "module": (renamed("self_attn", "attn"), "the model has no model.layers.0.attn.q_proj"),
    "third layer": (renamed("layers.1.", "layers.2."), "the model has no model.layers.2"),
    "expert": (renamed("mlp.up_proj", "mlp.experts.0.up_proj"), "it adapts experts"),
    "two adapters": (renamed(".lora_B.weight", ".lora_B.sql.weight"), "of several adapters"),
    "one twice": (with_one(f"{Q}.lora_A.default.weight", torch.zeros(4, 32)), "several adapters"),
    "one in two spellings": (
        with_one(
            "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight",
            torch.zeros(4, 32),
        ),
        "are the same layer",
    ),
    "deeper": (renamed(".lora_A.weight", ".lora_A.sql.one.weight"), "writes no such name"),
    "no B": (
        lambda tensors: {n: t for n, t in tensors.items() if n != f"{Q}.lora_B.weight"},
        "q_proj.lora_B.weight is missing",
    ),
    "a bias": (with_one(f"{Q}.lora_B.bias", torch.zeros(32)), "lora_bias"),
    "DoRA": (with_one(f"{Q}.lora_magnitude_vector", torch.zeros(32)), "use_dora"),
    "a whole weight": (
        with_one("base_model.model.lm_head.weight", torch.zeros(400, 32)), "modules_to_save",
    ),
    "tokens": (
        with_one(
            "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta",
            torch.zeros(2, 32),
        ),
        "trainable_token_indices",
    ),
    "an embedding's A": (
        renamed("q_proj.lora_A.weight", "q_proj.lora_embedding_A"), "needs lora_A.weight and lora_B"
    ),
    "shape of A": (with_one(f"{Q}.lora_A.weight", torch.zeros(4, 31)), "[4, 31]"),
    "rank of B": (with_one(f"{Q}.lora_B.weight", torch.zeros(32, 5)), "rank 4"),
    "dimensions": (with_one(f"{Q}.lora_B.weight", torch.zeros(32)), "[32]"),
    "empty": (with_one(f"{Q}.lora_B.weight", torch.zeros(32, 0)), "[32, 0]"),
    "dtype": (with_one(f"{Q}.lora_A.weight", torch.zeros(4, 32, dtype=torch.int8)), "I8"),
    "NaN": (with_one(f"{Q}.lora_A.weight", torch.full((4, 32), torch.nan)), "NaN"),
    "overflow": (
        with_one(f"{Q}.lora_A.weight", torch.full((4, 32), 1e300, dtype=torch.float64)), "infinit"
    ),
    "a base bias": (with_one(f"{Q}.base_layer.bias", torch.zeros(32)), "a copy of a base bias"),
    "a norm": (
        with_one("base_model.model.model.norm.weight", torch.ones(32)), "modules_to_save",
    ),
    "base shape": (with_one(f"{Q}.base_layer.weight", torch.zeros(31, 32)), "[31, 32]"),
    "nothing": (lambda tensors: {}, "no LoRA tensors"),
    "base alone": (
        lambda tensors: {f"{Q}.base_layer.weight": torch.zeros(32, 32)}, "no LoRA tensors"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_a_tensor_that_does_not_fit_is_refused_by_name(copied, refused, case):
    change, words = TENSORS[case]
    assert words in refused(copied("q-and-up", tensors=change))


SPELLINGS = ["model.", "", "model.language_model.", "language_model.model.", "language_model."]


@pytest.mark.parametrize("prefix", SPELLINGS)
def test_modules_are_called_as_in_the_model_that_the_adapter_was_trained_on(
    copied, made, sites, prefix
):
    """With images or without, with a head or without; target_modules and patterns too."""
    own = prefix.replace(".", r"\.")
    folder = copied(
        "q-and-up",
        tensors=renamed("base_model.model.model.", f"base_model.model.{prefix}"),
        target_modules=rf"{own}layers\.\d\.(self_attn\.q|mlp\.up)_proj",
        alpha_pattern={rf"{own}layers\.1\..*": 4},
    )
    expected = copied("q-and-up-too", of="q-and-up", alpha_pattern={r"model\.layers\.1\..*": 4})
    assert_same(folder, expected, sites(made("llama").folder))


def test_the_head_of_a_model_with_images_had_another_name(copied, made, sites):
    older = renamed("base_model.model.", "base_model.model.language_model.")
    folder = copied("embedding-and-head", tensors=older)
    assert_same(folder, made("llama").adapters["embedding-and-head"], sites(made("llama").folder))


def test_what_an_adapter_changes_of_images_is_left_out(copied, made, sites):
    """No text passes through these layers, which PEFT adapts because of their names."""
    prefix, end = "base_model.model.model.vision_tower.vision_model.encoder", "lora_A.weight"
    vision = with_one(f"{prefix}.layers.0.self_attn.q_proj.{end}", torch.ones(4, 16))
    folder = copied("q-and-up", tensors=vision)
    assert_same(folder, made("llama").adapters["q-and-up"], sites(made("llama").folder))


def assert_same(folder, expected, model_sites):
    ours, theirs = (
        read_adapter("mine", one, model_sites, torch.float32).pairs for one in (folder, expected)
    )
    assert ours.keys() == theirs.keys()
    for row, pair in ours.items():
        other = theirs[row]
        assert torch.equal(pair.a, other.a)
        assert torch.equal(pair.b, other.b)
        assert pair.scale == other.scale


def test_a_router_is_refused_by_name(tmp_path, copied, small_moe, sites):
    gate = renamed("self_attn.q_proj", "mlp.gate")
    folder = copied("q-and-up", tensors=gate, target_modules=None)
    with pytest.raises(AdapterError, match=r"layers\.0\.mlp\.gate.*adapts a router"):
        read_adapter("mine", folder, sites(small_moe), torch.float32)


def test_missing_files_are_named(tmp_path, copied, refused):
    assert "not a folder" in refused(tmp_path / "nothing")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "adapter_config.json is missing" in refused(empty)
    folder = copied("q-and-up")
    weights = folder / "adapter_model.safetensors"
    weights.rename(folder / "adapter_model.bin")
    assert "only adapter_model.bin, which is not read" in refused(folder)
    weights.write_bytes((folder / "adapter_model.bin").read_bytes()[:-100])
    assert "not a complete safetensors file" in refused(folder)
