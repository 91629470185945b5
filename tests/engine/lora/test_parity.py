"""Logits and greedy tokens of mixed batches are PEFT's, in float32, however the work is cut up."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

from kiln import LLM, SamplingParams
from kiln.engine.compile.parameters import parts_of
from kiln.engine.errors import AdapterNotFoundError, RequestError
from kiln.engine.layers.linear import Linear
from kiln.engine.lora.sites import LoRAEmbedding, LoRALinear

MODELS = ["llama", "qwen3-tied", "qwen2-moe"]
NUM_TOKENS = 8
CONTEXT = 29 + NUM_TOKENS  # the longest prompt of ``answers``
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)


@pytest.fixture(scope="module")
def load(made):
    """Return a function that loads a model with all of its adapters."""

    def make(name, **settings):
        sizes = {"max_model_len": CONTEXT, "num_kv_blocks": 512, **settings}
        modules = {form: str(folder) for form, folder in made(name).adapters.items()}
        own = {"device": "cpu", "dtype": "float32", "lora_modules": modules, **sizes}
        return LLM(str(made(name).folder), **own)

    return make


@pytest.fixture
def logits_of():
    """Return a function that runs one step for prompts and returns the logits of their ends."""

    def run(llm, prompts, lora):
        seen = []
        model = llm.core.runner.loaded.model
        compute = type(model).logits
        model.logits = lambda hidden: seen.append(compute(model, hidden)) or seen[-1]
        try:
            llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1), lora=lora)
        finally:
            del model.logits
        (logits,) = seen
        return logits

    return run


def assert_close(found, wanted):
    assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_logits_of_a_mixed_batch_are_pefts(made, load, logits_of, name):
    own = made(name)
    forms = [None, *own.forms, None]
    prompts = torch.randint(0, 400, (len(forms), 17))
    found = logits_of(load(name), prompts.tolist(), forms)
    for form, prompt, row in zip(forms, prompts, found, strict=True):
        wanted, base = (own.logits(one, prompt[None])[0, -1] for one in (form, None))
        assert_close(row, wanted)
        changes = float((base - wanted).abs().max()) > 1e-2
        assert changes == (form is not None), form  # else it could not fail


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_logits_are_those_of_merged_weights(made, load, logits_of, name):
    llm, prompts = load(name), torch.randint(0, 400, (3, 11))
    for form in made(name).forms:
        if "tied" in name and ("embedding" in form or "head" in form):
            continue  # merging into the one changes the other
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peft = copy.deepcopy(made(name).model)
            peft.set_adapter(form)
            merged = peft.merge_and_unload(adapter_names=[form])
        assert_close(logits_of(llm, prompts.tolist(), form), merged(prompts).logits[:, -1])


def tokens(llm, prompts, lora):
    outputs = llm.generate(prompts, GREEDY, lora=lora)
    return [list(output.outputs[0].token_ids) for output in outputs]


WAYS = {
    "all at once": {},
    "chunks of 7": {"max_chunk_tokens": 7},
    "without overlap, 5 rows": {"disable_overlap_schedule": True, "max_num_seqs": 5},
    "one token a step": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "preempted": {"block_size": 5, "num_kv_blocks": -(-CONTEXT // 5) + 1},
}


@pytest.mark.quick(6)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_pefts(answers, load, caplog, name, way):
    prompts, lora, wanted = answers(name)
    if way == "one token a step":
        prompts, lora, wanted = prompts[1::6], lora[1::6], wanted[1::6]
    llm = load(name, **WAYS[way])
    assert tokens(llm, prompts, lora) == wanted
    assert (llm.core.stats().preemptions > 0) == (way == "preempted")
    assert not caplog.records  # of steps that failed, and of requests that were run again


def test_rows_of_the_base_model_sample_while_a_prompt_with_an_adapter_goes_on(
    answers, load, caplog
):
    prompts, lora, wanted = answers("llama")
    picked = [0, 1, max(place for place, form in enumerate(lora) if form == "head")]
    llm = load("llama", max_chunk_tokens=3)
    found = tokens(llm, [prompts[i] for i in picked], [lora[i] for i in picked])
    assert found == [wanted[i] for i in picked]
    assert len(prompts[picked[-1]]) > 9
    assert not caplog.records


def test_each_request_alone(answers, load):
    prompts, lora, wanted = answers("llama")
    llm = load("llama")
    for prompt, adapter, own in list(zip(prompts, lora, wanted, strict=True))[2::5]:
        assert tokens(llm, [prompt], adapter) == [own]


def test_steps_with_an_adapter_run_without_a_graph_and_the_others_keep_theirs(
    answers, load, environment
):
    environment(KILN_CPU_GRAPHS="emulate", KILN_GRAPH_VERIFY="off")
    prompts, lora, wanted = answers("llama")
    llm = load("llama", cuda_graph_bs=[1, 2, 4], max_num_batched_tokens=64)
    base, adapted = [0, 1], [3, 0, 13]
    counts = []
    for picked in (base, adapted, base):
        found = tokens(llm, [prompts[i] for i in picked], [lora[i] for i in picked])
        assert found == [wanted[i] for i in picked]
        stats = llm.core.stats()
        counts.append((sum(stats.graph_replays.values()), dict(stats.graph_fallbacks)))
    (first, none), (second, some), (third, same) = counts
    assert first > 0
    assert none == {}
    assert second == first
    assert some == {"a LoRA adapter": NUM_TOKENS} == same
    assert third == 2 * first


def test_the_trial_step_runs_every_adapter_and_the_base_model(load, monkeypatch):
    from kiln.engine.runner.model_runner import ModelRunner

    seen = []
    run = ModelRunner.run
    monkeypatch.setattr(
        ModelRunner, "run", lambda own, batch: seen.append(batch) or run(own, batch)
    )
    llm = load("llama")
    (trial,) = seen
    slots = set(range(llm.core.runner.adapter_store.num_slots))
    assert set(trial.columns.adapter_slot) == {-1, *slots}


def test_without_adapters_nothing_of_lora_is_built(made):
    llm = LLM(str(made("llama").folder), device="cpu", dtype="float32", num_kv_blocks=64)
    runner = llm.core.runner
    assert runner.loaded.adapters is None
    assert "lora" not in runner.loaded.kernels
    model = runner.loaded.model
    layers = [model.embedding, *parts_of(model, Linear)]
    assert len(layers) == 2 + 4 * len(model.blocks)
    assert not any(isinstance(layer, LoRALinear | LoRAEmbedding) for layer in layers)


def test_one_graph_serves_any_adapters(load):
    """torch.compile sees one opaque operator a projection, and no adapter."""
    from kiln.engine.attention.context import AttentionStep, attention_step
    from kiln.engine.requests.batch import Batch, ScheduledRequest

    llm = load("llama", disable_overlap_schedule=True)
    runner = llm.core.runner
    graphs = []

    def keep(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    traced = torch.compile(runner.loaded.model.forward, backend=keep, fullgraph=True)
    step = runner.executor.step

    def forward(function, slots):
        rows = [
            ScheduledRequest(
                str(i), i, 5, 0, [7, 3, 11, i, 2], 0, [i], True, 0, GREEDY, 0, adapter_slot=slot
            )
            for i, slot in enumerate(slots)
        ]
        batch = Batch(tuple(rows))
        step.inputs.send(batch)
        inputs = step.inputs.make(batch)
        torch._dynamo.mark_dynamic(inputs.token_ids, 0)
        torch._dynamo.mark_dynamic(inputs.positions, 0)
        plan = runner.loaded.attention.plan(inputs.metadata)
        layers = AttentionStep(step.layers, inputs.metadata, plan)
        with runner.loaded.adapters.step(batch), attention_step(layers):
            return function(inputs.token_ids, inputs.positions)

    try:
        with torch.inference_mode():
            for slots in ([0, 1, -1], [2, 2], [-1, 10]):
                wanted = forward(runner.loaded.model.forward, slots)
                assert torch.equal(forward(traced, slots), wanted)
        (graph,) = graphs
    finally:
        torch._dynamo.reset()
    operators = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert operators.count("kiln.lora_linear.default") == 8
    assert operators.count("kiln.lora_embedding.default") == 1


def test_lora_is_one_for_all_or_one_a_prompt(load):
    llm = load("llama")
    with pytest.raises(AdapterNotFoundError, match=r"prompt 1: LoRA adapter 'nobody'.*rank-1"):
        llm.generate([[1], [2]], GREEDY, lora=["rank-1", "nobody"])
    for lora in (["rank-1"], ["rank-1", 3], ["rank-1", None, None]):
        with pytest.raises(RequestError, match="lora"):
            llm.generate([[1], [2]], GREEDY, lora=lora)
    assert len(tokens(llm, [[1], [2]], "rank-1")) == 2
