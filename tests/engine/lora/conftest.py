"""Tiny models, and adapters that PEFT makes for them."""

from __future__ import annotations

import copy
import json
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from depth import at_depth
from projections import dense, whole_projection

from kiln.engine.layers.embedding import Embedding
from kiln.engine.lora.sites import Sites
from kiln.engine.models.loader import load_model, open_weights
from kiln.engine.models.registry import read_model
from kiln.engine.models.split import all_of

COMMON = {
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3-tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    # Its experts take no adapters, but its shared experts do.
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
    ),
}
NUM_TOKENS = 8
LENGTHS = at_depth((1, 29), (1, 12, 29))
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Every form of the format; ranks 1 to 64.
FORMS: dict[str, dict[str, Any]] = {
    "rank-1": {"r": 1, "target_modules": ALL},
    "all-linear-rslora": {"r": 16, "use_rslora": True, "target_modules": "all-linear"},
    "rank-64": {"r": 64, "lora_alpha": 16, "target_modules": ALL},
    "patterns": {
        "r": 3,
        "target_modules": ALL,
        "rank_pattern": {"o_proj": 6, r"layers\.0\.mlp\.up_proj": 2, "k_proj": 5},
        "alpha_pattern": {"v_proj": 32, r"model\.layers\.1\..*": 4},
    },
    "v-alone": {"r": 8, "target_modules": ["v_proj"]},
    "q-and-up": {"r": 4, "target_modules": ["q_proj", "up_proj"]},
    "k-and-gate-of-layer-1": {
        "r": 4, "target_modules": ["k_proj", "gate_proj"], "layers_to_transform": [1],
    },
    "expression": {"r": 5, "target_modules": r".*\.0\.(self_attn\.[ov]_proj|mlp\.down_proj)"},
    "head": {"r": 7, "target_modules": ["lm_head", "down_proj"]},
    "embedding": {"r": 8, "target_modules": ["embed_tokens"], "lora_alpha": 24},
    "embedding-and-head": {
        "r": 6, "use_rslora": True, "target_modules": ["embed_tokens", "lm_head", "q_proj"],
        "alpha_pattern": {"embed_tokens": 3},
    },
}  # fmt: skip
TIED_FORMS: dict[str, dict[str, Any]] = {
    "tied-embedding-and-head": {
        "r": 4, "target_modules": ["embed_tokens"], "ensure_weight_tying": True,
    },
}  # fmt: skip


class Made:
    """A model on disk, and one PEFT adapter of each form.

    ``model`` is the oracle: PEFT's, with the adapters that it read from disk.
    """

    @torch.inference_mode()
    def __init__(self, name: str, folder: Path) -> None:
        import transformers
        from peft import LoraConfig, PeftModel, get_peft_model

        torch.manual_seed(3)
        family, extra = MODELS[name]
        config = getattr(transformers, f"{family}Config")(**{**COMMON, **extra})
        # PEFT ties embedding and LM head only for the first adapter that it loads.
        forms = {**(TIED_FORMS if config.tie_word_embeddings else {}), **FORMS}
        self.forms = list(forms)
        self.folder = folder / "model"
        self.adapters = {form: folder / form for form in forms}
        base = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        for parameter in base.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
        base.save_pretrained(self.folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tied weights, which merging would change
            for form, settings in forms.items():
                lora = LoraConfig(task_type="CAUSAL_LM", **settings)
                model = get_peft_model(copy.deepcopy(base), lora)
                for parameter_name, parameter in model.named_parameters():
                    if "lora_" in parameter_name:
                        torch.nn.init.normal_(parameter, 0.0, 0.1)
                model.save_pretrained(self.adapters[form])
            first, *others = self.adapters.items()
            self.model = PeftModel.from_pretrained(base, first[1], adapter_name=first[0])
            for form, own in others:
                self.model.load_adapter(own, form)
        self.model.eval()

    @torch.inference_mode()
    def logits(self, form: str | None, ids: torch.Tensor) -> torch.Tensor:
        """PEFT's logits [rows, tokens, vocab] of an adapter, or of the base model."""
        if form is None:
            with self.model.disable_adapter():
                return self.model(ids).logits
        if self.model.active_adapters != [form]:  # changing it takes longer than a step
            self.model.set_adapter(form)
        return self.model(ids).logits


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Return a function from a name in MODELS to that model and its adapters."""

    @cache
    def make(name: str) -> Made:
        return Made(name, tmp_path_factory.mktemp(name))

    return make


def sites_of(folder: Path) -> Sites:
    """Return the sites of a model, whose weights are random if the folder has none."""
    family, config = read_model(folder)
    load_format = "auto" if any(folder.glob("*.safetensors")) else "dummy"
    weights = open_weights(folder, load_format, 0, torch.float32)
    sites = Sites()
    cpu = torch.device("cpu")
    load_model(family, config, weights, 64, torch.float32, cpu, lambda *_: None, sites)
    return sites


@pytest.fixture(scope="session")
def sites():
    """Return a function from a model's folder to its sites."""
    return cache(sites_of)


@pytest.fixture(scope="session")
def answers(made):
    """Return a function from a model to prompts, adapters, and PEFT's greedy answers."""

    @cache
    def make(name):
        own = made(name)
        prompts, lora, wanted = [], [], []
        for index, form in enumerate([None, *own.forms]):
            for length in LENGTHS:
                prompt, tokens = clear_answer(own, form, length + index % 2)
                prompts.append(prompt)
                lora.append(form)
                wanted.append(tokens)
        return prompts, lora, wanted

    return make


@torch.inference_mode()
def clear_answer(made, form, length):
    """Draw prompts until no two tokens are so close that the order of a sum may decide."""
    for _ in range(20):
        prompt = torch.randint(0, 400, (1, min(length, max(LENGTHS))))
        ids, clear = prompt, True
        for _ in range(NUM_TOKENS):
            logits = made.logits(form, ids)[0, -1]
            best = logits.topk(2)
            clear &= bool(best.values[0] - best.values[1] > 1e-4 * logits.abs().max())
            ids = torch.cat([ids, best.indices[:1].view(1, 1)], 1)
        if clear:
            return prompt[0].tolist(), ids[0, prompt.shape[1] :].tolist()
    raise AssertionError(f"no answer of {form} is clear in float32")


@pytest.fixture(scope="session")
def small_moe(tmp_path_factory):
    """A config of a model with experts and the sizes of the others."""
    folder = tmp_path_factory.mktemp("experts")
    config = {
        **COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "decoder_sparse_step": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def on_host(environment):
    """Let the operators run on the host toolchain."""
    environment(KILN_CPU_KERNELS="host")


@pytest.fixture
def model_sites():
    """An embedding, a qkv projection of sizes that no vectors fill, and an LM head."""
    sites = Sites()
    sites.embedding("embed", all_of(11), Embedding(torch.zeros(11, 24)))
    qkv = whole_projection("layers.0.qkv_proj", {"q": 17, "k": 8, "v": 8}, 24)
    sites.linear(qkv, dense(torch.zeros(33, 24)))
    sites.linear(whole_projection("lm_head", {"lm_head": 16}, 24), dense(torch.zeros(16, 24)))
    return sites
