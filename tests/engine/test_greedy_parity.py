"""Greedy tokens are those of transformers' generate, in float32, however the work is cut up."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from kiln.engine.compile.compiled_model import CompiledModel
from kiln.engine.runner import loaded_model
from kiln.jit_kernels.declare.settings import settings

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


@pytest.mark.parametrize("name", MODELS)
def test_each_prompt_alone(case, name):
    made = case(name)
    llm = load(made.folder, block_size=7)
    picked = slice(None, None, 4)
    alone = [tokens(llm, [prompt])[0] for prompt in made.prompts[picked]]
    assert alone == made.answers[picked]


@pytest.mark.quick(4)
@pytest.mark.parametrize("chunk", [1, 7, 64, None])
@pytest.mark.parametrize("name", MODELS)
def test_batched_with_16_others(case, name, chunk):
    made = case(name)
    llm = load(made.folder, max_chunk_tokens=chunk)
    assert tokens(llm, made.prompts) == made.answers
    assert llm.core.stats().preemptions == 0


@pytest.mark.quick(4)
@pytest.mark.parametrize("chunk", [1, 7, 64, None])
@pytest.mark.parametrize("name", MODELS)
def test_with_one_block_of_headroom(case, name, chunk):
    made = case(name)
    blocks = -(-CONTEXT // 5) + 1
    llm = load(made.folder, block_size=5, num_kv_blocks=blocks, max_chunk_tokens=chunk)
    assert tokens(llm, made.prompts) == made.answers
    assert llm.core.stats().preemptions > 0


EAGER = [("eager", name) for name in MODELS]
INDUCTOR = [("inductor", name) for name in ("llama-mha-biases", "qwen3-tied-biases", "qwen2-moe")]


@pytest.mark.quick(4)
@pytest.mark.parametrize(("mode", "name"), at_depth(EAGER, EAGER + INDUCTOR))
def test_in_pieces_of_torch_compile(case, monkeypatch, mode, name):
    made = case(name)
    env = replace(settings(), compile=mode)
    monkeypatch.setattr(loaded_model, "settings", lambda: env)
    llm = load(made.folder, max_chunk_tokens=16)
    assert isinstance(llm.core.runner.loaded.model, CompiledModel)
    assert tokens(llm, made.prompts) == made.answers


@pytest.mark.parametrize("budget", [1, 20])
def test_with_a_small_budget_of_tokens_a_step(case, budget):
    made = case("llama")
    llm = load(made.folder, max_num_batched_tokens=budget, max_num_seqs=5, block_size=1)
    picked = slice(None, None, 2)
    assert tokens(llm, made.prompts[picked]) == made.answers[picked]


@pytest.fixture
def in_graphs(environment):
    """Steps run through emulated graphs.

    In float32 the attention of torch runs between the pieces of each graph. They are not compared
    with eager steps bit by bit: torch's sums in a group of experts depend on the size of the group,
    which rows of padding are part of.
    """
    environment(**GRAPHS)


@pytest.mark.quick(3)
@pytest.mark.usefixtures("in_graphs")
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", ["mistral-window", "qwen3", "qwen2-moe"])
def test_in_graphs(case, name, overlap):
    made = case(name)
    sizes = {"max_num_batched_tokens": 48, "max_num_seqs": 8, "block_size": 7}
    sizes |= {"enable_cudagraph_gc": True, "cuda_graph_bs": at_depth([1, 2, 4, 8], None)}
    llm = load(made.folder, disable_overlap_schedule=not overlap, **sizes)
    assert tokens(llm, made.prompts) == made.answers
    stats = llm.core.stats()
    assert sum(stats.graph_replays.values()) == stats.steps
    assert not stats.graph_fallbacks


def test_without_overlap(case):
    made = case("llama")
    llm = load(made.folder, max_chunk_tokens=20, disable_overlap_schedule=True)
    assert tokens(llm, made.prompts) == made.answers


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["qwen3", "llama-rope-yarn", "qwen2-moe"])
def test_on_the_kernels_own_source_run_on_the_cpu(case, environment, name):
    made = case(name)
    environment(KILN_CPU_KERNELS="host")
    llm = load(made.folder, num_kv_blocks=64)
    assert tokens(llm, made.prompts[3:6], 4) == [ids[:4] for ids in made.answers[3:6]]


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
