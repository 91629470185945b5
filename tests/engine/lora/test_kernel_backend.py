"""LoRA by kernels: on the host toolchain, the answers and sums are those of plain torch."""

from __future__ import annotations

import re
import weakref

import pytest
import torch
from adapter_pools import pool_of, write
from depth import at_depth
from kernel_calls import ask_everything

from kiln import LLM, SamplingParams
from kiln.cache.env import EnvError
from kiln.engine.config import LoRAConfig
from kiln.engine.errors import ConfigError
from kiln.engine.graphs.emulator import EmulatedGraphs
from kiln.engine.lora import chunked_backend
from kiln.engine.lora.adapter import Adapter, LoRAPair
from kiln.engine.lora.chunked_backend import ChunkedLoRA
from kiln.engine.lora.kernel_backend import KernelLoRA
from kiln.engine.lora.packing import pack
from kiln.engine.lora.pool import AdapterPool
from kiln.engine.lora.sites import Kind
from kiln.engine.lora.torch_native import TorchNativeLoRA
from kiln.engine.runner.lora_backend import lora_kernels
from kiln.jit_kernels import implementations
from kiln.jit_kernels.declare.errors import NoSuchKernel
from kiln.jit_kernels.ops.lora_chunked.functions import make_chunks

CPU = torch.device("cpu")
RANKS = ((4, 3, 1, 2, 5), (None, None, 5, None, 16), (2, 1, None, 6, None), (None, 64, 1, 1, 1))
ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


KERNELS = pytest.mark.parametrize("kernels", [KernelLoRA, ChunkedLoRA], ids=lambda one: one.name)


def adapter(sites, ranks, dtype):
    """An adapter with a rank a part; None: it lacks the part."""
    pairs = {}
    for part, rank in zip(sites.parts, ranks, strict=True):
        if rank:
            a = torch.randn(rank, part.input_size).to(dtype)
            b = torch.randn(part.output_size, rank).to(dtype)
            pairs[part.row] = LoRAPair(a, b, float(torch.rand(())) + 0.5)
    return Adapter("a", pairs)


def results(backend, sites, step, inputs):
    """What a backend makes of a step's layers: embedding, qkv, and LM head of the pruned rows."""
    return layers(backend, sites, backend.prepare_lora_batch(*step), inputs)


def layers(backend, sites, info, inputs):
    """The same of a batch."""
    ids, x, *outs = inputs
    outs = [out.clone() for out in outs]
    embedding, qkv, head = sites.all
    assert [site.kind for site in sites.all] == [Kind.EMBEDDING, Kind.QKV, Kind.HEAD]
    backend.run_lora_b_sgemm(
        backend.run_lora_a_embedding(ids, embedding, info), embedding, outs[0], info
    )
    backend.run_qkv_lora(x, qkv, outs[1], info)
    pruned = backend.pruned_batch_info(info)
    rows = x[: pruned.num_tokens]
    backend.run_lora_b_sgemm(backend.run_lora_a_sgemm(rows, head, pruned), head, outs[2], pruned)
    return outs


def inputs_of(step, dtype):
    _, lengths, samples = step
    tokens, sampled = sum(lengths), sum(samples)
    outs = [torch.randn(count, size) for count, size in ((tokens, 24), (tokens, 33), (sampled, 16))]
    return [torch.randint(0, 11, (tokens,)), *(one.to(dtype) for one in
            (torch.randn(tokens, 24), *outs))]  # fmt: skip


STEPS = {
    "mixed": ([2, -1, 0, 3, 1, 0], [3, 2, 1, 4, 1, 1], [True, True, False, True, False, True]),
    "decodes": ([0, 1, 2, 3, -1], [1] * 5, [True] * 5),
    "nothing is sampled": ([1, 0], [2, 3], [False, False]),
    "a prompt": ([0, 2, -1, 0], [270, 2, 1, 1], [True, True, True, False]),
}


