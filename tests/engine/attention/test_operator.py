"""torch.ops.kiln.attention keeps its schema's promises, and belongs to a step."""

from __future__ import annotations

import pytest
import torch

from kiln.engine.attention.context import AttentionStep, attention_step
from kiln.engine.attention.layer import AttentionLayer
from kiln.engine.attention.metadata import AttentionMetadata
from kiln.engine.attention.paged_layer import bind_layers
from kiln.engine.attention.torch_attention import TorchAttention
from kiln.engine.kv.pool import KVPool, KVShape
from kiln.engine.kv.shape import AttentionShape, Window
from kiln.engine.layers import linear, sparse_mlp  # noqa: F401 (register operators)
from kiln.engine.layers.channel_weight import ChannelWeight
from kiln.engine.layers.norm import RMSNorm
from kiln.engine.layers.rotary import Rotary
from kiln.engine.layers.weight import DenseWeight
from kiln.jit_kernels.ops.rotary.table import rotary_table

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=8, windows=(None, Window(3)))
METADATA = AttentionMetadata(
    slot_mapping=torch.tensor([8, 9, 10, 11, 12, 3]),
    block_table=torch.tensor([[2, 3], [0, 0]], dtype=torch.int32),
    cu_seqlens_q=torch.tensor([0, 5, 6], dtype=torch.int32),
    seq_lens=torch.tensor([5, 4], dtype=torch.int32),
    query_lens=(5, 1),
    kv_lens=(5, 4),
    block_size=4,
)
POSITIONS = torch.tensor([0, 1, 2, 3, 4, 3])


def step(norms):
    rotary = Rotary(rotary_table(SHAPE.head_dim, 16, 10000.0))
    norm = [RMSNorm(torch.rand(SHAPE.head_dim) + 0.5, 1e-6) for _ in range(2) if norms]
    layers = [AttentionLayer(index, SHAPE, rotary, *norm) for index in range(2)]
    pool = KVPool(KVShape(SHAPE, torch.float32), 5, 4, torch.device("cpu"))
    attention = TorchAttention(SHAPE.windows, torch.float32)
    bound = bind_layers(layers, pool, attention, torch.float32)
    return layers, pool, AttentionStep(bound, METADATA, attention.plan(METADATA))


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("index", [0, 1])
def test_it_mutates_what_it_declares_and_traces(norms, index):
    _, _, running = step(norms)
    arguments = (torch.randn(6, 64), POSITIONS, torch.empty(6, 32), index)
    with attention_step(running), torch.inference_mode():
        torch.library.opcheck(torch.ops.kiln.attention.default, arguments)


@pytest.mark.parametrize("biases", [(None, None), (torch.randn(5, 16), torch.randn(5, 8))])
def test_so_do_those_of_routers_and_experts(biases):
    arguments = (torch.randn(7, 5), None, 2, "softmax", [1, 1], False, True, 0.0, 1.0)
    torch.library.opcheck(torch.ops.kiln.route.default, arguments)
    weights, ids = torch.ops.kiln.route(*arguments)
    gate_up, down = DenseWeight(torch.randn(5, 16, 8)), DenseWeight(torch.randn(5, 8, 8))
    products = (gate_up.tensors, gate_up.form, biases[0], down.tensors, down.form, biases[1])
    arguments = (torch.randn(7, 8), weights, ids, *products, 5, "silu", [], False)
    torch.library.opcheck(torch.ops.kiln.moe.default, arguments)


def test_so_does_that_of_projections():
    codes = torch.randint(-99, 99, (16, 8), dtype=torch.int8)
    weight = ChannelWeight(codes, torch.rand(16, 1))
    for bias in (None, torch.randn(16)):
        arguments = (torch.randn(7, 8), weight.tensors, bias, weight.form, torch.empty(7, 16))
        torch.library.opcheck(torch.ops.kiln.linear.default, arguments)


def test_the_layer_stores_normalises_rotates_and_attends():
    """Layer 1, a window of 3, against the formula on its own keys and values in the pool."""
    layers, pool, running = step(norms=True)
    qkv = torch.randn(6, 64)
    query, key, value = qkv.clone().view(6, 8, 8).split([4, 2, 2], dim=1)
    layer = layers[1]
    query, key = layer.query_norm(query), layer.key_norm(key)
    layer.rotary(POSITIONS, query, key)
    with attention_step(running):
        out = layer(POSITIONS, qkv).view(6, 4, 8)
    keys, values = pool.layer(1)
    assert torch.equal(keys[METADATA.slot_mapping], key)
    assert torch.equal(values[METADATA.slot_mapping], value)
    assert not any(one.any() for one in pool.layer(0))
    for token in range(5):
        seen = slice(max(token - 2, 0), token + 1)
        for head in range(4):
            scores = key[seen, head // 2] @ query[token, head] / 8**0.5
            wanted = scores.softmax(0) @ value[seen, head // 2]
            torch.testing.assert_close(out[token, head], wanted)


def test_the_path_of_a_layer_is_decided_at_load(monkeypatch):
    _, _, running = step(norms=False)
    from kiln.engine.attention import rotate_and_store

    def again(*arguments):
        raise AssertionError("decided in a step")

    monkeypatch.setattr(rotate_and_store, "is_one_launch", again)
    with attention_step(running):
        torch.ops.kiln.attention(torch.randn(6, 64), POSITIONS, torch.empty(6, 32), 0)


def test_there_is_no_attention_outside_of_a_step():
    arguments = (torch.randn(6, 64), POSITIONS, torch.empty(6, 32), 0)
    with attention_step(step(norms=False)[2]):
        torch.ops.kiln.attention(*arguments)
    with pytest.raises(LookupError):
        torch.ops.kiln.attention(*arguments)
