"""The kernel benchmark: ceilings, cold copies, rows, peers. Needs no GPU."""

from __future__ import annotations

import signal
import sys
import time
from collections import namedtuple
from dataclasses import replace
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
import torch

from kiln.jit_kernels.bench import forms, measure, peer_sampling, peers
from kiln.jit_kernels.bench.ceilings import Ceilings, measure_ceilings
from kiln.jit_kernels.bench.copies import bytes_held, copies_of, copy_to, is_cold, num_copies
from kiln.jit_kernels.bench.limits import time_limit
from kiln.jit_kernels.bench.measure import Wanted, bench_kernel
from kiln.jit_kernels.bench.peer_attention import flashinfer_form, sdpa_form
from kiln.jit_kernels.bench.table import remarks, side_by_side
from kiln.jit_kernels.declare.spec import Cost
from kiln.jit_kernels.ops.attention.reference import attend
from kiln.jit_kernels.registry import all_specs, find_spec

CEILINGS = Ceilings(copy_bytes_s=4e12, matmul_flops_s=8e14, launch_us=1.2, l2_bytes=60 << 20)


def test_the_nearer_ceiling_sets_the_floor():
    moves, computes = Cost(4 * 10**9, 10**9), Cost(10**6, 8 * 10**11)
    assert CEILINGS.floor_us(moves) == pytest.approx(1000)
    assert CEILINGS.bound(moves) == "memory"
    assert CEILINGS.floor_us(computes) == pytest.approx(1000)
    assert CEILINGS.bound(computes) == "compute"


def test_ceilings_are_measured_and_not_assumed():
    ceilings = measure_ceilings("cpu")
    assert 1e8 < ceilings.copy_bytes_s < 1e13
    assert 1e8 < ceilings.matmul_flops_s < 1e14
    assert 0 < ceilings.launch_us < 1e4


def test_copies_pass_the_l2_between_two_uses_of_one():
    l2, plenty = 60 << 20, 1 << 40
    for touched in (1 << 20, 7 << 20, 100 << 20):
        count = num_copies(touched, touched, l2, plenty)
        assert count * touched >= 2 * l2 or count == 2
        assert is_cold(count, touched, l2)
    assert num_copies(1 << 30, 1 << 30, l2, plenty) == 2
    tiny = num_copies(100, 100, l2, plenty)
    assert tiny == 256
    assert not is_cold(tiny, 100, l2), "so few bytes stay in the L2, and the row must say so"


def test_copies_fit_into_a_part_of_the_free_memory():
    held, free = 1 << 30, 20 << 30
    assert num_copies(1 << 20, held, 60 << 20, free) == 5


def test_a_copy_keeps_strides_gaps_and_what_shares_memory():
    pool = torch.arange(48, dtype=torch.float32).view(4, 12)
    keys, values = pool[:, :5], pool[:, 6:11]
    some = namedtuple("some", "keys values number absent")
    first, second = copies_of(some(keys, values, 3, None), 2)
    assert first[0] is keys
    assert [x.stride() for x in second[:2]] == [keys.stride(), values.stride()]
    assert second[2:] == (3, None)
    assert torch.equal(second[1], values)
    second[0].fill_(-1)
    assert torch.equal(second[1], values), "the values lie beside the keys, not over them"
    assert second[0].untyped_storage().data_ptr() == second[1].untyped_storage().data_ptr()
    assert keys[0, 0] == 0, "the original is left alone"
    assert bytes_held(first) == pool.untyped_storage().nbytes()


def test_a_copy_of_nothing_has_its_shape():
    (empty,) = copy_to(namedtuple("one", "x")(torch.empty(0, 7)), "cpu")
    assert empty.shape == (0, 7)


def test_every_kernel_has_a_variant_and_a_size_to_benchmark():
    for spec in all_specs().values():
        assert next(spec.variants(spec.bench_needs), None) is not None, spec.name
        assert spec.bench_sizes, spec.name


def rows_of(spec, **wanted):
    return list(bench_kernel(spec, CEILINGS, Wanted("cpu", **wanted)))


