"""Several ranks with quantised weights: right for every share that can be cut, else refused.

Where each token's activations have one scale, a rank of a row-parallel layer takes that of its own
inputs: the numbers are other than those of one rank, and the emulation rounds as the ranks do.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from depth import at_depth
from emulated_models import Emulated
from packers.packer import all_packers
from quantised_adapters import write_adapter
from quantised_answers import EXACT, SHARE, ask, assert_agrees, draw_prompts
from quantised_at_load import FLOATS
from quantised_folders import FUSED, cases, write

from kiln.engine.errors import ConfigError

PACKERS = all_packers()
# Shares of o_proj's and down_proj's inputs are whole blocks of 128, on so many ranks. Each rank has
# 96 outputs of k_proj and v_proj: the second rank's begin inside a block and end inside the next.
SIZES = {
    2: {
        "num_attention_heads": 24,
        "num_key_value_heads": 6,
        "intermediate_size": 512,
        "moe_intermediate_size": 256,
    },
    4: {
        "num_attention_heads": 48,
        "num_key_value_heads": 12,
        "intermediate_size": 1024,
        "moe_intermediate_size": 512,
    },
}
FEW = [("fp8-blocks", "llama", 2), ("fp8-static", "qwen3-moe", 4), ("fp8-tensor", "qwen3-moe", 2)]
ALL = [(name, family, world) for name, family in cases(PACKERS) for world in SIZES]

pytestmark = pytest.mark.usefixtures("in_threads")


@pytest.fixture
def made_for(quantised):
    """Return a function that writes a model that some ranks can have without cutting a block."""

    def make(name, family, world):
        sizes = dict(SIZES[world])
        if family == "llama":
            del sizes["moe_intermediate_size"]
        return quantised(name, family, **sizes)

    return make


@pytest.mark.parametrize(("name", "family", "world"), at_depth(FEW, ALL))
def test_ranks_answer_as_the_checkpoint_means(made_for, llm_of, name, family, world):
    made = made_for(name, family, world)
    answers = ask(llm_of(made.folder, world), draw_prompts(), whole=True)
    assert_agrees(Emulated(made, ranks=world), answers)


@pytest.mark.parametrize(
    ("name", "world"),
    at_depth(
        [("fp8-blocks", 2), ("fp8-tensor", 4)],
        [(name, world) for name in PACKERS for world in (2, 4)],
    ),
)
def test_shares_that_cut_a_block_of_inputs_are_right_or_refused_with_numbers(
    quantised, llm_of, name, world
):
    made = quantised(name, "qwen3-moe")
    if "block" in name:
        numbers = r"(down|o)_proj: .* inputs \d+ to \d+ of (256|384), which cuts a block of 128"
        with pytest.raises(ConfigError, match=numbers):
            llm_of(made.folder, world)
        return
    llm = llm_of(made.folder, world)
    assert_agrees(Emulated(made, ranks=world), ask(llm, draw_prompts()))


@pytest.mark.parametrize(("name", "family", "world"), at_depth(FEW[:1], ALL))
def test_adapters_are_divided_beside_quantised_weights(
    made_for, llm_of, tmp_path, name, family, world
):
    made = made_for(name, family, world)
    adapters = {
        "attention": write_adapter(tmp_path / "attention", made, 4, ("q_proj", "v_proj", "o_proj")),
        "one": write_adapter(tmp_path / "one", made, 9, ("k_proj",)),
    }
    folders = {form: str(tmp_path / form) for form in adapters}
    llm = llm_of(made.folder, world, lora_modules=folders, max_loras=2)
    forms = ["attention", None, "one", "attention"]
    answers = ask(llm, draw_prompts((6, 9, 1, 11)), lora=forms)
    models = [Emulated(made, ranks=world, adapter=adapters.get(form, {})) for form in forms]
    assert_agrees(models, answers)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "name",
    at_depth(
        ["fp8-blocks", "fp8-static", "awq-32", "gptq-act-order"],
        sorted(name for name, one in PACKERS.items() if one.packs("model.layers.0.mlp.down_proj")),
    ),
)
def test_a_layer_of_q_k_and_v_is_divided_with_its_adapters(llm_of, tmp_path, name, world):
    """Each rank has a share of q, one of k and one of v, whatever the format."""
    sizes = {**SIZES[2], **FUSED}
    del sizes["moe_intermediate_size"]
    made = write(tmp_path, PACKERS[name], "llama", config=sizes)
    targets = ("qkv_proj", "gate_up_proj", "down_proj")
    adapters = {"own": write_adapter(tmp_path / "own", made, 5, targets)}
    llm = llm_of(made.folder, world, lora_modules={"own": str(tmp_path / "own")})
    forms = ["own", None, None, "own"]
    answers = ask(llm, draw_prompts((6, 9, 1, 11)), lora=forms)
    models = [Emulated(made, ranks=world, adapter=adapters.get(form, {})) for form in forms]
    assert_agrees(models, answers)


def test_a_scale_of_a_ranks_inputs_is_one_more_rounding(made_for):
    """How far two ranks may be from one: no further than one is from no rounding at all, twice."""
    one = Emulated(made_for("fp8-tensor", "llama", 2))

    def apart(other):
        found = [(one.logprobs(ids) - other.logprobs(ids)).abs() for ids in draw_prompts()]
        return torch.cat(found).amax(1)

    two = apart(replace(one, ranks=2))
    assert float(two.quantile(SHARE)) > EXACT
    assert float(two.max()) < 2 * float(apart(replace(one, rounds=False)).max())


@pytest.mark.parametrize("name", at_depth(["fp8-static"], sorted(PACKERS)))
def test_random_weights_of_ranks_are_nearly_those_of_one(made_for, llm_of, name):
    """Each rank quantises its own share, whose scales may differ from those of the whole."""
    made = made_for(name, "qwen3-moe", 2)
    prompts = draw_prompts()
    alone, two = (
        ask(llm_of(made.folder, world, load_format="dummy"), prompts, whole=True)
        for world in (1, 2)
    )
    apart = [
        abs(mine[token].logprob - theirs[token].logprob)
        for (_, one), (_, other) in zip(alone, two, strict=True)
        for mine, theirs in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True)
        for token in mine.keys() & theirs.keys()
    ]
    assert len(apart) > 1000
    assert float(torch.tensor(apart).quantile(0.9)) < 0.1


@pytest.mark.parametrize("world", at_depth([2], [2, 4]))
def test_floats_that_are_quantised_at_load(llm_of, tmp_path, world):
    """A rank of a row-parallel layer has the scales of all inputs, as a checkpoint has."""
    made = write(tmp_path, FLOATS, "qwen3-moe")
    answers = ask(llm_of(made.folder, world, quantization="fp8"), draw_prompts())
    assert_agrees(Emulated(made, ranks=world), answers)
