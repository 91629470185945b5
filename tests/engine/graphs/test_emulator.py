"""Graphs on a CPU: what CUDA would do wrong is refused or shows, and the rest is replayed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kiln.engine.graphs.emulator import CaptureError, EmulatedGraphs

torch.library.define("kiln_graph_tests::outer", "(Tensor(a!) out, Tensor x) -> ()")


def outer(out, x):
    torch.add(x, 1, out=out)
    out.mul_(2)


torch.library.impl("kiln_graph_tests::outer", "CPU", outer)
OUTER = torch.ops.kiln_graph_tests.outer.default


@pytest.fixture
def device():
    return EmulatedGraphs({})


@pytest.fixture
def x():
    return torch.arange(1.0, 5.0)


READS = {
    "item": lambda x: x[0].item(),
    "int": lambda x: int(x[0]),
    "float": lambda x: float(x[0]),
    "bool": lambda x: bool(x[0] > 0),
    "if": lambda x: 1 if x[0] > 0 else 2,
    "index": lambda x: [1, 2, 3, 4, 5][x[0].long()],
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "iterate and read": lambda x: [float(each) for each in x],
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 2),
    "mask": lambda x: x[x > 2],
    "masked_select": lambda x: x.masked_select(x > 2),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x + 1),
    "allclose": lambda x: torch.allclose(x, x + 1),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "bincount": lambda x: x.long().bincount(),
    "unique_consecutive": lambda x: torch.unique_consecutive(x),
    "argwhere": lambda x: x.argwhere(),
    "put where": lambda x: x.index_put_((x > 2,), x[:2] + 1),
    "copy to the host": lambda x: x.cpu(),
    "format": lambda x: f"{x[0]:.1f}",
    "repr": lambda x: repr(x),
}


@pytest.mark.parametrize("name", READS)
def test_a_value_that_is_read_on_the_host_is_refused(device, x, name):
    with pytest.raises(CaptureError, match="a graph is captured"):
        device.capture(lambda between: READS[name](x))
    READS[name](x)  # and allowed again behind the capture


FIXED_SIZES = {
    "index": lambda x: x[torch.zeros(2, dtype=torch.int64)],
    "index with None": lambda x: x[None, torch.zeros(2, dtype=torch.int64)],
    "fill where": lambda x: x.masked_fill_(x > 2, 0.0),
    "put one number where": lambda x: x.index_put_((x > 2,), torch.zeros(())),
    "repeat to a known size": lambda x: x.repeat_interleave(x.long(), output_size=10),
    "to": lambda x: x.to(torch.float16),
}


@pytest.mark.parametrize("name", FIXED_SIZES)
def test_operations_of_a_fixed_size_are_recorded(device, x, name):
    kept = []
    graph = device.capture(lambda between: kept.append(FIXED_SIZES[name](x)))
    x.copy_(torch.tensor([4.0, 3.0, 2.0, 1.0]))
    wanted = FIXED_SIZES[name](x.clone())
    graph.replay()
    assert torch.equal(kept[0], wanted)


HOST_DATA = {
    "tensor": lambda: torch.tensor([1.0, 2.0]),
    "scalar": lambda: torch.tensor(3),
    "as_tensor": lambda: torch.as_tensor([1, 2]),
    "from_numpy": lambda: torch.from_numpy(np.ones(3)),
    "tensor of an array": lambda: torch.tensor(np.ones(3)),
    "index with a list": lambda: torch.zeros(4)[[0, 2]],
}


@pytest.mark.parametrize("name", HOST_DATA)
def test_a_tensor_made_from_host_data_is_refused(device, name):
    with pytest.raises(CaptureError, match="makes a tensor from host data"):
        device.capture(lambda between: HOST_DATA[name]())


def test_the_error_names_the_operation(device, x):
    with pytest.raises(CaptureError, match="nonzero"):
        device.capture(lambda between: x.nonzero())
    with pytest.raises(CaptureError, match=r"Tensor\.tolist"):
        device.capture(lambda between: x.tolist())


def test_a_number_that_was_read_before_the_capture_is_fixed_and_shows(device, x):
    """As in a CUDA graph the replay uses the old number: a comparison with eager tells."""
    out, factor = torch.zeros(4), x[0].item()
    graph = device.capture(lambda between: torch.mul(x, factor, out=out))
    x.fill_(3.0)
    graph.replay()
    assert out.tolist() == [3.0] * 4
    assert out.tolist() != (x * x[0].item()).tolist()


def test_a_replay_computes_with_new_values_in_the_same_memory(device, x):
    kept = []

    def step(between):
        middle = torch.softmax(x, 0) + 1
        kept[:] = [middle.exp().sum(0, keepdim=True), middle]

    graph = device.capture(step)
    addresses = [tensor.data_ptr() for tensor in kept]
    for _ in range(2):
        x.copy_(torch.rand(4))
        graph.replay()
        wanted = torch.softmax(x, 0) + 1
        assert torch.equal(kept[1], wanted)
        assert torch.equal(kept[0], wanted.exp().sum(0, keepdim=True))
    assert [tensor.data_ptr() for tensor in kept] == addresses


def test_results_of_several_tensors_are_replayed(device, x):
    kept = []
    graph = device.capture(lambda between: kept.extend(x.topk(2)))
    x.copy_(torch.tensor([9.0, 0.0, 8.0, 0.0]))
    graph.replay()
    assert [part.tolist() for part in kept] == [[9.0, 8.0], [0, 2]]


def test_views_are_not_copies(device, x):
    kept = []

    def step(between):
        view = x.view(2, 2)[1]
        view.add_(1)
        kept.append(view)

    graph = device.capture(step)
    assert x.tolist() == [1, 2, 4, 5]
    x.fill_(0)
    graph.replay()
    assert x.tolist() == [0, 0, 1, 1]
    assert kept[0].tolist() == [1, 1]


@pytest.mark.parametrize("reshape", [torch.Tensor.contiguous, lambda t: t.reshape(4)])
def test_what_is_a_copy_only_where_it_must_be_is_replayed(device, reshape):
    base, kept = torch.zeros(2, 2), []
    graph = device.capture(lambda between: kept.append(reshape(base.t())))
    base.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    graph.replay()
    assert kept[0].flatten().tolist() == [1, 3, 2, 4]


def test_in_place_operations_and_fixed_outputs(device, x):
    out, index = torch.zeros(4), torch.tensor([1, 1])

    def step(between):
        x[1:3].mul_(2)
        torch.add(x, x, out=out)
        out.index_copy_(0, index[:1], x[:1])
        out[3:].copy_(x[:1])

    graph = device.capture(step)
    x.copy_(torch.tensor([1.0, 1.0, 1.0, 1.0]))
    index.fill_(0)
    graph.replay()
    assert x.tolist() == [1, 2, 2, 1]
    assert out.tolist() == [1, 4, 4, 1]


def test_an_input_whose_memory_was_replaced_is_not_seen(device, x):
    """A graph keeps addresses. The runner compares them before a replay."""
    inputs, out = {"x": x}, torch.zeros(4)
    graph = device.capture(lambda between: torch.add(inputs["x"], 1, out=out))
    inputs["x"] = torch.full((4,), 7.0)
    graph.replay()
    assert torch.equal(out, x + 1)


def test_a_custom_operator_is_opened():
    """What it runs is recorded, so that a read inside is found, and no Python runs at a replay."""
    x, out, runs = torch.ones(3), torch.zeros(3), []

    def opened(out, x):
        runs.append(1)
        outer(out, x)

    graph = EmulatedGraphs({OUTER: opened}).capture(lambda between: OUTER(out, x))
    x.fill_(4)
    graph.replay()
    assert out.tolist() == [10.0] * 3
    assert len(runs) == 1
    with pytest.raises(CaptureError, match="reads a value on the host"):
        EmulatedGraphs({OUTER: lambda out, x: x[0].item()}).capture(lambda between: OUTER(out, x))


def test_a_custom_operator_that_is_not_opened_is_one_operation(device):
    """Inside it anything may run: on a GPU it is a kernel."""
    x, out = torch.ones(3), torch.zeros(3)
    graph = device.capture(lambda between: OUTER(out, x))
    x.fill_(4)
    graph.replay()
    assert out.tolist() == [10.0] * 3


def test_what_is_between_two_pieces_runs_at_each_replay_and_may_read_values(device, x):
    out, seen = torch.zeros(4), []

    def step(between):
        x.mul_(2)
        between(lambda: seen.append(x.tolist()))
        torch.add(x, 1, out=out)

    graph = device.capture(step)
    assert not seen, "not while it is captured"
    for value in (1.0, 3.0):
        x.fill_(value)
        graph.replay()
        assert seen.pop() == [2 * value] * 4
        assert out.tolist() == [2 * value + 1] * 4


def test_memory_that_nothing_wrote_is_not_a_number(device, x):
    """On a GPU it holds what another operation left there; here a test sees that it is read."""
    kept = []

    def step(between):
        for made in (torch.empty(3), x.new_empty(3), torch.empty_like(x)):
            made[0] = x[0]
            kept.append(made)

    graph = device.capture(step)
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert all(made[0] == value and bool(made[1:].isnan().all()) for made in kept)


def test_a_capture_that_fails_leaves_torch_as_it_was(device, x):
    before = torch.Tensor.tolist, torch.Tensor.numpy
    with pytest.raises(ZeroDivisionError):
        device.capture(lambda between: 1 / 0)
    assert (torch.Tensor.tolist, torch.Tensor.numpy) == before
    assert x.tolist() == [1, 2, 3, 4]
    assert device.keep(x) is x