@KERNELS
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_kernels_agree_with_plain_torch(on_host, model_sites, dtype, step, kernels):
    pool = pool_of(
        [adapter(model_sites, ranks, dtype) for ranks in RANKS], model_sites.all, dtype, CPU
    )
    inputs = inputs_of(step, dtype)
    got = results(kernels(pool, model_sites.all, 300), model_sites, step, inputs)
    want = results(TorchNativeLoRA(pool), model_sites, step, inputs)
    for one, other, base in zip(got, want, inputs[2:], strict=True):
        error = (one.double() - other.double()).abs() / other.double().abs().clamp(min=1)
        assert float(error.max() if len(error) else 0) <= ROUNDING[dtype]
        assert not len(base) or not torch.equal(one, base)
    assert {one.implementation for one in implementations._decided.values()} == {"host"}


def addresses_of(backend):
    """Where the graphs of a backend find what changes between their replays."""
    own = [*backend._tables, backend._numbers]
    if isinstance(backend, ChunkedLoRA):
        own.append(backend._token_slots)
        own += [tensor for table in backend._memory for tensor in table]
    return [tensor.data_ptr() for tensor in own]


@KERNELS
def test_the_backend_follows_the_pool_and_keeps_its_addresses(on_host, model_sites, kernels):
    loaded = [adapter(model_sites, ranks, torch.float32) for ranks in RANKS]
    make = [pack(one, model_sites.all, torch.float32) for one in loaded]
    pool = AdapterPool(model_sites.all, 2, 20000, torch.float32, CPU)
    backend, oracle = kernels(pool, model_sites.all, 16), TorchNativeLoRA(pool)
    addresses = addresses_of(backend)
    step = ([0, 1, -1, 1], [1] * 4, [True] * 4)
    inputs = inputs_of(step, torch.float32)

    def both_agree():
        got = results(backend, model_sites, step, inputs)
        for one, other in zip(got, results(oracle, model_sites, step, inputs), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        return got

    def place(packed, slot, start):
        write(pool, packed, start)
        pool.place(packed, slot, start)

    for one, base in zip(both_agree(), inputs[2:], strict=True):
        assert torch.equal(one, base), "nothing is loaded"
    place(make[0], 0, 0)
    place(make[3], 1, 8000)
    full = both_agree()
    place(make[1], 0, 4000)  # the slot is taken by another adapter
    assert not torch.equal(both_agree()[1], full[1])
    pool.clear(1)
    for one, base in zip(both_agree(), inputs[2:], strict=True):
        assert torch.equal(one[1:], base[1:])
    assert addresses == addresses_of(backend)


def test_an_adapter_that_is_placed_while_the_tables_are_copied_is_not_missed(
    on_host, model_sites, monkeypatch
):
    """On a CPU a step runs in a thread, and adapters are placed in another one."""
    pool = AdapterPool(model_sites.all, 2, 20000, torch.float32, CPU)
    backend, oracle = KernelLoRA(pool, model_sites.all, 16), TorchNativeLoRA(pool)
    packed = pack(adapter(model_sites, RANKS[0], torch.float32), model_sites.all, torch.float32)
    write(pool, packed, 0)
    pool.version += 1  # something else has changed
    from_numpy, late = torch.from_numpy, iter([False, True])

    def place_late(array):
        copied = from_numpy(array.copy())
        if next(late, False):
            pool.place(packed, 0, 0)
        return copied

    monkeypatch.setattr(torch, "from_numpy", place_late)
    backend.graphs_fit([])  # it follows the pool
    monkeypatch.setattr(torch, "from_numpy", from_numpy)
    step = ([0, -1], [1] * 2, [True] * 2)
    inputs = inputs_of(step, torch.float32)
    got = results(backend, model_sites, step, inputs)
    for one, other in zip(got, results(oracle, model_sites, step, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_the_chunks_of_a_step_are_made_once(on_host, model_sites, monkeypatch):
    """One table for all tokens and one for the rows of the LM head, not one for each layer."""
    pool = pool_of(
        [adapter(model_sites, ranks, torch.float32) for ranks in RANKS],
        model_sites.all, torch.float32, CPU,
    )  # fmt: skip
    calls = []

    def counted(token_slots, table):
        calls.append(len(token_slots))
        make_chunks(token_slots, table)

    monkeypatch.setattr(chunked_backend, "make_chunks", counted)
    backend = ChunkedLoRA(pool, model_sites.all, 16)
    for _ in range(2):
        step = STEPS["mixed"]
        results(backend, model_sites, step, inputs_of(step, torch.float32))
    assert calls == [12, 4] * 2


def test_chunks_of_more_adapters_than_align_tokens_can_tell_apart_are_refused(model_sites):
    pool = AdapterPool(model_sites.all, 513, 16, torch.float32, CPU)
    KernelLoRA(pool, model_sites.all, 16)
    with pytest.raises(ConfigError, match="513 adapters at once"):
        ChunkedLoRA(pool, model_sites.all, 16)


def placing(pool, sites):
    """Return a function that puts an adapter of some ranks in a slot, from an element on."""

    def place(ranks, slot, start=0):
        packed = pack(adapter(sites, ranks, torch.float32), sites.all, torch.float32)
        write(pool, packed, start)
        pool.place(packed, slot, start)

    return place


@KERNELS
def test_graphs_fit_adapters_up_to_a_reserved_rank(on_host, model_sites, kernels):
    pool = AdapterPool(model_sites.all, 2, 40000, torch.float32, CPU)
    backend = kernels(pool, model_sites.all, 16)
    place, most = placing(pool, model_sites), max(RANKS[0])
    assert not backend.graphs_fit_any, "no adapter, no rank: nothing to capture"
    backend.reserve_rank(most)
    assert backend.graphs_fit_any
    place(RANKS[0], 0)
    assert backend.graphs_fit([0, -1, 1])
    place([most + 3] * len(RANKS[0]), 0)
    assert not backend.graphs_fit([0, -1, 1])
    assert backend.graphs_fit([-1, 1, 1]), "none of its adapters is too large"


WIDE, OTHERS = (None, 64, 40, 40, 20), (3, None, None, None, 2)  # behind RANKS[1]


@KERNELS
@pytest.mark.parametrize("late", [WIDE, OTHERS], ids=["larger ranks", "other parts"])
def test_a_graph_serves_the_adapters_that_fit_it_whatever_else_is_loaded(
    on_host, model_sites, kernels, late
):
    pool = AdapterPool(model_sites.all, 2, 60000, torch.float32, CPU)
    backend, oracle = kernels(pool, model_sites.all, 16), TorchNativeLoRA(pool)
    place = placing(pool, model_sites)
    place(RANKS[1], 0)
    backend.reserve_loaded()
    inputs = inputs_of(([0], [4], [True]), torch.float32)
    inputs[-1] = torch.randn(4, 16)
    info, found = backend.fixed_batch(4, 4), []
    graph = EmulatedGraphs({}).capture(
        lambda between: found.extend(layers(backend, model_sites, info, inputs))
    )

    def check(*slots, replay):
        step = (slots, [1] * 4, [True] * 4)
        assert backend.graphs_fit(slots) is replay
        got = results(backend, model_sites, step, inputs)
        if replay:
            backend.fill_batch(info, *step)
            graph.replay()
            assert all(torch.equal(one, other) for one, other in zip(found, got, strict=True))
        for one, other in zip(got, results(oracle, model_sites, step, inputs), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)

    check(0, -1, 0, 0, replay=True)
    place(late, 1, 30000)
    check(0, 1, -1, 0, replay=False)
    check(0, -1, 0, 0, replay=True)
    pool.clear(1)
    check(0, -1, -1, 0, replay=True)
    place(RANKS[1], 1, 30000)
    check(1, -1, 0, 1, replay=True)


def test_the_workspace_of_graphs_outlives_larger_adapters(on_host, model_sites):
    """A CUDA graph keeps the address of the workspace, and not the memory."""
    pool = AdapterPool(model_sites.all, 2, 60000, torch.float32, CPU)
    backend = KernelLoRA(pool, model_sites.all, 16)
    place = placing(pool, model_sites)
    place(RANKS[1], 0)
    backend.reserve_loaded()
    captured = [weakref.ref(tensor) for tensor in backend._workspace]
    place(WIDE, 1, 30000)
    results(backend, model_sites, ([1], [1], [True]), inputs_of(([1], [1], [True]), torch.float32))
    assert all(tensor() is not None for tensor in captured)


def test_segments_of_other_rows_are_caught(model_sites):
    pool = pool_of(
        [adapter(model_sites, RANKS[0], torch.float32)], model_sites.all, torch.float32, CPU
    )
    backend = KernelLoRA(pool, model_sites.all, 8)
    info = backend.prepare_lora_batch([0], [3], [True])
    with pytest.raises(AssertionError, match="other rows"):
        backend.run_lora_a_sgemm(torch.zeros(2, 24), model_sites.all[1], info)


@pytest.fixture
def ask(environment):
    """Return a function that asks a model with adapters, in an environment."""

    def run(made, prompts, lora, environ, dtype="float32", settings=None, **params):
        """Return why the LoRA backend runs, the answers, and the engine's counters."""
        environment(**environ)
        modules = {form: str(folder) for form, folder in made.adapters.items() if form in lora}
        sizes = {"max_model_len": 40, "num_kv_blocks": 512, **(settings or {})}
        llm = LLM(str(made.folder), device="cpu", dtype=dtype, lora_modules=modules, **sizes)
        outputs = llm.generate(prompts, SamplingParams(temperature=0, **params), lora=lora)
        answers = [one.outputs[0] for one in outputs]
        return llm.core.runner.loaded.kernels.get("lora"), answers, llm.core.stats()

    return run


def tokens_of(answers):
    return [list(one.token_ids) for one in answers]


HOST = {"KILN_CPU_KERNELS": "host"}
CHUNKS = HOST | {"KILN_LORA_BACKEND": "csgmv"}
BACKENDS = pytest.mark.parametrize("host", [HOST, CHUNKS], ids=["auto", "csgmv"])


@BACKENDS
@pytest.mark.parametrize("name", at_depth(["llama"], ["llama", "qwen2-moe"]))
def test_the_engine_answers_as_peft_on_the_kernels(ask, made, answers, name, host):
    prompts, lora, wanted = answers(name)
    reason, found, _ = ask(made(name), prompts, lora, host, max_tokens=len(wanted[0]))
    assert reason == "host: " + "=".join([*host.items()][-1])
    assert tokens_of(found) == wanted


@pytest.mark.quick(1)
@BACKENDS
def test_steps_with_adapters_run_in_graphs_of_their_own(ask, made, answers, host):
    prompts, lora, wanted = (part[:: at_depth(3, 2)] for part in answers("llama"))
    graphs = {"KILN_CPU_GRAPHS": "emulate", "KILN_GRAPH_STRICT": "1", "KILN_GRAPH_VERIFY": "fast"}
    few = at_depth(  # graphs to capture
        {"cuda_graph_bs": [4], "max_num_seqs": 4, "max_num_batched_tokens": 12},
        {"cuda_graph_bs": [4, 16], "max_num_batched_tokens": 64},
    )
    _, found, stats = ask(made("llama"), prompts, lora, host | graphs, settings=few, max_tokens=4)
    assert tokens_of(found) == [tokens[:4] for tokens in wanted]
    assert sum(stats.graph_replays.values()) >= 3
    assert all(size.endswith("LoRA") for size in stats.graph_replays), "each step has an adapter"
    assert not any("LoRA" in reason for reason in stats.graph_fallbacks)
    # In float16 steps run in one piece, attention included.
    half = host | graphs | {"KILN_GRAPH_VERIFY": at_depth("fast", "full")}
    *_, stats = ask(made("llama"), prompts[:4], lora[:4], half, "float16", few, max_tokens=3)
    assert stats.graph_replays
    assert all(size.endswith("LoRA") for size in stats.graph_replays)


def logprobs_of(answers):
    """Return what each first token could have been, and how likely that was."""
    return [{token: entry.logprob for token, entry in one.logprobs[0].items()} for one in answers]


@pytest.mark.deep
def test_float16_answers_of_the_kernels_are_as_likely_as_those_of_plain_torch(ask, made, answers):
    prompts, lora, _ = answers("llama")
    reasons, likely = [], []
    for backend in ("jit", "csgmv", "torch_native"):
        environ = {**HOST, "KILN_LORA_BACKEND": backend}
        reason, found, _ = ask(
            made("llama"), prompts, lora, environ, "float16", max_tokens=1, logprobs=20
        )
        reasons.append(reason)
        likely.append(logprobs_of(found))
    assert reasons == [
        "host: KILN_LORA_BACKEND=jit",
        "host: KILN_LORA_BACKEND=csgmv",
        "torch_native: KILN_LORA_BACKEND=torch_native",
    ]
    own, chunked, plain = likely
    for one, other in zip(own + chunked, plain + plain, strict=True):
        both = one.keys() & other.keys()
        assert len(both) >= 15
        assert max(abs(one[token] - other[token]) for token in both) < 0.05


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"KILN_LORA_BACKEND": "jit"}, "KILN_LORA_BACKEND=jit cannot be used here"),
        ({"KILN_LORA_BACKEND": "triton", **HOST}, "KILN_LORA_BACKEND=triton cannot be used here"),
        ({"KILN_LORA_BACKEND": "csgmv"}, "KILN_LORA_BACKEND=csgmv cannot be used here"),
        ({"KILN_LORA_CHUNKED": "triton", **CHUNKS}, "KILN_LORA_CHUNKED=triton cannot be used here"),
        ({"KILN_LORA_CHUNKED": "jit", **HOST}, "has no effect without KILN_LORA_BACKEND=csgmv"),
        ({"KILN_LORA_CHUNKED": "torch", **CHUNKS}, "contradicts"),
        ({"KILN_LORA": "jit"}, "KILN_LORA=jit cannot be used here"),
        ({"KILN_LORA": "jit", "KILN_LORA_BACKEND": "triton"}, "contradicts"),
    ],
)
def test_a_backend_that_cannot_run_here_is_refused_by_name(ask, made, environ, says):
    """Without any adapter too: no toggle is ignored."""
    with pytest.raises((NoSuchKernel, EnvError), match=re.escape(says)):
        ask(made("llama"), [[1, 2]], [None], environ, max_tokens=1)


