"""Embeddings with LoRA adapters are pooled from PEFT's hidden states, in one batch with others."""

from __future__ import annotations

import pytest
import torch
from embedding_folders import expected, save_random

from kiln import LLM
from kiln.engine.errors import RequestError

STEM = list(range(40, 75))


def check(output, network, prompt):
    found = torch.tensor(output.outputs.embedding, dtype=torch.float64)
    torch.testing.assert_close(found, expected(network, prompt), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen3-tied"])
@torch.inference_mode()
def test_each_text_is_embedded_with_its_own_adapter(made, name):
    own = made(name)
    # PEFT stores a copy of the head beside an adapter of it, and there is no head to compare with.
    forms = [None, *(form for form in own.forms if name != "llama" or "head" not in form), None]
    prompts = [[*STEM[: 10 + 2 * index], index] for index in range(len(forms))]
    settings = {"dtype": "float32", "num_kv_blocks": 60, "max_num_batched_tokens": 32}
    modules = {form: str(own.adapters[form]) for form in forms if form is not None}
    network = own.model.get_base_model().model
    with LLM(str(own.folder), task="embed", lora_modules=modules, **settings) as llm:
        outputs = llm.embed(prompts, lora=forms)
        with pytest.raises(RequestError, match=r"prompt 1: .*'absent'"):
            llm.embed(prompts[:2], lora=[None, "absent"])
    for output, prompt, form in zip(outputs, prompts, forms, strict=True):
        with own.model.disable_adapter():
            base = expected(network, prompt)
        if form is None:
            with own.model.disable_adapter():
                check(output, network, prompt)
            continue
        own.model.set_adapter(form)
        check(output, network, prompt)
        assert float((expected(network, prompt) - base).abs().max()) > 1e-3, form


def test_an_adapter_of_a_model_without_a_head_has_its_shorter_names(tmp_path):
    from peft import LoraConfig, get_peft_model

    network = save_random(tmp_path / "model")
    lora = LoraConfig(task_type="FEATURE_EXTRACTION", r=4, target_modules=["q_proj", "down_proj"])
    model = get_peft_model(network, lora)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.1)
    model.save_pretrained(tmp_path / "adapter")
    modules = {"own": str(tmp_path / "adapter")}
    settings = {"dtype": "float32", "num_kv_blocks": 40}
    with LLM(str(tmp_path / "model"), lora_modules=modules, **settings) as llm:
        outputs = llm.embed([STEM, STEM], lora=["own", None])
    check(outputs[0], network, STEM)
    with model.disable_adapter():
        check(outputs[1], network, STEM)
        base = expected(network, STEM)
    assert float((expected(network, STEM) - base).abs().max()) > 1e-3
