"""However steps are cut up and run, quantised weights answer what their checkpoint means."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from depth import at_depth
from emulated_models import Emulated
from packers.packer import all_packers
from quantised_answers import SIZES, ask, assert_agrees, draw_prompts, serve
from quantised_folders import cases

from kiln.engine.compile.compiled_model import CompiledModel
from kiln.engine.runner import loaded_model
from kiln.jit_kernels.declare.settings import settings

# Some kinds of weights that the engine knows; others differ in their files alone.
FEW = [("fp8-blocks", "llama"), ("fp8-static", "qwen3-moe"), ("gptq-act-order", "llama")]
GRAPHS = {"KILN_CPU_GRAPHS": "emulate", "KILN_GRAPH_STRICT": "1", "KILN_GRAPH_VERIFY": "off"}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 1,
}
BLOCK = 5

few = pytest.mark.parametrize(("packer", "family"), at_depth(FEW, cases(sorted(all_packers()))))
pytestmark = few


@pytest.fixture
def answered(quantised, packer, family):
    """Return a function that serves the checkpoint, checks its answers, and returns the engine."""

    def run(prompts=None, **flags):
        made = quantised(packer, family)
        llm = serve(made.folder, **flags)
        assert_agrees(Emulated(made), ask(llm, prompts or draw_prompts()))
        return llm

    return run


@pytest.mark.parametrize("chunk", at_depth([5], [1, 5, 16]))
def test_in_chunks(answered, chunk):
    llm = answered(max_chunk_tokens=chunk, disable_overlap_schedule=chunk == 16)
    assert llm.core.stats().steps > 33 // chunk


def test_each_alone_and_a_token_a_step(answered):
    answered(draw_prompts((1, 3, 6, 2)), max_num_seqs=1, max_num_batched_tokens=1)


def test_in_a_batch_with_many_others(answered):
    lengths = [1 + index * 7 % 30 for index in range(17)]
    answered(draw_prompts(lengths), num_kv_blocks=512)


def test_preempted(answered):
    blocks = -(-SIZES["max_model_len"] // BLOCK) + 1
    llm = answered(block_size=BLOCK, num_kv_blocks=blocks)
    assert llm.core.stats().preemptions > 0


def test_with_a_beginning_that_was_computed_before(quantised, packer, family):
    made = quantised(packer, family)
    llm = serve(made.folder, block_size=BLOCK)
    first = draw_prompts((18, 11, 6, 16, 7, 12))
    assert_agrees(Emulated(made), ask(llm, first))
    answers = ask(llm, [[*prompt, 7, 8, 9] for prompt in first] + first)
    assert_agrees(Emulated(made), answers)
    found = [output.num_cached_tokens for _, output in answers]
    assert found == 2 * [(len(prompt) - 1) // BLOCK * BLOCK for prompt in first]


def test_with_drafts_by_ngram(quantised, packer, family):
    made = quantised(packer, family)
    llm = serve(made.folder, speculative_config=NGRAM, num_kv_blocks=256)
    for seed in range(1, 6):  # until some token of an answer was seen before
        assert_agrees(Emulated(made), ask(llm, draw_prompts([16] * 20, seed)))
        if llm.core.stats().spec_decode_num_draft_tokens:
            return
    pytest.fail("no step had drafts")


def test_in_graphs(answered, environment):
    environment(**GRAPHS)
    sizes = {"max_num_batched_tokens": 48, "max_num_seqs": 8, "enable_cudagraph_gc": True}
    stats = answered(cuda_graph_bs=at_depth([1, 8], [1, 2, 4, 8]), **sizes).core.stats()
    assert sum(stats.graph_replays.values()) == stats.steps
    assert not stats.graph_fallbacks


@pytest.mark.parametrize("mode", at_depth(["eager"], ["eager", "inductor"]))
def test_in_pieces_of_torch_compile(answered, monkeypatch, mode):
    env = replace(settings(), compile=mode)
    monkeypatch.setattr(loaded_model, "settings", lambda: env)
    llm = answered(max_chunk_tokens=16)
    assert isinstance(llm.core.runner.loaded.model, CompiledModel)


def test_on_the_kernels_own_source_run_on_the_cpu(answered, environment):
    environment(KILN_CPU_KERNELS="host")
    answered(draw_prompts((1, 3, 6, 11)))


def test_random_weights_are_quantised_as_the_checkpoint_says(quantised, packer, family):
    """Without a file: the answers are those of a model in floats with nearly the same weights."""
    made = quantised(packer, family)
    prompts = draw_prompts()
    found, plain = (
        ask(serve(folder, load_format="dummy", seed=3), prompts, whole=True)
        for folder in (made.folder, made.twin)
    )
    apart = []
    for (_, one), (_, other) in zip(found, plain, strict=True):
        for mine, theirs in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            shared = mine.keys() & theirs.keys()
            apart += [abs(mine[token].logprob - theirs[token].logprob) for token in shared]
    differences = torch.tensor(apart)
    assert len(differences) > 500
    assert 1e-7 < float(differences.median()) < 0.1  # quantised, but not to something else
