"""Windows and chunks: the rule for the first visible key, and both kernels at borders of chunks."""

from __future__ import annotations

import pytest
import torch
from depth import at_depth

from kiln.jit_kernels.declare.catalog import best_form
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.ops.attention.cases import changed, make_case
from kiln.jit_kernels.ops.attention.error import MOST_UNITS, attention_error
from kiln.jit_kernels.ops.attention.reference import scattered
from kiln.jit_kernels.ops.attention.visible import first_visible
from kiln.jit_kernels.ops.attention_decode import functions as decode
from kiln.jit_kernels.ops.attention_decode.splits import SplitRule, is_decode
from kiln.jit_kernels.ops.attention_decode.workspace import workspace_for
from kiln.jit_kernels.ops.attention_prefill import functions as prefill
from kiln.jit_kernels.ops.attention_prefill.tiles import is_prefill
from kiln.jit_kernels.toolchains import host

# (keys, query tokens): borders of most chunks below are inside a KV block, a tile and the tokens.
DECODES = [
    (1, 1),
    (0, 1),
    (7, 3),
    (0, 0),
    (34, 16),
    (64, 1),
    (65, 2),
    (130, 16),
    (520, 1),
    (300, 9),
]
PREFILLS = [(17, 17), (70, 40), (200, 130), (333, 64), (9, 18)]
E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("window", [0, 1, 2, 5, 16, 300, -1, -2, -5, -16, -300])
def test_the_first_visible_key_is_that_of_the_definition(window):
    def sees(position, key):
        if window < 0:
            return key // -window == position // -window
        return window == 0 or position - key < window

    for end in range(1, 100):
        wanted = next(key for key in range(end) if sees(end - 1, key))
        assert max(0, first_visible(end, window)) == wanted
    ends = torch.arange(-3, 100)
    assert first_visible(ends, window).tolist() == [
        first_visible(n, window) for n in range(-3, 100)
    ]


def run(monkeypatch, case, arch=""):
    """Run the kernels' own source; return out and lse."""

    def call(spec, **named):
        a = spec.parameters.Arguments(**named)
        form = best_form(spec, spec.bind(a).variant, arch)
        host.launch(host.load(form, form.bind(a).variant, checked=False, env=settings()), form, a)

    out, lse = torch.zeros_like(case.query), torch.zeros(case.query.shape[:2])
    for module in (decode, prefill):
        monkeypatch.setattr(module, "call", call)
    workspace = workspace_for(case, SplitRule(6, 2, 3))  # several splits
    tokens = case.query.shape[0]
    decode.plan_attention(workspace, case.block_table, case.seq_lens, case.cu_seqlens_q, tokens)
    decode.paged_attention(**vars(case), out=out, lse=lse, workspace=workspace)
    prefill.paged_prefill(**vars(case), out=out, lse=lse)
    return changed(case, out=out, lse=lse)


@pytest.mark.parametrize("chunk", at_depth([7, 33], [1, 2, 5, 16, 17, 32, 64, 100, 128, 199, 1000]))
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "arch"),
    at_depth(
        [(torch.bfloat16, torch.bfloat16, "")],
        [(torch.bfloat16, E4M3, ""), (torch.float16, torch.float16, "sm_90a")],
    ),
)
def test_tokens_on_both_sides_of_a_border_see_their_own_chunk(
    monkeypatch, chunk, dtype, kv_dtype, arch
):
    torch.manual_seed(chunk)
    sizes = {"kv_heads": 1, "group": 1 + chunk % 3, "window": -chunk, "sinks": chunk % 2}
    case = make_case(sizes, dtype, kv_dtype, 64, "cpu", requests=[*DECODES, *PREFILLS])
    done = run(monkeypatch, case, arch)
    # Decode attention multiplies one-byte pools in fp16.
    for serves, fp16 in (
        (is_decode, kv_dtype != torch.bfloat16),
        (is_prefill, dtype == torch.float16),
    ):
        wanted = scattered(done, serves)
        assert attention_error(done, wanted, serves, fp16_weights=fp16) <= MOST_UNITS


def test_a_chunk_larger_than_every_context_changes_no_bit(monkeypatch):
    torch.manual_seed(0)
    sizes = {"kv_heads": 1, "group": 2, "window": 0}
    requests = [*DECODES, *PREFILLS]
    case = make_case(sizes, torch.bfloat16, torch.bfloat16, 64, "cpu", requests=requests)
    whole, chunked = (run(monkeypatch, changed(case, window=window)) for window in (0, -521))
    assert torch.equal(whole.out, chunked.out)
    assert torch.equal(whole.lse, chunked.lse)
