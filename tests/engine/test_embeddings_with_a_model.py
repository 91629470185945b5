"""Embeddings are those of transformers' hidden states, pooled as sentence-transformers does."""

from __future__ import annotations

import json

import pytest
import torch
from depth import at_depth
from embedding_folders import POOLINGS, expected, save_random, write_modules
from greedy_models import MODELS
from safetensors.torch import load_file, save_file

from kiln import LLM, PoolingParams, SamplingParams
from kiln.engine.errors import EmbeddingError, ModelError, RequestError

STEM = list(range(20, 61))
LONG = list(range(100, 228))
PROMPTS = [[5, 9, 5, 11], LONG, [7] * 19, [*STEM, 4, 4], [3], [*STEM, 9], STEM]
SMALL_STEPS = {"max_num_batched_tokens": 16, "max_num_seqs": 5}


def check(llm, network, pooling, prompts=PROMPTS, **settings):
    outputs = llm.embed(prompts, PoolingParams(**settings))
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.prompt_token_ids == prompt
        found = torch.tensor(output.outputs.embedding, dtype=torch.float64)
        own = {"dimensions": settings.get("dimensions")}
        wanted = expected(network, prompt, pooling, **own)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    return outputs


@pytest.mark.quick(8)
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize(
    "flags",
    [
        {},
        SMALL_STEPS,
        {"num_kv_blocks": 8, "max_chunk_tokens": 8, **SMALL_STEPS},
        {"disable_overlap_schedule": True, **SMALL_STEPS},
        {"enable_prefix_caching": False},
    ],
    ids=["whole", "chunks", "preempted", "not ahead", "not cached"],
)
def test_they_are_those_of_sentence_transformers(tmp_path, pooling, flags):
    network = save_random(tmp_path)
    write_modules(tmp_path, pooling)
    with LLM(str(tmp_path), dtype="float32", **{"num_kv_blocks": 40, **flags}) as llm:
        check(llm, network, pooling)
        again = check(llm, network, pooling)
        stats = llm.core.stats()
    assert stats.generated_tokens == 0
    if pooling != "cls_token":  # which needs only the first token
        assert bool(stats.preemptions) == ("num_kv_blocks" in flags)
        assert stats.prompt_tokens == 2 * sum(map(len, PROMPTS))
    cached = sum(output.num_cached_tokens for output in again)
    assert bool(cached) == (pooling == "lasttoken" and "enable_prefix_caching" not in flags)


@pytest.mark.parametrize("pooling", at_depth(["mean_tokens"], POOLINGS))
def test_on_the_kernels_they_are_the_same(tmp_path, environment, pooling):
    """Graphs are asked for, but a step that reports hidden states runs in none."""
    environment(KILN_CPU_KERNELS="host", KILN_CPU_GRAPHS="emulate", KILN_GRAPH_STRICT="1")
    network = save_random(tmp_path, head_dim=32)
    write_modules(tmp_path, pooling)
    with LLM(str(tmp_path), dtype="float32", num_kv_blocks=40, **SMALL_STEPS) as llm:
        check(llm, network, pooling)
        assert not llm.core.stats().graph_replays


@pytest.mark.parametrize("name", at_depth(["llama-rope-yarn", "qwen2-moe"], [*MODELS]))
@pytest.mark.parametrize("pooling", POOLINGS[:2])
def test_every_family_makes_them(tmp_path, name, pooling):
    network = save_random(tmp_path, name)
    write_modules(tmp_path, pooling)
    with LLM(str(tmp_path), dtype="float32", num_kv_blocks=40, **SMALL_STEPS) as llm:
        check(llm, network, pooling)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied-biases"])
def test_a_language_model_makes_them_of_the_last_token_if_asked(tmp_path, name):
    """Its head takes no memory, and nothing of it is left over."""
    network = save_random(tmp_path, name, headless=False)
    settings = {"dtype": "float32", "num_kv_blocks": 40}
    with LLM(str(tmp_path), task="embed", **settings) as llm:
        check(llm, network, "lasttoken")
        model = llm.core.runner.loaded.model
        assert model.head.weight.values is model.embedding.weight
        with pytest.raises(RequestError, match="prompt 0: this model was loaded for embeddings"):
            llm.generate([[1, 2]])
    with LLM(str(tmp_path), **settings) as llm:
        assert llm.generate([[1, 2]], SamplingParams(max_tokens=1))
        with pytest.raises(RequestError, match="--task embed"):
            llm.embed([[1, 2]])


def test_dimensions_are_cut_before_the_length_is_made_1(tmp_path):
    network = save_random(tmp_path)
    write_modules(tmp_path, "mean_tokens")
    with LLM(str(tmp_path), dtype="float32", num_kv_blocks=40) as llm:
        (output,) = check(llm, network, "mean_tokens", [STEM], dimensions=7)
        assert len(output.outputs.embedding) == 7
        with pytest.raises(RequestError, match="dimensions must be 1 to 64"):
            llm.embed([STEM], PoolingParams(dimensions=65))
        (plain,) = llm.embed([STEM], PoolingParams(dimensions=7, use_activation=False))
    found = torch.tensor(plain.outputs.embedding, dtype=torch.float64)
    wanted = expected(network, STEM, "mean_tokens", normalize=False)[:7]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_a_folder_without_normalize_keeps_the_length(tmp_path):
    network = save_random(tmp_path)
    write_modules(tmp_path, normalize=False)
    with LLM(str(tmp_path), dtype="float32", num_kv_blocks=40) as llm:
        (output,) = llm.embed(STEM)
    found = torch.tensor(output.outputs.embedding, dtype=torch.float64)
    wanted = expected(network, STEM, normalize=False)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert abs(wanted.norm() - 1) > 0.1