BY_TOKEN = {"lora_shrink", "lora_expand", "lora_shrink_embedding"}
BY_CHUNK = {"align_tokens", "lora_chunked_shrink", "lora_chunked_expand", "lora_shrink_embedding"}


@pytest.mark.parametrize(
    ("backend", "with_adapters", "built"),
    [
        ("auto", False, set()),
        ("auto", True, BY_TOKEN),
        ("jit", True, BY_TOKEN),
        ("csgmv", True, BY_CHUNK),
        ("csgmv", False, BY_CHUNK),  # so that an impossible choice is refused
    ],
)
def test_only_the_kernels_of_the_backend_are_built(environment, backend, with_adapters, built):
    environment(KILN_LORA_BACKEND=backend, **HOST)
    config = LoRAConfig(root="adapters" if with_adapters else None)
    assert {spec.name for spec in lora_kernels(config)} == built


@pytest.mark.parametrize("backend", ["auto", "csgmv"])
def test_all_that_adapters_call_is_loaded_and_nothing_else(
    kernel_calls, environment, made, backend
):
    environment(KILN_LORA_BACKEND=backend)
    own, adapters = made("llama"), ("all-linear-rslora", "embedding-and-head")
    llm = LLM(
        str(own.folder), device="cpu", dtype="bfloat16", num_kv_blocks=80,
        enable_prefix_caching=False,  # every prompt is computed, the long ones too
        lora_modules={name: str(own.adapters[name]) for name in adapters},
    )  # fmt: skip
    ask_everything(llm, (None, *adapters))
    assert kernel_calls.called == kernel_calls.loaded
    assert {one[0] for one in kernel_calls.loaded} >= (BY_CHUNK if backend == "csgmv" else BY_TOKEN)


def test_a_model_without_adapters_needs_no_lora_kernels(ask, made):
    reason, _, _ = ask(made("llama"), [[1, 2]], [None], {}, max_tokens=1)
    assert reason is None
