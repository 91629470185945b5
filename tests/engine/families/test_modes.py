"""Every family answers as transformers does in float32, however steps are cut up and run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from depth import at_depth
from tiny.model import all_tiny
from tiny_answers import SIZES, ask, assert_agrees, draw_prompts, serve

from kiln.engine.compile.compiled_model import CompiledModel
from kiln.engine.runner import loaded_model
from kiln.jit_kernels.declare.settings import settings

GRAPHS = {"KILN_CPU_GRAPHS": "emulate", "KILN_GRAPH_STRICT": "1", "KILN_GRAPH_VERIFY": "off"}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 1,
}
BLOCK = 5
NAMES = list(all_tiny())


def alone(folder, logits, environment, monkeypatch):
    """One request after the other, a token a step."""
    llm = serve(folder, max_num_seqs=1, max_num_batched_tokens=1)
    assert_agrees(logits, ask(llm, draw_prompts((1, 13)), whole=True))


def batched(folder, logits, environment, monkeypatch):
    """A batch with many others."""
    lengths = [1 + index * 7 % 40 for index in range(17)]
    assert_agrees(logits, ask(serve(folder, num_kv_blocks=512), draw_prompts(lengths)))


def chunked(folder, logits, environment, monkeypatch):
    """Prompts in chunks, with and without a step ahead."""
    for chunk in at_depth([5], [1, 5, 16]):
        llm = serve(folder, max_chunk_tokens=chunk, disable_overlap_schedule=chunk == 16)
        assert_agrees(logits, ask(llm, draw_prompts(), whole=True))
        assert llm.core.stats().steps > 40 // chunk


def preempted(folder, logits, environment, monkeypatch):
    """So few blocks that requests are computed anew."""
    blocks = -(-SIZES["max_model_len"] // BLOCK) + 1
    llm = serve(folder, block_size=BLOCK, num_kv_blocks=blocks)
    assert_agrees(logits, ask(llm, draw_prompts()))
    assert llm.core.stats().preemptions > 0


def cached(folder, logits, environment, monkeypatch):
    """Beginnings of prompts that were computed before."""
    llm = serve(folder, block_size=BLOCK)
    first = draw_prompts((18, 11, 6, 26, 7, 12))
    assert_agrees(logits, ask(llm, first))
    answers = ask(llm, [[*prompt, 7, 8, 9] for prompt in first] + first)
    assert_agrees(logits, answers)
    found = [output.num_cached_tokens for _, output in answers]
    assert found == 2 * [(len(prompt) - 1) // BLOCK * BLOCK for prompt in first]


def drafted(folder, logits, environment, monkeypatch):
    """Drafts by n-gram, of prompts that repeat themselves."""
    llm = serve(folder, speculative_config=NGRAM, num_kv_blocks=256)
    prompts = [prompt * 4 for prompt in draw_prompts((3, 5, 9, 2, 4))]
    for seed in range(1, 6):  # until some token of an answer was seen before
        assert_agrees(logits, ask(llm, [*prompts, *draw_prompts([16] * 8, seed)]))
        if llm.core.stats().spec_decode_num_draft_tokens:
            return
    pytest.fail("no step had drafts")


def in_graphs(folder, logits, environment, monkeypatch):
    """Emulated graphs, which every step runs in."""
    environment(**GRAPHS)
    sizes = {"max_num_batched_tokens": 48, "max_num_seqs": 8, "enable_cudagraph_gc": True}
    llm = serve(folder, cuda_graph_bs=at_depth([1, 8], [1, 2, 4, 8]), **sizes)
    assert_agrees(logits, ask(llm, draw_prompts()))
    stats = llm.core.stats()
    assert sum(stats.graph_replays.values()) == stats.steps
    assert not stats.graph_fallbacks


def in_pieces(folder, logits, environment, monkeypatch):
    """Pieces of torch.compile, traced as one graph."""
    for mode in at_depth(["eager"], ["eager", "inductor"]):
        env = replace(settings(), compile=mode)
        monkeypatch.setattr(loaded_model, "settings", lambda env=env: env)
        llm = serve(folder, max_chunk_tokens=16)
        assert isinstance(llm.core.runner.loaded.model, CompiledModel)
        assert_agrees(logits, ask(llm, draw_prompts()))


def by_host_kernels(folder, logits, environment, monkeypatch):
    """The kernels' own source, run on the CPU."""
    environment(KILN_CPU_KERNELS="host")
    assert_agrees(logits, ask(serve(folder), draw_prompts((1, 9, 26)), whole=True))


MODES = [alone, batched, chunked, preempted, cached, drafted, in_graphs, in_pieces, by_host_kernels]
ALL = [(mode, name) for name in NAMES for mode in MODES]
ONE_EACH = [(MODES[index % len(MODES)], name) for index, name in enumerate(NAMES)]


@pytest.mark.parametrize(
    ("mode", "name"),
    at_depth(ONE_EACH, ALL),
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
def test_a_family_answers_as_transformers(made, environment, monkeypatch, mode, name):
    mode(*made(name), environment, monkeypatch)
