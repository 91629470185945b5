"""Batches of graphs: their adapters change in place, and A runs beside the layer."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from adapter_pools import pool_of

from kiln.engine.lora import chunked_backend, kernel_backend
from kiln.engine.lora.adapter import Adapter, LoRAPair
from kiln.engine.lora.chunked_backend import ChunkedLoRA
from kiln.engine.lora.kernel_backend import KernelLoRA
from kiln.engine.lora.torch_native import TorchNativeLoRA

CPU = torch.device("cpu")
KERNELS = pytest.mark.parametrize("kernels", [KernelLoRA, ChunkedLoRA], ids=lambda one: one.name)
LARGE = ([0, 1, 0, -1], [30, 1, 1, 8], [True, True, True, False])


@pytest.fixture
def pool(model_sites):
    """Two adapters of all parts."""
    adapters = []
    for rank in (3, 2):
        pairs = {
            part.row: LoRAPair(
                torch.randn(rank, part.input_size), torch.randn(part.output_size, rank), 0.5
            )
            for part in model_sites.parts
        }
        adapters.append(Adapter("a", pairs))
    return pool_of(adapters, model_sites.all, torch.float32, CPU)


def inputs_of(tokens, rows):
    """Token ids, x, and what the layers without adapters return."""
    sizes = ((tokens, 24), (tokens, 33), (rows, 16))
    return torch.randint(0, 11, (tokens,)), torch.randn(tokens, 24), *map(torch.randn, sizes)


def results(backend, sites, info, inputs):
    """What a step makes of each layer: the embedding, qkv, and the LM head of the pruned rows."""
    (ids, x, *bases), (embedding, qkv, head) = inputs, sites.all
    outs = [torch.full_like(base, float("nan")) for base in bases]
    h = backend.run_lora_a_embedding(ids, embedding, info)
    backend.run_lora_b_sgemm(h, embedding, outs[0].copy_(bases[0]), info)
    backend.run_linear(lambda: outs[1].copy_(bases[1]), x, qkv, outs[1], info)
    pruned = backend.pruned_batch_info(info)
    rows = x[: pruned.num_tokens]
    backend.run_linear(lambda: outs[2].copy_(bases[2]), rows, head, outs[2], pruned)
    return outs


@KERNELS
def test_a_smaller_batch_is_padding_after_a_larger_one_was_filled_and_cleared(
    on_host, pool, model_sites, kernels
):
    backend = kernels(pool, model_sites.all, 64)
    backend.fill_batch(backend.fixed_batch(40, 4), *LARGE)
    small = backend.fixed_batch(2, 1)
    assert bool((small.tiles.tokens >= 2).any()), "it reads the tiles of the larger one"
    backend.clear_batches()
    for info in (small, small.pruned):
        assert bool((info.tiles.slots == -1).all())
        assert bool((info.tiles.tokens == -1).all())
    inputs = inputs_of(2, 1)
    for got, base in zip(results(backend, model_sites, small, inputs), inputs[2:], strict=True):
        assert torch.equal(got, base)


@KERNELS
def test_a_fixed_batch_with_fewer_tokens_than_before_has_padding_behind_them(
    on_host, pool, model_sites, kernels
):
    backend, oracle = kernels(pool, model_sites.all, 64), TorchNativeLoRA(pool)
    inputs, few = inputs_of(40, 4), ([1, -1, 0], [2, 1, 3], [True, False, True])
    for step, tokens, rows in ((LARGE, 40, 3), (few, 6, 2), (LARGE, 40, 3)):
        info = backend.fixed_batch(40, 4)
        backend.fill_batch(info, *step)
        got = results(backend, model_sites, info, inputs)
        used = (tokens, tokens, rows)
        own = [part[:count] for part, count in zip(inputs[2:], used, strict=True)]
        plain = oracle.prepare_lora_batch(*step)
        want = results(oracle, model_sites, plain, [inputs[0][:tokens], inputs[1][:tokens], *own])
        for one, other, base, count in zip(got, want, inputs[2:], used, strict=True):
            torch.testing.assert_close(one[:count], other, rtol=1e-5, atol=1e-5)
            assert not torch.equal(one[:count], base[:count])
            assert torch.equal(one[count:], base[count:])


class Stream:
    """A stream of which only the waits are recorded."""

    def __init__(self, name, events):
        self.name, self.events = name, events

    def wait_stream(self, other):
        self.events.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def captured(monkeypatch):
    """Events of a pretended capture, and the stream of the branches beside the layers."""
    events = []
    streams = [Stream("layers", events)]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])

    @contextmanager
    def on(stream):
        streams.append(stream)
        yield
        streams.pop()

    monkeypatch.setattr(torch.cuda, "stream", on)

    def recorded(name, function):
        def call(*arguments):
            events.append(f"{streams[-1].name}: {name.replace('_chunked', '')}")
            function(*arguments)

        return call

    for module, names in (
        (kernel_backend, ("lora_shrink", "lora_expand")),
        (chunked_backend, ("make_chunks", "lora_chunked_shrink", "lora_chunked_expand")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, recorded(name, getattr(module, name)))
    return events, Stream("beside", events)


LAYER = [
    "beside waits for layers", "beside: lora_shrink", "layers: base", "layers waits for beside",
    "layers: lora_expand",
]  # fmt: skip


@KERNELS
def test_a_runs_beside_the_layer_and_the_chunk_table_is_made_ahead_of_the_branch(
    on_host, pool, model_sites, captured, kernels
):
    backend = kernels(pool, model_sites.all, 64)
    events, backend._beside = captured
    _, qkv, head = model_sites.all
    info = backend.fixed_batch(3, 2)
    backend.fill_batch(info, [0, 1], [2, 1], [True, True])
    x, out, logits = torch.randn(3, 24), torch.zeros(3, 33), torch.zeros(2, 16)
    for site, rows, to, own in (
        (qkv, x, out, info),
        (qkv, x, out, info),
        (head, x[:2], logits, info.pruned),
    ):
        backend.run_linear(lambda: events.append("layers: base"), rows, site, to, own)
    table = ["layers: make_chunks"] if kernels is ChunkedLoRA else []
    assert events == [*table, *LAYER, *LAYER, *table, *LAYER]
