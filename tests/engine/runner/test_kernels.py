"""What a model can call is loaded before it is ready, and nothing else is."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from depth import at_depth
from greedy_models import COMMON, MODELS
from kernel_calls import ask_everything
from tiny.model import all_tiny

from kiln import LLM
from kiln.cache.env import EnvError, read
from kiln.engine.config import (
    EngineConfig,
    KVConfig,
    LoRAConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from kiln.engine.models.kernel_needs import kernel_needs
from kiln.engine.models.registry import read_model
from kiln.engine.requests.drafts import Draft
from kiln.engine.runner import kernels
from kiln.engine.runner.kernels import called_kernels
from kiln.jit_kernels.compile.warmup import jobs_for
from kiln.jit_kernels.declare.families import families

PLAIN_CONFIG = EngineConfig(ModelConfig("m"))
PLAIN = {
    "step_inputs": 1, "sample_tokens": 1, "token_edits": 1, "ban_words": 1, "rope_store": 1,
    "shared_blocks": 1, "attention_plan": 1, "paged_attention": 1, "prefill_plan": 1,
    "fused_add_rms_norm": 1, "silu_and_mul": 1,
    "skinny_gemm": 2, "skinny_gemm_silu_and_mul": 2,
}  # fmt: skip
PREFILL = {"sm_80": {"paged_prefill": 1}, "sm_90a": {"paged_prefill_wgmma": 1}}
ROUTING = {
    "route_tokens": 1, "align_tokens": 1, "skinny_gemm": 4, "skinny_gemm_silu_and_mul": 0,
}  # fmt: skip


@pytest.fixture
def folder_of(tmp_path):
    """Return a function that writes config.json of one of MODELS, with more keys."""

    def write(name, **more):
        import transformers

        family, own = MODELS[name]
        config = getattr(transformers, f"{family}Config")(
            **{**COMMON, "hidden_size": 256, **own, **more}
        )
        config.architectures = [f"{family}ForCausalLM"]
        config.save_pretrained(tmp_path)
        return tmp_path

    return write


def load(folder, **settings):
    sizes = {"max_model_len": 96, "num_kv_blocks": 80, "max_num_batched_tokens": 512}
    own = {"dtype": "bfloat16", "load_format": "dummy", "skip_tokenizer_init": True}
    return LLM(str(folder), device="cpu", **{**sizes, **own, **settings})


@pytest.mark.quick(6)
@pytest.mark.parametrize("name", all_tiny())
def test_every_family_calls_all_that_it_loads_and_nothing_else(kernel_calls, tmp_path, name):
    one = all_tiny()[name]
    has_factors = "short_factor" in str(one.fields)  # of rotary embeddings: as many as a head has
    one.save(tmp_path, **({} if has_factors else {"hidden_size": 256}))
    with load(tmp_path) as llm:
        ask_everything(llm)
    assert kernel_calls.called == kernel_calls.loaded
    assert len(kernel_calls.loaded) >= 7


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("settings", "variables"),
    [
        ({"kv_cache_dtype": "fp8"}, {}),
        ({"dtype": "float16"}, {}),
        ({"dtype": "float32"}, {}),
        ({"block_size": 8}, {}),
        ({}, {"KILN_KV": "torch"}),
        ({}, {"KILN_ATTENTION_DECODE": "torch"}),
        ({"cuda_graph_bs": [1, 8]}, {"KILN_CPU_GRAPHS": "emulate"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", at_depth(["qwen3"], ["qwen3", "qwen2-moe", "llama"]))
def test_whatever_the_dtypes_blocks_and_toggles(
    kernel_calls, folder_of, environment, name, settings, variables
):
    environment(**variables)
    with load(folder_of(name, **({"head_dim": 64} if name == "qwen3" else {})), **settings) as llm:
        ask_everything(llm)
    assert kernel_calls.called == kernel_calls.loaded


class Guess:
    """Proposes the same tokens always."""

    wanted = num_tokens = 2

    def begin(self, num_rows, *, with_prompts):
        pass

    def observe(self, batch, sampled):
        pass

    def propose(self, request, most):
        return Draft(min(most, 2), (7,) * min(most, 2))


def test_drafts_call_what_verifies_them(kernel_calls, folder_of):
    model = ModelConfig(
        str(folder_of("llama")), device="cpu", dtype="bfloat16", load_format="dummy"
    )
    limits = SchedulerConfig(max_num_batched_tokens=512)
    drafts = SpeculativeConfig("ngram", num_speculative_tokens=2)
    config = EngineConfig(model, KVConfig(num_blocks=80), limits, speculative=drafts)
    with LLM.from_config(config, skip_tokenizer_init=True) as llm:
        llm.core.scheduler.drafter = Guess()
        ask_everything(llm)
    assert kernel_calls.called == kernel_calls.loaded
    assert ("verify_chain",) in kernel_calls.called


@pytest.mark.parametrize("arch", PREFILL)
@pytest.mark.parametrize(
    ("name", "more", "wanted"),
    [
        ("llama", {}, {}),
        ("qwen3", {"head_dim": 64}, {}),
        ("mixtral", {}, ROUTING),
        (
            "llama-one-kv-head-tied-gelu",
            {},
            {"gelu_and_mul": 1, "silu_and_mul": 0, "skinny_gemm_silu_and_mul": 0},
        ),
    ],
)
def test_the_programs_of_a_model_on_a_gpu(folder_of, name, more, wanted, arch):
    """As 8B Llama's: eleven, of some 130 of a GPU."""
    model = read_model(folder_of(name, **more))
    needs = kernel_needs(model[1], torch.bfloat16, torch.bfloat16)
    specs = called_kernels(PLAIN_CONFIG, model, torch.device("cuda"), needs)
    built = Counter(job.spec.name for job in jobs_for(specs, [arch], needs))
    assert built == +Counter({**PLAIN, **PREFILL[arch], **wanted})


@pytest.mark.parametrize(("toggle", "there"), [("auto", False), ("torch", True), ("jit", True)])
def test_a_toggle_of_a_family_without_a_caller_is_not_ignored(
    monkeypatch, folder_of, toggle, there
):
    env = read(families(), {"KILN_QUANTIZATION": toggle})
    monkeypatch.setattr(kernels, "settings", lambda: env)
    model = read_model(folder_of("llama"))
    needs = kernel_needs(model[1], torch.float32, torch.float32)
    specs = called_kernels(PLAIN_CONFIG, model, torch.device("cpu"), needs)
    assert ("quantize" in {spec.name for spec in specs}) == there
    assert "attention_plan" not in {spec.name for spec in specs}


@pytest.mark.parametrize(
    ("lora", "variables"), [(True, {}), (False, {"KILN_LINEAR": "triton"})], ids=str
)
def test_no_gated_product_is_loaded_where_none_is_called(folder_of, environment, lora, variables):
    environment(**variables)
    config = replace(PLAIN_CONFIG, lora=LoRAConfig(root="adapters" if lora else None))
    model = read_model(folder_of("llama"))
    needs = kernel_needs(model[1], torch.bfloat16, torch.bfloat16)
    specs = called_kernels(config, model, torch.device("cuda"), needs)
    assert [spec.name for spec in specs if spec.family == "linear"] == ["skinny_gemm"]


def test_lora_chunked_alone_is_refused_without_adapters_too(folder_of, environment):
    environment(KILN_LORA_CHUNKED="jit")
    with pytest.raises(EnvError, match="has no effect without KILN_LORA_BACKEND=csgmv"):
        load(folder_of("llama"))