def test_a_row_says_what_was_measured_and_how_near_the_floor_it_is():
    host, reference = rows_of(find_spec("rms_norm"))
    assert (host["implementation"], reference["implementation"]) == ("host", "torch")
    for row in (host, reference):
        assert row["status"] == "measured"
        rate = row["bytes"] / (row["median_us"] * 1e-6)
        assert row["gb_s"] == pytest.approx(rate / 1e9, rel=0.02, abs=0.01)
        assert row["share_of_floor"] == pytest.approx(rate / 4e12, rel=0.02, abs=1e-4)
    assert host["times_ours"] == 1
    expected = reference["median_us"] / host["median_us"]
    assert reference["times_ours"] == pytest.approx(expected, abs=0.002)


def test_what_gives_a_wrong_result_is_not_timed(monkeypatch):
    spec = find_spec("rms_norm")

    def wrong(a):
        return lambda: a[0].fill_(7.0)

    def breaks(arguments):
        raise RuntimeError("no such thing\nand more")

    given = {"host": forms.of(lambda *a: None), "wrong": wrong, "breaks": breaks, "peer": "absent"}
    monkeypatch.setattr(measure, "forms_of", lambda *a, **k: given)
    statuses = {row["implementation"]: row["status"] for row in rows_of(spec)}
    assert statuses["host"].startswith("wrong result: error nan"), "its output was never written"
    assert statuses["wrong"].startswith("wrong result")
    assert statuses["breaks"] == "failed: RuntimeError: no such thing"
    assert statuses["peer"] == "absent"


def test_a_kernel_that_does_not_come_as_it_is_benchmarked_says_so():
    spec = replace(find_spec("rms_norm"), bench_needs={"scalar_t": "kiln::e4m3"})
    (row,) = rows_of(spec)
    assert "kiln::e4m3" in row["status"]


def test_a_peer_that_is_absent_has_a_row_and_no_error(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert peers.peer_forms(find_spec("rms_norm")) == {
        name: "not installed" for name in ("flashinfer", "sgl_kernel", "vllm", "liger_kernel")
    }
    assert set(peers.versions().values()) == {"not installed"}


def test_a_peer_that_cannot_be_imported_says_why(monkeypatch):
    def broken(name):
        raise ImportError("libcudart.so.11: cannot open")

    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(peers.importlib, "import_module", broken)
    found = peers.peer_forms(find_spec("rms_norm"))
    assert found["vllm"] == "cannot be used: ImportError: libcudart.so.11: cannot open"


def fake_peers():
    """Modules with the functions that the adapters call, in the peers' own argument order."""

    def norm(x, weight, eps):
        return torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)

    def rmsnorm(x, weight, eps=1e-6, out=None):
        return out.copy_(norm(x, weight, eps))

    def fused(x, residual, weight, eps=1e-6):
        residual += x
        x.copy_(norm(residual, weight, eps))

    def silu_and_mul(x, out=None):
        a, b = x.float().chunk(2, -1)
        return out.copy_(torch.nn.functional.silu(a) * b)

    flashinfer, sgl, vllm, liger = (ModuleType(n) for n in ("f", "s", "v", "l"))
    flashinfer.norm, flashinfer.activation = ModuleType("n"), ModuleType("a")
    flashinfer.norm.rmsnorm = sgl.rmsnorm = rmsnorm
    flashinfer.norm.fused_add_rmsnorm = sgl.fused_add_rmsnorm = fused
    flashinfer.activation.silu_and_mul = sgl.silu_and_mul = silu_and_mul
    vllm.rms_norm = lambda out, x, weight, eps: out.copy_(norm(x, weight, eps))
    vllm.fused_add_rms_norm = fused
    liger.liger_rms_norm = lambda x, w, eps, offset, mode, in_place: norm(x, w, eps).to(x.dtype)
    return {
        "flashinfer": flashinfer, "sgl_kernel": sgl, "vllm._custom_ops": vllm,
        "liger_kernel.transformers.functional": liger,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["rms_norm", "fused_add_rms_norm", "silu_and_mul"])
