"""Adapters on every family, and on two ranks: the answers are PEFT's."""

from __future__ import annotations

import warnings
from functools import cache

import pytest
import torch
from depth import at_depth
from tiny.model import all_tiny
from tiny_answers import ask, assert_agrees, draw_prompts, serve

GRAPHS = {"KILN_CPU_GRAPHS": "emulate", "KILN_GRAPH_STRICT": "1", "KILN_GRAPH_VERIFY": "off"}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """Return a function from a tiny model's name to its folder, adapters, and logits with each."""

    @cache
    def make(name):
        from peft import LoraConfig, PeftModel, get_peft_model

        one, root = all_tiny()[name], tmp_path_factory.mktemp(name)
        base = one.save(root / "model")
        forms = {"all": (5, one.targets), "some": (3, one.targets[1::2])}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for form, (rank, targets) in forms.items():
                config = LoraConfig(task_type="CAUSAL_LM", r=rank, target_modules=list(targets))
                model = get_peft_model(base, config)
                for parameter_name, parameter in model.named_parameters():
                    if "lora_" in parameter_name:
                        torch.nn.init.normal_(parameter, 0.0, 0.2)
                model.save_pretrained(root / form)
                base = model.unload()
            model = PeftModel.from_pretrained(base, root / "all", adapter_name="all")
            model.load_adapter(root / "some", "some")
        model.eval()

        def logits(form):
            def run(token_ids, total):
                if form is None:
                    with torch.inference_mode(), model.disable_adapter():
                        return one.logits(model, token_ids, total)
                model.set_adapter(form)
                with torch.inference_mode():
                    return one.logits(model, token_ids, total)

            return run

        return root / "model", {form: str(root / form) for form in forms}, logits

    return make


def check(llm, logits):
    """Ask for each adapter and for none, all in one batch."""
    forms = [None, "all", "some", "all"]
    answers = ask(llm, draw_prompts((9, 26, 17, 3)), whole=True, lora=forms)
    for form, answer in zip(forms, answers, strict=True):
        assert_agrees(logits(form), [answer])


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", all_tiny())
def test_adapters_are_pefts(adapted, name):
    folder, adapters, logits = adapted(name)
    check(serve(folder, lora_modules=adapters, max_loras=2), logits)


@pytest.mark.parametrize("name", at_depth([], list(all_tiny())))
def test_adapters_in_graphs_by_host_kernels(adapted, environment, name):
    environment(KILN_CPU_KERNELS="host", **GRAPHS)
    folder, adapters, logits = adapted(name)
    sizes = {"max_num_batched_tokens": 48, "enable_cudagraph_gc": True, "cuda_graph_bs": [4]}
    check(serve(folder, lora_modules=adapters, **sizes), logits)
