"""Several ranks answer with the tokens of transformers, however a model is divided."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest
import torch
from depth import at_depth
from embedding_folders import expected, save_random, write_modules
from greedy_models import MODELS
from kernel_calls import ask_everything

from kiln import LLM, SamplingParams
from kiln.engine.config import EngineConfig, KVConfig, LoRAConfig, ModelConfig, ParallelConfig
from kiln.engine.errors import ConfigError, ModelError
from kiln.engine.requests.adapter_job import LoadAdapter, UnloadAdapter
from kiln.engine.runner import executor, loaded_model


@pytest.fixture(scope="module")
def made(model_of):
    """Return a function that writes one of MODELS."""

    def make(name):
        family, more = MODELS[name]
        return model_of(name, family, **more)

    return make


pytestmark = pytest.mark.usefixtures("in_threads")


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", MODELS)
def test_two_and_four_ranks_answer_as_transformers(made, llm_of, tokens_of, prompts, name):
    folder, model = made(name)
    wanted = [answer(model, prompt) for prompt in prompts]
    for world in at_depth((2,), (2, 4)):
        llm = llm_of(folder, world)
        assert tokens_of(llm) == wanted
        stats = llm.core.stats()
        sums = 1 + 2 * model.config.num_hidden_layers  # behind the embedding, and two a layer
        assert stats.all_reduces == {"torch": sums * (stats.steps + 1)}  # with the trial step


@pytest.mark.parametrize("name", at_depth(["qwen2-moe"], ["qwen2-moe", "llama", "qwen3"]))
def test_ranks_call_all_that_they_load_and_nothing_else(
    kernel_calls, environment, made, llm_of, name
):
    environment(KILN_ALL_REDUCE="torch")
    ask_everything(llm_of(made(name)[0], 2))
    assert kernel_calls.called == kernel_calls.loaded


def test_a_graph_that_no_rank_can_capture_ends_the_load_with_advice(made, llm_of, monkeypatch):
    def refuse(function):
        raise RuntimeError("the products of experts read sizes\nin aten/src/ATen")

    device = SimpleNamespace(capture=refuse, keep=None)
    monkeypatch.setattr(loaded_model, "graph_device", lambda *_: device)
    folder, _ = made("llama-mha-biases")
    with pytest.raises(
        ModelError, match=r"read sizes; with tensor parallelism .*--disable-cuda-graph"
    ):
        llm_of(folder, 2)


def answer(model, prompt, count=8):
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
        )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("world", at_depth([4], [2, 4]))
def test_in_chunks_and_with_preemption(made, llm_of, tokens_of, prompts, world):
    folder, model = made("llama-mha-biases")
    wanted = [answer(model, prompt) for prompt in prompts]
    llm = llm_of(folder, world, max_model_len=45, block_size=5, num_kv_blocks=9, max_chunk_tokens=7)
    assert tokens_of(llm) == wanted
    assert llm.core.stats().preemptions > 0


@pytest.mark.parametrize("pooling", ["lasttoken", "mean_tokens"])
def test_ranks_make_the_embeddings_of_transformers(llm_of, prompts, tmp_path, pooling):
    network = save_random(tmp_path, "qwen3")
    write_modules(tmp_path, pooling)
    for world in at_depth((2,), (2, 4)):
        outputs = llm_of(tmp_path, world, max_num_batched_tokens=16, max_num_seqs=4).embed(prompts)
        for output, prompt in zip(outputs, prompts, strict=True):
            found = torch.tensor(output.outputs.embedding, dtype=torch.float64)
            wanted = expected(network, prompt, pooling)
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_a_token_that_rank_0_alone_can_sample_reaches_the_others(made, llm_of, prompts):
    folder, _ = made("qwen3")
    params = [
        SamplingParams(temperature=0.9, seed=index, max_tokens=6, **more)
        for index, more in enumerate(
            ({}, {"logprobs": 3}, {"frequency_penalty": 1.5}, {"logit_bias": {5: 90.0}})
        )
    ]

    def drawn(world):
        outputs = llm_of(folder, world).generate(prompts, params)
        return [list(one.outputs[0].token_ids) for one in outputs]

    alone = drawn(1)
    assert 5 in alone[3]
    assert drawn(2) == alone


def numbers(completion):
    """Return the tokens of the log-probabilities and their values, in order."""
    entries = [pair for at in completion.logprobs for pair in at.items()]
    return [number for token, entry in entries for number in (token, entry.logprob)]


class FailsFor:
    """A sampler that raises for every batch with one request, told by its bias."""

    def __init__(self, monkeypatch):
        self.real, self.raised = executor.sample, 0
        monkeypatch.setattr(executor, "sample", self)

    def __call__(self, rows, masks):
        if any(one.params.logit_bias == {7: 7.0} for one in rows.requests):
            self.raised += 1
            raise MemoryError("its edits do not fit")
        return self.real(rows, masks)


@pytest.mark.parametrize("world", at_depth([2], [1, 2]))
def test_a_request_whose_sampling_raises_fails_alone(
    made, llm_of, tokens_of, prompts, monkeypatch, world
):
    """Rank 0 alone samples what edits its logits: the other ranks must stay in step."""
    folder, _ = made("qwen3")
    good, bad = SamplingParams(temperature=0, max_tokens=8, logprobs=2), {7: 7.0}
    params = [good, good.replace(logit_bias=bad, logprobs=1), good, good.replace(logprobs=0)]
    llm = llm_of(folder, world)
    wanted = [one.outputs[0] for one in llm.generate(prompts, params)]
    plain = tokens_of(llm)
    failing = FailsFor(monkeypatch)
    found = [one.outputs[0] for one in llm.generate(prompts, params)]
    assert failing.raised >= 2  # with the others, and alone
    assert found[1].finish_reason == "error"
    assert "failed; the engine continues" in found[1].error
    for index in (0, 2, 3):
        assert found[index].token_ids == wanted[index].token_ids
        assert numbers(found[index]) == pytest.approx(numbers(wanted[index]), abs=1e-4)
    assert tokens_of(llm) == plain


def test_the_prompts_of_two_ranks_are_reported_as_those_of_one(made, llm_of, prompts):
    """Each rank has a part of the vocabulary, and helps with every row of logits."""
    folder, _ = made("qwen3")
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=3)
    alone, two = (llm_of(folder, world).generate(prompts, params) for world in (1, 2))
    for one, other in zip(alone, two, strict=True):
        assert len(one.prompt_logprobs) == len(one.prompt_token_ids)
        for mine, theirs in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert mine.keys() == theirs.keys()
            for token, entry in mine.items():
                assert entry.logprob == pytest.approx(theirs[token].logprob, abs=1e-4)


def test_random_weights_are_the_same_for_any_number_of_ranks(made, llm_of, tokens_of):
    folder, _ = made("qwen2-moe")
    alone, two = (tokens_of(llm_of(folder, world, load_format="dummy")) for world in (1, 2))
    assert alone == two


def test_a_vocabulary_of_fewer_tokens_than_rows_of_the_ranks(model_of, llm_of):
    """Ten tokens on four ranks: three each, and one for the last."""
    folder, model = model_of("few-tokens", vocab_size=10)
    llm = llm_of(folder, 4)
    [output] = llm.generate([[1, 9, 3]], SamplingParams(temperature=0, max_tokens=5))
    assert list(output.outputs[0].token_ids) == answer(model, [1, 9, 3], 5)


@pytest.fixture(scope="module")
def adapters(made, tmp_path_factory):
    """Write an adapter of all projections, and one of the embedding and the head too."""
    folder, _ = made("qwen3")
    written = {}
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    for name, rank, more in (("small", 3, []), ("large", 8, ["embed_tokens", "lm_head"])):
        torch.manual_seed(rank)
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        own = get_peft_model(base, LoraConfig(r=rank, lora_alpha=8, target_modules=names + more))
        for key, parameter in own.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(parameter, 0.0, 0.15)
        written[name] = tmp_path_factory.mktemp("adapters") / name
        own.save_pretrained(written[name])
    return folder, written


@pytest.mark.parametrize("world", at_depth([2], [2, 4]))
def test_adapters_are_divided_as_the_layers_are(adapters, llm_of, tokens_of, world):
    folder, written = adapters
    modules = {name: str(path) for name, path in written.items()}
    names = ["small", "large", None, "large"]

    def answers(world):
        llm = llm_of(folder, world, lora_modules=modules, max_loras=1)
        return tokens_of(llm, lora=names), llm.core.stats().adapter_evictions

    alone, _ = answers(1)
    assert len({tuple(each) for each in alone}) == 4
    split, evictions = answers(world)
    assert split == alone
    assert evictions > 0  # followers put the same adapters in the same places


def test_an_adapter_that_is_loaded_while_serving_is_on_every_rank(adapters, llm_of, tokens_of):
    folder, written = adapters
    alone = tokens_of(llm_of(folder, 1, lora_modules={"own": str(written["large"])}), lora="own")
    config = EngineConfig(
        ModelConfig(str(folder), dtype="float32", device="cpu", max_model_len=64),
        KVConfig(num_blocks=64),
        lora=LoRAConfig(root=str(written["large"].parents[1]), memory_gib=0.01),
        parallel=ParallelConfig(2),
    )
    with LLM.from_config(config) as llm:
        assert "rank" not in load_adapter(llm, "missing", "no-such-folder")
        path = str(written["large"].relative_to(written["large"].parents[1]))
        assert load_adapter(llm, "own", path) == ""
        assert tokens_of(llm, lora="own") == alone
        llm.core.adapters.begin(UnloadAdapter("job", "own", 5.0))
        assert ended(llm) == ""
        assert load_adapter(llm, "own", path) == ""
        assert tokens_of(llm, lora="own") == alone


def load_adapter(llm, name, path):
    llm.core.adapters.begin(LoadAdapter("job", name, path))
    return ended(llm)


def ended(llm):
    """Wait for the only job, and return its error as text."""
    while llm.core.adapters.are_pending:
        for _, error in llm.core.adapters.end():
            return "" if error is None else str(error)
        time.sleep(0.01)
    raise AssertionError("there was no job")


def test_a_model_that_cannot_be_divided_says_by_what_it_can(made, llm_of):
    folder, _ = made("llama-mha-biases")
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=3: .* is 4.* over 1, 2, 4"):
        llm_of(folder, 3)


def test_weights_that_only_some_ranks_lack_are_named(made, llm_of, tmp_path):
    folder, _ = made("llama-mha-biases")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="no weights found"):
        llm_of(tmp_path, 2)