def test_adapters_hand_a_peer_what_its_interface_asks_for(name, monkeypatch):
    modules = fake_peers()
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(peers.importlib, "import_module", modules.__getitem__)
    spec = find_spec(name)
    variant = next(spec.variants(spec.bench_needs))
    found = peers.peer_forms(spec)
    if name == "silu_and_mul":
        del found["vllm"]  # torch.ops._C: only the real one registers it
    assert len(found) >= 2
    for form in found.values():
        assert measure._flaw(spec, variant, spec.sizes[-1], form, "cpu") is None


def test_the_table_has_a_line_a_size_and_a_column_for_each_other_way():
    row = {
        "kernel": "k", "sizes": {"rows": 1}, "implementation": "jit", "status": "measured",
        "median_us": 2.0, "spread_us": 0.1, "captured": True, "cold": False, "bound": "memory",
        "gb_s": 1234.0, "tflop_s": 0.5, "share_of_floor": 0.5, "times_ours": 1.0,
    }  # fmt: skip
    other = row | {"implementation": "torch", "times_ours": 2.5}
    absent = row | {"implementation": "vllm", "status": "not installed", "times_ours": None}
    more = row | {"sizes": {"rows": 2}, "bound": "compute"}
    titles, lines = side_by_side([row, other, absent, more])
    assert titles[-2:] == ["torch ÷ ours", "vllm ÷ ours"]
    assert lines == [
        ["k", "rows=1", "2.00", "5.0%", "1,234 GB/s", "50.0%", "2.50", "–"],
        ["k", "rows=2", "2.00", "5.0%", "0.5 TFLOP/s", "50.0%", "–", "–"],
    ]
    assert remarks([row, other, absent]) == [
        "k at its small sizes: inputs warm in the L2 cache",
        "k, vllm: not installed",
    ]


def test_nothing_of_a_peer_is_imported_with_the_benchmark():
    assert not [name for name in peers.LIBRARIES if name in sys.modules]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("paged_attention", {"requests": 3, "context": 40, "kv_heads": 2, "group": 4}),
        ("paged_prefill", {"requests": 2, "context": 33, "tokens": 33, "kv_heads": 2, "group": 1}),
    ],
)
def test_torchs_own_attention_is_a_fair_stand_in(name, sizes):
    spec = measure.without_scales(find_spec(name))
    variant = next(spec.variants(spec.bench_needs))
    sizes = {"most": 9, "split": 2, **sizes}
    assert measure._flaw(spec, variant, sizes, sdpa_form(spec), "cpu") is None
    ragged = {**sizes, "long": 64, "batch": 0}
    assert "equal lengths" in measure._flaw(spec, variant, ragged, sdpa_form(spec), "cpu")


def fake_flashinfer(log):
    """FlashInfer's two wrappers with the parameters of its documentation."""

    class Wrapper:
        def __init__(self, workspace, layout, **more):
            assert layout == "HND"

        def plan(self, *, num_qo_heads, num_kv_heads, page_size, window_left, logits_soft_cap,
                 q_data_type, kv_data_type, sm_scale, **more):  # fmt: skip
            prefix = "paged_kv_" if "paged_kv_indptr" in more else ""
            pages = [more.pop(prefix + key) for key in ("indptr", "indices", "last_page_len")]
            starts = more.pop("qo_indptr", torch.arange(pages[0].numel()))
            assert set(more) <= {"head_dim", "head_dim_qk", "causal"}
            lengths = (pages[0][1:] - pages[0][:-1] - 1) * page_size + pages[2]
            table = torch.zeros(len(lengths), int(pages[0].diff().max()), dtype=torch.int32)
            for row, (first, last) in zip(table, pairwise(pages[0].tolist()), strict=True):
                row[: last - first] = pages[1][first:last]
            self.case = SimpleNamespace(
                block_table=table, seq_lens=lengths, cu_seqlens_q=starts, sinks=None,
                scale=sm_scale, window=window_left + 1, soft_cap=0.0, k_scale=1.0, v_scale=1.0,
            )  # fmt: skip
            log.append("plan")

        def run(self, query, pools):
            self.case.query, (self.case.key_pool, self.case.value_pool) = query, pools
            done = attend(self.case, lambda tokens: True)
            return torch.cat([one.out for one in done]).to(query.dtype)

    module = ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = Wrapper
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    return module


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("paged_attention", {"requests": 3, "context": 40, "long": 100}),
        ("paged_prefill", {"requests": 2, "context": 50, "tokens": 33}),
    ],
)
def test_flashinfer_gets_the_block_table_in_its_own_form(name, sizes):
    log = []
    spec = measure.without_scales(find_spec(name))
    variant = next(spec.variants(spec.bench_needs))
    sizes = {"kv_heads": 2, "group": 4, "most": 9, "split": 2, **sizes}
    form = flashinfer_form(spec, fake_flashinfer(log))
    assert measure._flaw(spec, variant, sizes, form, "cpu") is None
    arguments = spec.make_arguments(variant, sizes, "cpu")
    del log[:]
    for one in copies_of(arguments, 3):
        form(one)
    assert log in ([], ["plan"]), "copies of one call share a plan"