def test_long_prompts_are_refused_by_number_or_truncated(tmp_path):
    network = save_random(tmp_path)
    write_modules(tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 40}')
    with LLM(str(tmp_path), dtype="float32", num_kv_blocks=40) as llm:
        check(llm, network, "lasttoken", [STEM[:40]])
        with pytest.raises(RequestError, match=r"prompt 1: .*length is 40 tokens.* has 41 tokens"):
            llm.embed([[1], STEM])
        with pytest.raises(RequestError, match="prompt 1: the prompt is empty"):
            llm.embed([[1], []])
        for most, kept in ((-1, STEM[-40:]), (3, STEM[-3:])):
            (output,) = llm.embed([STEM], PoolingParams(truncate_prompt_tokens=most))
            assert output.prompt_token_ids == kept


def test_a_state_that_is_nan_is_an_error_that_names_the_prompt(tmp_path):
    save_random(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["embed_tokens.weight"][9] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with LLM(str(tmp_path), dtype="float32", num_kv_blocks=40) as llm:
        with pytest.raises(EmbeddingError, match=r"prompt 1: .*hidden states contain NaN"):
            llm.embed([[1], [5, 9]])
        assert llm.embed([[1], [5, 8]])


@pytest.mark.parametrize(
    ("file", "content", "part"),
    [
        ("modules.json", {}, "not sentence-transformers'|modules are"),
        ("modules.json", [{"type": "x.Transformer"}], "path"),
        ("modules.json", "{", "cannot be read as JSON"),
        ("modules.json", [("Transformer", ""), ("Pooling", "1"), ("Dense", "2")], "Dense in '2'"),
        ("modules.json", [("Transformer", "0"), ("Pooling", "1")], "Transformer in '0'"),
        ("modules.json", [("Transformer", ""), ("Pooling", "1")], "1/config.json is missing"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "max_tokens, lasttoken"),
        ("1_Pooling/config.json", {"pooling_mode": []}, "are none: Kiln has"),
        ("1_Pooling/config.json", {"pooling_mode": "weightedmean"}, "weightedmean"),
        ("1_Pooling/config.json", {"pooling_mode": [["mean"]]}, r"are \['mean'\]: Kiln has"),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt is false"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
        ("sentence_bert_config.json", {"max_seq_length": "x"}, "max_seq_length"),
        ("sentence_bert_config.json", {"transformer_task": "retrieval"}, "transformer_task"),
        ("config.json", {"is_causal": False}, "is_causal"),
        ("config.json", {"architectures": ["BertModel"]}, "BertModel"),
    ],
)
def test_what_kiln_lacks_is_refused_by_name(tmp_path, file, content, part):
    save_random(tmp_path)
    write_modules(tmp_path)
    path = tmp_path / file
    if isinstance(content, dict) and file != "modules.json":
        content = (json.loads(path.read_text()) if path.exists() else {}) | content
    elif isinstance(content, list) and isinstance(content[0], tuple):
        content = [{"type": f"sentence_transformers.models.{k}", "path": p} for k, p in content]
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ModelError, match=part):
        LLM(str(tmp_path), dtype="float32", num_kv_blocks=40)


@pytest.mark.parametrize(
    ("settings", "pooling"),
    [
        ({"pooling_mode": "mean"}, "mean_tokens"),
        ({"pooling_mode": ["lasttoken"]}, "lasttoken"),
        ({"pooling_mode_lasttoken": True}, "lasttoken"),
        ({"pooling_mode_lasttoken": False}, "mean_tokens"),
        ({}, "mean_tokens"),
    ],
)
def test_newer_and_shorter_forms_of_the_files_are_read(tmp_path, settings, pooling):
    """As sentence-transformers 6 reads and writes them."""
    network = save_random(tmp_path)
    write_modules(tmp_path)
    path = tmp_path / "modules.json"
    path.write_text(
        path.read_text().replace("transformers.models.", "transformers.base.modules.x.")
    )
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    (tmp_path / "sentence_bert_config.json").write_text(
        '{"transformer_task": "feature-extraction"}'
    )
    with LLM(str(tmp_path), dtype="float32", num_kv_blocks=40) as llm:
        check(llm, network, pooling, [STEM])


@pytest.mark.parametrize(("limit", "context"), [(40, 40), (10**30, 128), (-1, 128), (1e30, 128)])
def test_the_tokenizer_may_limit_a_text(tmp_path, limit, context):
    save_random(tmp_path)
    write_modules(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": limit}))
    with LLM(str(tmp_path), skip_tokenizer_init=True, num_kv_blocks=40) as llm:
        assert llm.core.max_model_len == context


def test_a_default_prompt_is_not_added_and_the_log_says_so(tmp_path, caplog):
    network = save_random(tmp_path)
    write_modules(tmp_path)
    prompts = {"prompts": {"query": "Find: "}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    with LLM(str(tmp_path), dtype="float32", num_kv_blocks=40) as llm:
        check(llm, network, "lasttoken", [STEM])
    assert "default prompt 'query' is not added" in caplog.text


def test_a_model_without_a_head_cannot_generate(tmp_path):
    save_random(tmp_path)
    with pytest.raises(ModelError, match=r"Qwen3Model.* --task embed"):
        LLM(str(tmp_path), task="generate")


def test_a_folder_of_modules_may_also_generate_if_it_has_a_head(tmp_path):
    save_random(tmp_path, headless=False)
    write_modules(tmp_path)
    with LLM(str(tmp_path), dtype="float32", num_kv_blocks=40, task="generate") as llm:
        assert llm.generate([[1, 2]], SamplingParams(max_tokens=1))
