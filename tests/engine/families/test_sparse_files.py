"""Files of models with experts: gpt-oss in MXFP4, layers that predict more tokens, missing ones."""

from __future__ import annotations

import pytest
import torch
from depth import at_depth
from packed_gpt_oss import save_packed
from safetensors.torch import load_file, save_file
from tiny.model import all_tiny
from tiny_answers import ask, assert_agrees, draw_prompts, serve

from kiln.engine.errors import ModelError
from kiln.engine.models.registry import read_model

GRAPHS = {"KILN_CPU_GRAPHS": "emulate", "KILN_GRAPH_STRICT": "1", "KILN_GRAPH_VERIFY": "off"}


@pytest.mark.parametrize("env", at_depth([{}], [{}, GRAPHS, {"KILN_CPU_KERNELS": "host"}]))
def test_gpt_oss_answers_from_its_published_form(tmp_path, environment, env):
    logits = save_packed(tmp_path)
    environment(**env)
    llm = serve(tmp_path, max_num_batched_tokens=48, cuda_graph_bs=[1, 8])
    assert llm.core.runner.loaded.hf.quantization.method == "mxfp4"
    assert_agrees(logits, ask(llm, draw_prompts((3, 26, 17)), whole=True))


@pytest.mark.parametrize(("name", "own"), [("glm4-moe", "eh_proj"), ("ernie4_5-moe", "mtp")])
def test_layers_that_predict_more_tokens_are_left_out(made, tmp_path, name, own):
    folder, logits = made(name)
    (path,) = folder.glob("*.safetensors")
    tensors, layers = load_file(path), all_tiny()[name].fields["num_hidden_layers"]
    more = {"eh_proj": f"model.layers.{layers}.eh_proj.weight", "mtp": "model.mtp_block.0.weight"}
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file({**tensors, more[own]: torch.ones(3)}, tmp_path / path.name)
    assert_agrees(logits, ask(serve(tmp_path), draw_prompts((9,))))
    stray = f"model.layers.{layers - 1}.eh_proj.weight"
    save_file({**tensors, stray: torch.ones(3)}, tmp_path / path.name)
    with pytest.raises(ModelError, match=stray):
        serve(tmp_path)


def test_a_missing_tensor_of_a_wrapped_model_has_the_name_of_its_neighbours(made, tmp_path):
    folder, _ = made("llama4-wrapped")
    assert read_model(folder)[1].image_token_ids == {200_080, 200_081, 200_092}
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    inside, behind = "language_model.model.", "model.language_model."
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    for prefix in (inside, behind):
        own = {name.replace(inside, prefix): one for name, one in tensors.items()}
        head = own.pop("language_model.lm_head.weight")
        own["lm_head.weight" if prefix is behind else "language_model.lm_head.weight"] = head
        missing = f"{prefix}layers.3.feed_forward.experts.down_proj"
        del own[missing]
        save_file(own, tmp_path / path.name)
        with pytest.raises(ModelError, match=f"tensor {missing} is missing"):
            serve(tmp_path)
