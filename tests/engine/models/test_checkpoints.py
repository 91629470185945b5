"""Checkpoints in the forms that transformers writes: the same logits as transformers computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kiln import LLM, SamplingParams
from kiln.engine.errors import ModelError
from kiln.engine.layers.router import Router
from kiln.engine.models.build import Builder
from kiln.engine.models.build_layer import LayerBuilder
from kiln.engine.models.fused_experts import FusedExperts
from kiln.engine.models.loader import load_model
from kiln.engine.models.registry import read_model
from kiln.engine.models.safetensors_weights import SafetensorsWeights
from kiln.engine.models.split import Split

CPU = torch.device("cpu")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def save(tmp_path, small_config):
    def save(family: str, save_original_format: bool = True, **more: Any) -> Any:
        import transformers

        torch.manual_seed(1)
        config = getattr(transformers, f"{family}Config").from_dict(
            {**small_config(f"{family}ForCausalLM", **more), "eos_token_id": None}
        )
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)
        model.save_pretrained(tmp_path, save_original_format=save_original_format)
        return model

    return save


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def build(folder: Path) -> Any:
    family, config = read_model(folder)
    weights, dtype = SafetensorsWeights(folder), torch.float32
    return load_model(family, config, weights, 64, dtype, CPU, lambda *done: None)


def answers(folder: Path) -> tuple[list[int], list[int]]:
    """Kiln's greedy tokens and those of transformers."""
    import transformers

    prompt = [5, 9, 2, 33, 7, 11]
    params = SamplingParams(temperature=0, max_tokens=10)
    llm = LLM(str(folder), device="cpu", dtype="float32", num_kv_blocks=8)
    ours = llm.generate([prompt], params)[0].outputs[0].token_ids
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = theirs.generate(ids, max_new_tokens=10, do_sample=False, pad_token_id=0)
    return ours, out[0, len(prompt) :].tolist()


def test_another_head_than_the_tied_embedding_is_used(save, tmp_path):
    save("Llama", tie_word_embeddings=True)
    change(tmp_path, lambda made: made.update({HEAD: torch.randn_like(made[EMBEDDING])}))
    model = build(tmp_path)
    assert torch.equal(model.head.weight.values, load_file(tmp_path / "model.safetensors")[HEAD])
    ours, theirs = answers(tmp_path)
    assert ours == theirs


def test_an_equal_head_takes_no_memory(save, tmp_path, monkeypatch):
    monkeypatch.setattr("kiln.engine.models.parameters._COMPARED_ROWS", 7)
    save("Llama", tie_word_embeddings=True)
    change(tmp_path, lambda made: made.update({HEAD: made[EMBEDDING].clone()}))
    model = build(tmp_path)
    assert model.head.weight.values is model.embedding.weight


def test_a_head_alone_is_also_the_embedding(save, tmp_path):
    save("Llama", tie_word_embeddings=True)
    change(tmp_path, lambda made: made.update({HEAD: made.pop(EMBEDDING)}))
    model = build(tmp_path)
    assert model.head.weight.values is model.embedding.weight
    ours, theirs = answers(tmp_path)
    assert ours == theirs
    change_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"tensor model\.embed_tokens\.weight is missing"):
        build(tmp_path)


@pytest.mark.parametrize("differs", [0, 49])
def test_each_rank_has_its_rows_of_another_head(save, tmp_path, differs):
    save("Llama", tie_word_embeddings=True)

    def edit(made: dict[str, torch.Tensor]) -> None:
        made[HEAD] = made[EMBEDDING].clone()
        made[HEAD][differs] += 1

    change(tmp_path, edit)
    head = load_file(tmp_path / "model.safetensors")[HEAD]
    for rank in range(2):
        config, weights = read_model(tmp_path)[1], SafetensorsWeights(tmp_path)
        builder = Builder(config, weights, 64, torch.float32, CPU, None, Split(rank, 2, "tp2"))
        builder.embedding()
        part = builder.head().part
        assert torch.equal(part.weight.values[:25], head[25 * rank :][:25])


@pytest.mark.parametrize("family", ["Mixtral", "Qwen2Moe", "Qwen3Moe"])
def test_fused_experts_are_the_same_as_single_ones(save, tmp_path, family):
    save(family)
    single = build(tmp_path)
    save(family, save_original_format=False)
    assert any(".experts.gate_up_proj" in name for name in SafetensorsWeights(tmp_path).names)
    fused = build(tmp_path)
    for one, other in zip(single.blocks, fused.blocks, strict=True):
        for name in ("gate_up", "down", "router") if hasattr(one.mlp, "router") else ():
            ours, theirs = getattr(other.mlp, name), getattr(one.mlp, name)
            if isinstance(ours, Router):
                ours, theirs = ours.linear.weight, theirs.linear.weight
            assert torch.equal(ours.values, theirs.values)


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_a_rank_reads_its_part_of_fused_experts(save, tmp_path, family):
    def ranks() -> list[torch.Tensor]:
        parts = []
        for rank in range(2):
            (kind, config), source = read_model(tmp_path), SafetensorsWeights(tmp_path)
            weights = FusedExperts(source, config.traits.experts)
            split = Split(rank, 2, "tp2")
            builder = Builder(config, weights, 64, torch.float32, CPU, None, split)
            mlp = kind.block(LayerBuilder(builder, 0)).mlp.layer
            parts += [mlp.gate_up.values, mlp.down.values]
        return parts

    save(family)
    single = ranks()
    save(family, save_original_format=False)
    assert all(map(torch.equal, ranks(), single))


def test_a_missing_expert_and_another_shape_are_named(save, tmp_path):
    save("Qwen3Moe", save_original_format=False)
    name = "model.layers.0.mlp.experts.down_proj"
    change(tmp_path, lambda made: made.update({name: made[name][:3].clone()}))
    with pytest.raises(ModelError, match=rf"{name} is F32 \[3, 32, 24\], .* \[4, 32, 24\]"):
        build(tmp_path)
    change(tmp_path, lambda made: made.pop(name))
    with pytest.raises(ModelError, match=r"tensor model\.layers\.0\.mlp\.experts\.0\.down_proj"):
        build(tmp_path)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("Qwen3", {"rope_scaling": {**YARN, "attn_factor": 0.5}, "use_qk_norm": False}),
        ("Qwen3Moe", {"use_qk_norm": True, "partial_rotary_factor": 0.5, "_note": 1}),
        ("Llama", {"partial_rotary_factor": 0.5, "architectures": None}),
        ("Qwen2", {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 99.0}}),
    ],
)
def test_keys_mean_what_transformers_computes(save, tmp_path, family, more):
    save(family)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    if "rope_scaling" in more:
        del content["rope_parameters"]
    path.write_text(json.dumps(content | more))
    ours, theirs = answers(tmp_path)
    assert ours == theirs