def test_a_limit_of_time_ends_what_does_not_end():
    with pytest.raises(TimeoutError, match="1 s"), time_limit(1):
        time.sleep(30)


def test_a_limit_of_time_leaves_the_timer_that_it_found():
    handler = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    found = signal.setitimer(signal.ITIMER_REAL, 100)
    try:
        with time_limit(60):
            assert 50 < signal.getitimer(signal.ITIMER_REAL)[0] <= 60
        assert 90 < signal.getitimer(signal.ITIMER_REAL)[0] <= 100
        assert signal.getsignal(signal.SIGALRM) == signal.SIG_IGN
    finally:
        signal.setitimer(signal.ITIMER_REAL, *found)
        signal.signal(signal.SIGALRM, handler)


@pytest.mark.parametrize("serve", [1, 2, 3, 4])
def test_flashinfers_sampling_is_asked_for_the_filters_of_the_rows(serve):
    asked = []

    def function(name):
        def run(probs, *filters):
            asked.append((name, len(filters)))
            return probs.argmax(1)

        return run

    names = ("sampling_from_probs", "top_p_sampling_from_probs", "top_k_top_p_sampling_from_probs")
    module = ModuleType("flashinfer")
    module.sampling = ModuleType("sampling")
    module.sampling.softmax = lambda logits, temperature: torch.softmax(
        logits / temperature.unsqueeze(1), 1
    )
    for name in names:
        setattr(module.sampling, name, function(name))
    spec = find_spec("sample_tokens")
    variant = next(spec.variants(spec.bench_needs))
    sizes = {**spec.bench_sizes[0], "rows": 3, "vocab": 500, "serve": serve}
    form = peer_sampling.flashinfer_form(spec, module)
    assert measure._flaw(spec, variant, sizes, form, "cpu") is None
    wanted = [[], [(names[0], 0)], [(names[1], 1)], [(names[2], 2)]][serve - 1]
    assert asked == wanted


def test_a_draw_without_probability_is_wrong():
    logits = torch.tensor([[0.0, float("-inf")], [1.0, 2.0]])
    peer_sampling.Drawn(torch.tensor([0, 1]), logits).check()
    for tokens in ([1, 1], [0, 2], [-1, 0]):
        with pytest.raises(ValueError, match="no probability"):
            peer_sampling.Drawn(torch.tensor(tokens), logits).check()


def test_torch_compile_is_asked_where_it_is_wanted(monkeypatch):
    spec = find_spec("rms_norm")
    seen = []

    def forms_of(spec, device, *, compiled, peers):
        run = forms.of(lambda a: measure.run_reference(spec, a))
        return {"host": run, "compile": run if compiled else "not requested"}

    monkeypatch.setattr(measure, "forms_of", forms_of)
    monkeypatch.setattr(measure, "_cases", lambda *a: [spec.sizes[1], spec.sizes[2]])
    for compiled in (True, False):
        rows = rows_of(spec, compiled=compiled)
        seen.append([r["status"] for r in rows if r["implementation"] == "compile"])
    assert seen == [["measured", "measured"], ["not requested", "not requested"]]
