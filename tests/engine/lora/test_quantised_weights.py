"""Adapters on quantised weights: y = rounded(x) @ weight.T + B(A x), with x that is not rounded.

PEFT on the twin is the oracle where weights alone are quantised, else the emulation, which equals
PEFT where nothing is rounded.
"""

from __future__ import annotations

import warnings
from functools import cache

import pytest
import torch
from depth import at_depth
from emulated_models import Emulated
from packers.packer import all_packers
from quantised_adapters import write_adapter
from quantised_answers import EXACT, SHARE, ask, assert_agrees, draw_prompts, serve, tokens
from quantised_folders import cases

PACKERS = all_packers()
WEIGHTS_ONLY = sorted(name for name, one in PACKERS.items() if one.rounded is None)
ROUNDED = sorted(name for name, one in PACKERS.items() if one.rounded is not None)
DENSE = sorted(name for name, one in PACKERS.items() if one.packs("model.layers.0.mlp.up_proj"))
FEW = ["awq-32", "gptq-act-order", "ct-int8-group-32-old", "mxfp4"]
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TARGETS = {  # of PEFT, gate_proj means those of all experts too, which take no adapters here
    "llama": ((*ATTENTION, "gate_proj", "up_proj", "down_proj"), ("k_proj", "o_proj", "up_proj")),
    "qwen3-moe": (ATTENTION, ("k_proj", "o_proj")),
}
GRAPHS = {"KILN_CPU_GRAPHS": "emulate", "KILN_GRAPH_STRICT": "1", "KILN_GRAPH_VERIFY": "off"}


@pytest.fixture(scope="module")
def adapted(quantised, tmp_path_factory):
    """Return a function from a packer and a family to a checkpoint and two adapters.

    That is their folders by name, and the emulation of each, and of the model without one.
    """

    @cache
    def make(name, family):
        made, root = quantised(name, family), tmp_path_factory.mktemp("adapters")
        all_of_them, some = TARGETS[family]
        own = {
            "all": write_adapter(root / "all", made, 4, all_of_them),
            "some": write_adapter(root / "some", made, 9, some),
        }
        models = {form: Emulated(made, adapter=one) for form, one in own.items()}
        folders = {form: str(root / form) for form in own}
        return made, folders, {None: Emulated(made), **models}

    return make


@cache
def peft_model(twin, *folders):
    import transformers
    from peft import PeftModel

    base = transformers.AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(base, folders[0], adapter_name="all")
        model.load_adapter(folders[1], "some")
    return model.eval()


@torch.inference_mode()
def pefts(made, folders, form, prompt):
    """Return PEFT's log-probabilities [tokens, vocab] of an adapter on the twin."""
    model = peft_model(made.twin, *folders.values())
    model.set_adapter(form)
    return model(torch.tensor([prompt])).logits[0].log_softmax(-1)


def answered(llm, models):
    """Ask for each adapter and none, all in one batch, and check all; return the answers."""
    forms = [*models, *models]
    answers = ask(llm, draw_prompts((3, 11, 18, 6, 1, 30)), whole=True, lora=forms)
    assert_agrees([models[form] for form in forms], answers)
    return forms, answers


@pytest.mark.parametrize("family", TARGETS)
def test_the_emulation_without_rounding_is_peft(adapted, family):
    made, folders, models = adapted((WEIGHTS_ONLY + ROUNDED)[0], family)
    for form in folders:
        model = Emulated(made, rounds=False, adapter=models[form].adapter)
        base = Emulated(made, rounds=False)
        for prompt in draw_prompts((5, 20)):
            found, wanted = model.logprobs(prompt), pefts(made, folders, form, prompt)
            assert float((found - wanted).abs().max()) <= EXACT
            assert float((found - base.logprobs(prompt)).abs().max()) > 0.1


@pytest.mark.parametrize(("name", "family"), cases(at_depth(FEW, WEIGHTS_ONLY)))
def test_two_adapters_on_quantised_weights_are_pefts_on_the_twin(adapted, name, family):
    made, folders, models = adapted(name, family)
    llm = serve(made.folder, lora_modules=folders, max_loras=2)
    for form, (prompt, output) in zip(*answered(llm, models), strict=True):
        if form is None:
            continue
        chosen = list(output.outputs[0].token_ids)
        wanted = pefts(made, folders, form, prompt + chosen)
        assert wanted[len(prompt) - 1 : -1].argmax(-1).tolist() == chosen
        for place, reported in enumerate(output.prompt_logprobs[1:]):
            found = torch.tensor([one.logprob for one in reported.values()])
            assert float((found - wanted[place][list(reported)]).abs().max()) <= EXACT


@pytest.mark.parametrize(
    ("name", "family"),
    at_depth(
        [("fp8-blocks", "llama"), ("fp8-tensor", "qwen3-moe"), ("fp8-static", "llama")],
        cases(ROUNDED),
    ),
)
def test_two_adapters_add_to_rounded_activations(adapted, name, family):
    made, folders, models = adapted(name, family)
    answered(serve(made.folder, lora_modules=folders, max_loras=2), models)


@pytest.mark.parametrize("name", at_depth(ROUNDED[:1], ROUNDED))
def test_an_adapter_that_saw_rounded_inputs_would_be_told(adapted, name):
    made, _, models = adapted(name, "llama")
    right = models["all"]

    class OnRounded(Emulated):
        def _added(self, x, seen, name):
            return super()._added(seen, seen, name)

    wrong = OnRounded(made, adapter=right.adapter)
    found = [(right.logprobs(ids) - wrong.logprobs(ids)).abs().amax(1) for ids in draw_prompts()]
    assert float(torch.cat(found).quantile(SHARE)) > 10 * EXACT


WAYS = {
    "in chunks, one adapter on the device": ({"max_chunk_tokens": 5, "max_loras": 1}, {}),
    "preempted": ({"block_size": 5, "num_kv_blocks": 10}, {}),
    "in graphs": (
        {"cuda_graph_bs": [1, 8], "max_num_batched_tokens": 48, "max_num_seqs": 8},
        GRAPHS,
    ),
    "on the kernels' own source": ({}, {"KILN_CPU_KERNELS": "host"}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", at_depth(["fp8-blocks"], DENSE))
def test_however_steps_are_cut_up_and_run(adapted, environment, name, way):
    flags, variables = WAYS[way]
    environment(**variables)
    made, folders, models = adapted(name, "llama")
    llm = serve(made.folder, lora_modules=folders, **flags)
    forms = [*models, *models]
    answers = ask(llm, draw_prompts((11, 3, 17, 1, 6, 2)), lora=forms)
    assert_agrees([models[form] for form in forms], answers)
    assert len({tuple(one) for one in tokens(answers)}) == len(answers)
