"""A model whose keys and values are beyond 8-bit floats: scales of its checkpoint make them fit."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kiln import LLM, SamplingParams
from kiln.engine.attention.kernel_attention import KernelAttention

FILE = "model.safetensors"
LARGE = ((2**13, 2**9), (2**9, 2**13))  # how much larger keys and values of each layer are
GREEDY = SamplingParams(temperature=0, max_tokens=8)
REPORTED = GREEDY.replace(prompt_logprobs=0)


@dataclass(frozen=True)
class Answer:
    """What an engine gives for the prompts, and then for the same prompts again."""

    tokens: list[list[int]]
    logprobs: torch.Tensor  # of the tokens of all prompts
    again: list[list[int]]
    cached: int  # tokens of the prompts whose blocks were there
    by_kernels: bool
    stats: Any


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folders of a model without scales and with calibrated ones, and prompts.

    Powers of two make keys and values large, other ones in each layer, and change nothing else.
    """
    import transformers

    torch.manual_seed(3)
    config = transformers.Qwen3Config(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=256,
        eos_token_id=None,
    )  # fmt: skip
    network = transformers.AutoModelForCausalLM.from_config(config).bfloat16().eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    with torch.no_grad():
        for layer, (key, value) in zip(network.model.layers, LARGE, strict=True):
            own = layer.self_attn
            for larger, smaller, factor in (
                (own.k_norm, own.q_norm, key),
                (own.v_proj, own.o_proj, value),
            ):
                larger.weight.mul_(factor)
                smaller.weight.div_(factor)
    prompts = [torch.randint(0, 300, (length,)).tolist() for length in (3, 17, 40, 33)]
    plain, scaled = (tmp_path_factory.mktemp(name) for name in ("plain", "scaled"))
    network.save_pretrained(plain)
    shutil.copytree(plain, scaled, dirs_exist_ok=True)
    tensors = load_file(plain / FILE)
    with torch.inference_mode():
        caches = [network(torch.tensor([one]), use_cache=True).past_key_values for one in prompts]
    for index in range(2):
        for name in ("keys", "values"):
            most = max(getattr(one.layers[index], name).abs().max().item() for one in caches)
            assert most > 2 * 448, "not beyond 8-bit floats"
            tensors[f"model.layers.{index}.self_attn.{name[0]}_scale"] = torch.tensor([most / 448])
    save_file(tensors, scaled / FILE, {"format": "pt"})
    return plain, scaled, prompts


@pytest.fixture(scope="module")
def answer(model):
    """Return a function from "plain" or "scaled", and flags, to the answer of an engine."""
    plain, scaled, prompts = model
    folders = {"plain": plain, "scaled": scaled}

    def run(name, kv_cache_dtype="fp8", **flags):
        made = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 32, "max_model_len": 64}
        with LLM(str(folders[name]), kv_cache_dtype=kv_cache_dtype, **{**made, **flags}) as llm:
            first, again = (llm.generate(prompts, params) for params in (REPORTED, GREEDY))
            ends = [at for one in first for at in one.prompt_logprobs[1:]]
            return Answer(
                tokens=[list(one.outputs[0].token_ids) for one in first],
                logprobs=torch.tensor([next(iter(at.values())).logprob for at in ends]),
                again=[list(one.outputs[0].token_ids) for one in again],
                cached=sum(one.num_cached_tokens for one in again),
                by_kernels=isinstance(llm.core.runner.loaded.attention, KernelAttention),
                stats=llm.core.stats(),
            )

    return run


@pytest.fixture(scope="module")
def by_torch(answer):
    """The same function, without flags: each engine runs once, on torch."""
    return cache(answer)


def test_calibrated_scales_give_nearly_the_answers_of_16_bits(answer, by_torch, environment):
    wanted, without = by_torch("plain", "auto").logprobs, by_torch("plain").logprobs
    lost = (without - wanted).abs().mean()
    assert lost > 0.5, "saturation must show"
    assert (by_torch("scaled").logprobs - wanted).abs().mean() < 0.1 * lost
    environment(KILN_CPU_KERNELS="host")
    kernels = answer("scaled", dtype="bfloat16")
    assert kernels.by_kernels
    assert (kernels.logprobs - wanted).abs().mean() < 0.1 * lost


def test_a_pool_of_other_floats_ignores_them(by_torch):
    wanted, found = by_torch("plain", "auto"), by_torch("scaled", "auto")
    assert found.tokens == wanted.tokens
    assert torch.equal(found.logprobs, wanted.logprobs)


def test_blocks_of_the_prefix_cache_have_them(by_torch):
    found = by_torch("scaled")
    assert found.cached >= 64
    assert found.again == found.tokens != by_torch("plain").tokens


def same(found, wanted):
    assert found.again == found.tokens == wanted.tokens
    torch.testing.assert_close(found.logprobs, wanted.logprobs, rtol=0, atol=1e-3)


def test_layers_that_share_a_compiled_piece_have_their_own(answer, by_torch, environment):
    plain, scaled = by_torch("plain"), by_torch("scaled")
    environment(KILN_COMPILE="eager")
    same(answer("plain"), plain)  # its program is in the cache then
    same(answer("scaled"), scaled)


def test_chunks_and_blocks_that_were_in_host_memory_have_them(answer, by_torch):
    few = {"max_num_batched_tokens": 16, "block_size": 4, "num_kv_blocks": 16}
    found = answer("scaled", kv_offload_gib=0.01, **few)
    same(found, by_torch("scaled"))
    assert found.stats.kv_offload_loaded_blocks > 0


@pytest.mark.deep
def test_two_ranks_have_the_same(answer, by_torch):
    same(answer("scaled", tensor_parallel_size=2), by_torch("scaled"))


@pytest.mark.deep
def test_graphs_have_them(answer, environment):
    variables = {"KILN_CPU_KERNELS": "host", "KILN_GRAPH_STRICT": "1", "KILN_GRAPH_VERIFY": "off"}
    environment(**variables)
    wanted = answer("scaled", dtype="bfloat16", disable_cuda_graph=True)
    environment(**variables, KILN_CPU_GRAPHS="emulate")
    found = answer("scaled", dtype="bfloat16", max_num_seqs=4, max_num_batched_tokens=32)
    assert sum(found.stats.graph_replays.values()) > 0
    assert found.tokens == wanted.tokens
