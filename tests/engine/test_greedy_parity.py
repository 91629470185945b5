"""Greedy tokens are those of transformers' generate, in float32 and in float16.

tests/engine/families has the modes of an engine, of every family.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from depth import at_depth
from greedy_models import COMMON, MODELS

import kiln
from kiln import LLM, SamplingParams
from kiln.engine.attention.kernel_attention import KernelAttention

NUM_TOKENS = 12
HALF_TOKENS = 8  # of the answers in float16
LENGTHS = (1, 2, 3, 5, 7, 8, 9, 13, 16, 17, 21, 30, 31, 33, 48, 64, 70)  # 17: one and 16 others
CONTEXT = max(LENGTHS) + NUM_TOKENS
GRAPHS = {"KILN_CPU_GRAPHS": "emulate", "KILN_GRAPH_STRICT": "1", "KILN_GRAPH_VERIFY": "off"}


@dataclass(frozen=True)
class Case:
    """A model on disk, prompts, and what transformers answers to each of them alone."""

    folder: Path
    prompts: list[list[int]]
    answers: list[list[int]]


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    @cache
    def make(name: str) -> Case:
        import transformers

        torch.manual_seed(3)
        family, extra = MODELS[name]
        config = getattr(transformers, f"{family}Config")(**{**COMMON, **extra})
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        for parameter in model.parameters():  # biases and norms too, which start out plain
            torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        return Case(folder, *draw(model, 300))

    return make


def draw(model: Any, vocabulary: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return a prompt of each length, and what the model answers.

    A prompt is drawn anew where two tokens are so close that the order of a sum may decide.
    """
    prompts, answers = [], []
    for length in LENGTHS:
        for _ in range(20):
            prompt = torch.randint(0, vocabulary, (length,)).tolist()
            tokens = answer(model, prompt)
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, length - 1 :]
            best = logits.topk(2).values
            if bool((best[:, 0] - best[:, 1] > 1e-4 * logits.abs().amax(1)).all()):
                break
        else:
            raise AssertionError(f"no answer to {length} tokens is clear in float32")
        prompts.append(prompt)
        answers.append(tokens)
    return prompts, answers


def answer(model: Any, prompt: list[int], count: int = NUM_TOKENS) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
        )
    return out[0, len(prompt) :].tolist()


def load(folder: Path, **settings: Any) -> LLM:
    sizes = {"max_model_len": CONTEXT, "num_kv_blocks": 512, **settings}
    return LLM(str(folder), device="cpu", dtype="float32", **sizes)


def tokens(llm: LLM, prompts: list[list[int]], count: int = NUM_TOKENS) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=count)
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("budget", [1, 20])
def test_with_a_small_budget_of_tokens_a_step(case, budget):
    made = case("llama")
    llm = load(made.folder, max_num_batched_tokens=budget, max_num_seqs=5, block_size=1)
    picked = slice(None, None, 2)
    assert tokens(llm, made.prompts[picked]) == made.answers[picked]


def test_without_overlap(case):
    made = case("llama")
    llm = load(made.folder, max_chunk_tokens=20, disable_overlap_schedule=True)
    assert tokens(llm, made.prompts) == made.answers


WIDE_HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"head_dim": 64, "num_key_value_heads": 1}),
    "mistral-window": ("Mistral", {"head_dim": 80, "sliding_window": 18}),
}
ATTENTION = {  # environment, and whether the kernels attend
    "torch": ({"KILN_ATTENTION_DECODE": "torch", "KILN_ATTENTION_PREFILL": "torch"}, False),
    "decode and prefill": ({}, True),
    "decode": ({"KILN_ATTENTION_PREFILL": "torch"}, True),
    "prefill": ({"KILN_ATTENTION_DECODE": "torch"}, True),
    "graphs": (GRAPHS, True),
    "graphs in pieces": ({**GRAPHS, "KILN_GRAPH_PREFILL": "piecewise"}, True),
}


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    @cache
    def make(name: str) -> tuple[Path, list[list[int]], list[list[int]]]:
        """A model, and prompts with answers in float32 that float16 cannot change."""
        import transformers

        torch.manual_seed(5)
        family, extra = WIDE_HEADS[name]
        config = getattr(transformers, f"{family}Config")(**{**COMMON, **extra})
        model = transformers.AutoModelForCausalLM.from_config(config).half().float().eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.1)
            parameter.data = parameter.data.half().float()
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        drawn = [clear_prompt(model, length) for length in (1, 5, 16, 17, 33, 50)]
        return folder, [prompt for prompt, _ in drawn], [tokens for _, tokens in drawn]

    return make


def clear_prompt(model: Any, length: int) -> tuple[list[int], list[int]]:
    """Draw prompts until rounding to float16 cannot change the answer; return both.

    How far float16 is off depends on the CPU, and so does the prompt that is chosen. The first
    or the second draw will do as a rule; 100 are not enough only where float16 is plainly wrong.
    """
    for _ in range(100):
        prompt = torch.randint(0, 300, (length,)).tolist()
        tokens = answer(model, prompt, HALF_TOKENS)
        ids = torch.tensor([prompt + tokens[:-1]])
        with torch.inference_mode():
            exact = model(ids).logits[0, length - 1 :]
            rounded = model.half()(ids).logits[0, length - 1 :].float()
        model.float()
        best = exact.topk(2).values
        if bool((best[:, 0] - best[:, 1] > 4 * (exact - rounded).abs().amax(1)).all()):
            return prompt, tokens
    raise AssertionError(f"rounding to float16 may change every answer to {length} tokens")


@pytest.mark.parametrize(
    ("name", "attention"),
    at_depth(
        [("qwen3", "graphs"), ("mistral-window", "decode and prefill"), ("qwen3", "torch")],
        [(name, attention) for name in WIDE_HEADS for attention in ATTENTION],
    ),
)
def test_each_attention_gives_the_tokens_that_rounding_cannot_change(
    half, environment, name, attention
):
    folder, prompts, answers = half(name)
    environ, kernels = ATTENTION[attention]
    environment(KILN_CPU_KERNELS="host", **environ)
    for chunk in at_depth((20,), (None, 20)):
        sizes = {"num_kv_blocks": 64, "cuda_graph_bs": at_depth([6], [1, 2, 4, 6])}
        sizes |= {"max_chunk_tokens": chunk, "max_num_batched_tokens": at_depth(24, 64)}
        llm = LLM(str(folder), device="cpu", dtype="float16", enable_cudagraph_gc=True, **sizes)
        assert isinstance(llm.core.runner.loaded.attention, KernelAttention) == kernels
        assert tokens(llm, prompts, HALF_TOKENS) == answers
        stats = llm.core.stats()
        assert bool(stats.graphs) == ("KILN_CPU_GRAPHS" in environ)
        assert sum(stats.graph_replays.values()) == (stats.steps if stats.graphs else 0)


def test_the_demo_model():
    import transformers

    folder = Path(kiln.__file__).resolve().parents[3] / "engine" / "demo"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts, wanted = draw(model, model.config.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    outputs = load(folder, max_chunk_tokens=7).generate(prompts, params)
    assert [list(output.outputs[0].token_ids) for output in outputs] == wanted
