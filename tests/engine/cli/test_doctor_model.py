"""``kiln doctor MODEL``: what Kiln serves of a checkpoint, and every reason why it does not."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import embedding_folders
import pytest
import torch
from damages import damage
from depth import at_depth
from packers.packer import all_packers
from quantised_folders import families_of
from safetensors.torch import load_file, save_file
from tiny.model import all_tiny

from kiln.engine.cli.doctor_model import examine_model
from kiln.engine.cli.memory_plan import plan_on_gpus
from kiln.engine.errors import ConfigError
from kiln.engine.models.loader import load_model
from kiln.engine.models.registry import read_model
from kiln.engine.models.safetensors_weights import SafetensorsWeights

DEMO = Path(__file__).resolve().parents[3] / "engine" / "demo"


def rows(folder):
    """Return what was found under each name; of problems what they say."""
    found = {}
    for one in examine_model(folder):
        found.setdefault(one.name, []).append(one.meaning if one.state == "broken" else one.found)
    return found


def broken(folder):
    return [one.meaning for one in examine_model(folder) if one.state == "broken"]


@pytest.fixture
def demo(tmp_path):
    shutil.copytree(DEMO, tmp_path / "demo", ignore=shutil.ignore_patterns("adapters"))
    return tmp_path / "demo"


def change(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_sound_checkpoint_is_described(demo):
    found = rows(demo)
    assert found["Architecture"] == ["Qwen3ForCausalLM: qwen3 family"]
    assert found["Layers"][0].startswith("5 of 192, 8 heads and 2 KV heads of 32, silu of 512")
    assert found["LM head"] == ["tied to the embedding"]
    assert found["Tensors"] == ["all that the model asks for, in the right shapes"]
    assert found["--tensor-parallel-size"] == ["1, 2, 4, 8"]
    assert "qkv_proj, o_proj, gate_up_proj, down_proj, lm_head: bfloat16" in found["Weights"][0]
    assert found["LoRA targets"][0].startswith("embed_tokens, q_proj, k_proj, v_proj, o_proj")
    assert found["Chat template"] == ["1 found"]
    assert broken(demo) == []


def test_a_dtype_that_the_model_overflows_is_refused_with_those_to_choose(tmp_path):
    all_tiny()["gemma2"].save(tmp_path)
    assert rows(tmp_path)["dtype"] == ["float32"]
    change(tmp_path, dtype="float16")
    (told,) = rows(tmp_path)["dtype"]
    assert "dtype='auto', which is float16 for this checkpoint" in told
    assert "use dtype bfloat16, or float32" in told


def test_no_weight_is_read(demo, monkeypatch):
    sources = []
    works = SafetensorsWeights.__init__
    monkeypatch.setattr(
        SafetensorsWeights, "__init__", lambda own, *more: sources.append(own) or works(own, *more)
    )
    assert broken(demo) == []
    assert [source.progress[0] for source in sources] == [0]


@pytest.mark.parametrize("headless", [True, False])
def test_a_model_for_embeddings_needs_no_head(tmp_path, headless):
    embedding_folders.save_random(tmp_path, headless=headless)
    if not headless:
        embedding_folders.write_modules(tmp_path)
    assert broken(tmp_path) == []
    assert rows(tmp_path)["Task"][0].startswith("embeddings (pooling LAST)")


def test_every_problem_is_listed(demo):
    change(demo, new_key=3, another={"deep": 1}, hidden_act="tanh", rms_norm_eps=-1)
    (demo / "tokenizer.json").write_text("{")
    tensors = load_file(demo / "model.safetensors")
    (demo / "model.safetensors").unlink()
    placed = {}
    for number, name in enumerate(sorted(tensors)):
        placed[name] = f"model-{number % 3}.safetensors"
    save_file({n: tensors[n] for n in placed if "-0" in placed[n]}, demo / "model-0.safetensors")
    (demo / "model-1.safetensors").write_bytes(b"\0" * 100)
    (demo / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    text = "\n".join(broken(demo))
    for words in (
        "new_key is 3, Kiln does not support",
        "another is {'deep': 1}, Kiln does not support",
        "hidden_act is 'tanh', Kiln supports",
        "rms_norm_eps is -1, want a number above 0",
        "model-1.safetensors: not a complete safetensors file",
        "model-2.safetensors: this shard is missing",
        "tokenizer.json",
    ):
        assert words in text
    assert str(demo / "config.json") in text
    assert len(text.splitlines()) == 7


def test_quantised_weights_name_their_form_and_refused_ones_their_reason(quantised, tmp_path):
    made = quantised("awq", "qwen3-moe")
    found = rows(made.folder)
    assert found["Quantisation"] == ["awq"]
    forms = dict(reversed(text.split(": ", 1)) for text in found["Weights"])
    groups = [form for form in forms if form.startswith("int4, groups of")]
    (group,) = (form for form in groups if "qkv_proj" in forms[form])
    assert "up to 16 rows by skinny_gemm" in group
    (experts,) = (form for form in groups if "experts.gate_up_proj" in forms[form])
    assert "few rows of an expert by skinny_gemm" in experts
    shutil.copytree(made.folder, tmp_path / "own")
    change(tmp_path / "own", quantization_config={"quant_method": "nvfp4"})
    assert len(broken(tmp_path / "own")) == 1
    assert "'nvfp4', which Kiln does not read: its 4-bit floats" in broken(tmp_path / "own")[0]


def test_a_layer_that_cannot_be_built_is_one_problem_and_others_of_its_kind_are_counted(demo):
    tensors = load_file(demo / "model.safetensors")
    for layer in range(5):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    del tensors["model.norm.weight"]
    save_file(tensors, demo / "model.safetensors")
    found = broken(demo)
    assert len(found) == 2
    assert "layers.0.gate_up_proj: tensor model.layers.0.mlp.up_proj.weight is" in found[0]
    assert found[0].endswith("(and 4 more like it)")
    assert "tensor model.norm.weight is missing" in found[1]


def is_loaded(folder):
    """Whether a model can be loaded."""
    try:
        family, config = read_model(folder)
        source = SafetensorsWeights(folder)
        load_model(family, config, source, 64, torch.float32, torch.device("cpu"))
    except ConfigError:
        return False
    return True


def test_what_is_refused_would_not_load(quantised, tmp_path):
    """Headers do not show all damage, but a sound checkpoint is never refused."""
    names, refused = sorted(all_packers()), 0
    for seed in range(at_depth(12, 300)):
        chance = random.Random(seed)
        name = names[seed % len(names)]
        made = quantised(name, chance.choice(families_of(all_packers()[name])))
        done, folder = damage(chance, made, tmp_path / "own"), tmp_path / "own"
        found = broken(folder)
        refused += bool(found)
        if found:
            assert not is_loaded(folder), f"seed {seed}, {name}: {done.what}: {found}"
        shutil.rmtree(folder)
    assert refused


def test_the_plan_shares_weights_and_heads(tmp_path):
    config = read_model(DEMO)[1]
    one, two = (plan_on_gpus(config, 1 << 30, world) for world in (1, 2))
    assert one.weight_bytes == 2 * two.weight_bytes
    assert 1.9 < two.pool_tokens / one.pool_tokens < 2.1
    assert one.fits
    assert not plan_on_gpus(config, one.weight_bytes, 1).pool_tokens


def test_the_length_is_told_from_which_on_longrope_is_another(tmp_path):
    all_tiny()["phi4-mini"].save(tmp_path)
    (told,) = rows(tmp_path)["Long requests"]
    assert "that may exceed 26 tokens" in told
    assert broken(tmp_path) == []


def test_the_command_prints_a_table_or_json_and_returns_1_for_a_problem(kiln, demo):
    result = kiln("doctor", str(demo), COLUMNS="200")
    assert result.returncode == 0
    assert "Rotary embedding" in result.stdout
    change(demo, new_key=3)
    result = kiln("doctor", str(demo), "--json")
    told = json.loads(result.stdout)
    assert (result.returncode, told["ok"]) == (1, False)
    (problem,) = (one for one in told["findings"] if one["state"] == "broken")
    assert problem["name"] == "config.json"
    assert "new_key is 3" in problem["meaning"]
    result = kiln("doctor", str(demo), "--measure")
    assert result.returncode == 1
    assert "want no MODEL with them" in result.stderr


def test_a_checkpoint_is_checked_with_the_settings_of_its_flags(kiln, demo):
    scaled = '{"rope_parameters": {"rope_type": "linear", "factor": 2.0}}'
    told = kiln("doctor", demo, "--hf-overrides", scaled, "--dtype", "half", "--json").stdout
    found = {one["name"]: one["found"] for one in json.loads(told)["findings"]}
    assert found["Rotary embedding"].startswith("linear x 2.0")
    assert found["dtype"] == "float16"
    assert found["Weights"].endswith(": float16")
    wrong = '{"abc": 3, "hidden_act": "tanh", "rope_theta": null}'
    refused = kiln("doctor", demo, "--hf-overrides", wrong)
    assert refused.returncode == 1
    said = " ".join(refused.stdout.split())
    assert "--hf-overrides: abc is 3" in said
    assert "--hf-overrides: hidden_act is 'tanh'" in said
    assert kiln("doctor", demo, "--dtype", "int4").returncode == 2
    machine = kiln("doctor", "--model", demo, "--dtype", "half", "--json").stdout
    plan = json.loads(machine)["findings"][-1]["found"]
    whole = json.loads(kiln("doctor", "--model", demo, "--json").stdout)["findings"][-1]["found"]
    tokens = [int(text.split(" tokens")[0].split()[-1].replace(",", "")) for text in (plan, whole)]
    assert tokens[0] > 1.9 * tokens[1], "half of float32"
