"""A KV pool of 8-bit floats: half the memory of 16 bits, and answers as its rounding allows."""

from __future__ import annotations

import pytest
import torch

from kiln import LLM, SamplingParams
from kiln.engine.attention.kernel_attention import KernelAttention
from kiln.engine.config import KVConfig
from kiln.engine.errors import ConfigError
from kiln.engine.kv.pool import KVPool, KVShape
from kiln.engine.kv.shape import AttentionShape
from kiln.engine.runner.device import resolve_kv_dtype

CPU = torch.device("cpu")
E4M3 = torch.float8_e4m3fn
ATTENTION = AttentionShape(2, 2, 16, (None, None))
SHAPE = KVShape(ATTENTION, E4M3)


def test_a_token_takes_half_of_what_it_takes_in_16_bits():
    token_id = 4
    wide = KVShape(ATTENTION, torch.bfloat16).bytes_per_token
    assert 2 * (SHAPE.bytes_per_token - token_id) == wide - token_id


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_holds_the_nearest_numbers_and_saturates(by_head, dtype):
    pool = KVPool(SHAPE, 3, 16, CPU, by_head=by_head)
    x = torch.randn(2, 2, 16).mul(3).to(dtype)
    x[0, 0, :3] = torch.tensor([1e4, -1e4, float("nan")])
    pool.store(1, torch.tensor([5, 40]), x, -x)
    keys, values = (half.view(torch.uint8)[[0, 2], [5, 8]].view(E4M3) for half in pool.blocks(1))
    wanted = x.float().clamp(-448, 448).to(E4M3).float()
    assert torch.equal(keys.float().nan_to_num(7), wanted.nan_to_num(7))
    assert torch.equal(values.float().nan_to_num(7), (-wanted).nan_to_num(7))
    assert keys[0, 0, 0].item() == 448
    assert not pool.blocks(0)[0].float().any()


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_both_names_mean_e4m3(name):
    assert resolve_kv_dtype(KVConfig(kv_cache_dtype=name).kv_cache_dtype, torch.float16) == E4M3
    assert resolve_kv_dtype("auto", torch.float16) == torch.float16


def test_another_name_is_refused():
    with pytest.raises(ConfigError, match="kv_cache_dtype='int4': must be one of auto, fp8"):
        KVConfig(kv_cache_dtype="int4")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose heads both kernels of attention take, and prompts for either."""
    import transformers

    torch.manual_seed(3)
    config = transformers.Qwen3Config(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=256,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("fp8")
    transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder)
    return folder, [torch.randint(0, 300, (length,)).tolist() for length in (3, 17, 40)]


def answer(model, kv):
    folder, prompts = model
    llm = LLM(str(folder), device="cpu", dtype="bfloat16", kv_memory_gib=0.01, kv_cache_dtype=kv)
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=1)
    answers = [output.outputs[0] for output in llm.generate(prompts, params)]
    return {
        "blocks": llm.core.runner.num_blocks,
        "kernels": isinstance(llm.core.runner.loaded.attention, KernelAttention),
        "tokens": [list(one.token_ids) for one in answers],
        "first": [max(p.logprob for p in one.logprobs[0].values()) for one in answers],
    }


@pytest.mark.quick(1)
@pytest.mark.parametrize("cpu_kernels", ["torch", "host-check"])
def test_an_engine_holds_twice_the_tokens_and_answers_alike(model, environment, cpu_kernels):
    environment(KILN_CPU_KERNELS=cpu_kernels)
    wide, narrow = answer(model, "auto"), answer(model, "fp8")
    assert wide["kernels"] == narrow["kernels"] == (cpu_kernels != "torch")
    # A token's id takes 4 bytes more.
    assert narrow["blocks"] == pytest.approx(2 * wide["blocks"], rel=0.01)
    off = torch.tensor(wide["first"]) - torch.tensor(narrow["first"])
    assert 0 < off.abs().max() < 0.1, "8 bits must show, but little"
    same = [a == b for x, y in zip(wide["tokens"], narrow["tokens"], strict=True)
            for a, b in zip(x, y, strict=True)]  # fmt: skip
    assert sum(same) >= 0.7 * len(same)
