"""The sampler: exact sets, the right distribution, and rows that do not depend on each other."""

from __future__ import annotations

import math
import mmap
import runpy
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from chi_square import chi_square
from depth import at_depth

from kiln.jit_kernels.declare.settings import settings as environment
from kiln.jit_kernels.declare.spec import LaunchGeometry
from kiln.jit_kernels.ops.sampling import functions, reference
from kiln.jit_kernels.ops.sampling.functions import Edits, Samples, edit_arguments, sample_tokens
from kiln.jit_kernels.ops.sampling.spec import shared_bytes
from kiln.jit_kernels.registry import find_spec
from kiln.jit_kernels.toolchains import host

oracle = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("sampling_oracle.py"))))
SPEC = find_spec("sample_tokens")
INF, NAN = math.inf, math.nan
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NEAR = 2e-6  # relative: float32 rounding may change closer decisions


@dataclass(frozen=True)
class Asked:
    """The settings of one row."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def kernel(spec=SPEC):
    """A function like sample_tokens that runs the kernel's source on the host."""

    def run(logits, settings, keys, mask=None, edits=None, width=0):
        logits = logits.float() if logits.dtype == torch.float16 else logits  # as sample_tokens
        samples = Samples.empty(len(logits), width, logits.device)
        a = spec.parameters.Arguments(
            **samples.outputs(),
            **{"logits": logits, "settings": settings, "keys": keys, "mask": mask},
            **edit_arguments(edits),
        )
        host.run(spec, a, env=environment())
        return samples

    return run


WAYS = [pytest.param(sample_tokens, id="torch"), pytest.param(kernel(), id="kernel")]


def rows_of(asked, seeds=None, positions=None, report=-1, penalties=(1.0, 0.0, 0.0)):
    """Settings and keys of rows, as sample_tokens takes them."""
    logs = [math.log(a.min_p) if a.min_p else -INF for a in asked]
    settings = [
        [a.temperature, a.top_p, log, *penalties] for a, log in zip(asked, logs, strict=True)
    ]
    count = len(asked)
    columns = (seeds or [0] * count, positions or [0] * count, [a.top_k for a in asked])
    keys = torch.tensor([*columns, [report] * count], dtype=torch.int64).T.contiguous()
    return torch.tensor(settings), keys


def shapes(vocab, dtype):
    """Rows of several kinds: peaked, flat, equal, masked, single, far apart, with ties, shifted."""
    base = torch.randn(12, vocab)
    zipf = -torch.log(torch.arange(1, vocab + 1).float())
    rows = [
        *(base[0] * 3, base[1] * 6, base[2] * 0.05, base[3] * 0, base[4].exp() * 2),
        *(zipf * 1.1 + 12, torch.where(base[6] > 2, base[6], -INF), base[8] * 40),
        torch.where(torch.arange(vocab) == vocab - 1, 1.0, -INF),
        *((base[9] * 4).round(), -base[10].abs() * 5, base[11] * 3 + 100),
    ]
    return torch.stack(rows).to(dtype)


ASKED = [
    Asked(),
    Asked(0.7),
    Asked(1.0, 5),
    Asked(1.3, 0, 0.8),
    Asked(0.9, 0, 1.0, 0.15),
    Asked(0.8, 8, 0.9, 0.05),
    Asked(1.0, 300),
    Asked(1.0, 900, 0.95),
    Asked(0.05, 50, 0.9),
    Asked(1.0, 0, 0.9999),
    Asked(1.0, 0, 1e-9),
    Asked(5.0, 0, 0.95, 0.01),
]


def compare(samples, logits, asked, seeds):
    """Compare kept sets and tokens with float64; return the number of rows compared."""
    decided = 0
    for row, (one, seed) in enumerate(zip(asked, seeds, strict=True)):
        x = logits[row].float().numpy()
        mask, _, near = oracle.kept(x, one)
        if near < NEAR:
            continue
        got = x >= samples.cutoffs[row].item()
        assert (got & np.isfinite(x) == mask).all(), (row, one, got.sum(), mask.sum())
        token, gap = oracle.draw(x, one, seed, 3 * row)
        if gap > NEAR:
            assert samples.tokens[row].item() == token, (row, one)
            decided += 1
    return decided


@pytest.mark.parametrize("run", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kept_sets_and_tokens_are_those_of_float64(run, dtype):
    logits = torch.cat([shapes(1000, dtype)] * len(ASKED))
    asked = [one for one in ASKED for _ in range(12)]
    seeds = list(range(1000, 1000 + len(asked)))
    positions = [3 * row for row in range(len(asked))]
    samples = run(logits, *rows_of(asked, seeds, positions))
    assert not samples.errors.any()
    assert compare(samples, logits, asked, seeds) > 0.97 * len(asked)


@pytest.mark.parametrize("run", WAYS)
def test_the_same_at_a_vocabulary_of_152_thousand(run):
    base = torch.randn(2, 151_936)
    logits = torch.stack((base[0] * 4, base[1] * 0.7)).bfloat16().repeat_interleave(5, 0)
    asked = [Asked(), Asked(0.8, 50, 0.95), Asked(1.0, 0, 0.9), Asked(0.7, 0, 1.0, 0.1),
             Asked(1.0, 2000, 0.99)] * 2  # fmt: skip
    seeds = list(range(10))
    samples = run(logits, *rows_of(asked, seeds, [3 * row for row in range(10)]))
    assert compare(samples, logits, asked, seeds) >= 9


DRAWN = [
    Asked(),
    Asked(0.6),
    Asked(1.2, 9),
    Asked(1.0, 0, 0.8),
    Asked(0.9, 0, 1.0, 0.15),
    Asked(1.5, 12, 0.7, 0.05),
]


@pytest.mark.quick(3)
@pytest.mark.parametrize("asked", DRAWN, ids=str)
@pytest.mark.parametrize("by", ["seed", "position"])
def test_many_draws_follow_the_distribution(asked, by):
    logits = torch.randn(20, generator=torch.Generator().manual_seed(7)) * 1.5
    counts, chunk = np.zeros(20), 2000  # small enough for the cores' caches
    settings, keys = rows_of([asked] * chunk)
    for start in range(0, at_depth(100_000, 500_000), chunk):
        keys[:, 0 if by == "seed" else 1] = torch.arange(start, start + chunk)
        tokens = sample_tokens(logits.expand(chunk, 20), settings, keys).tokens
        counts += np.bincount(tokens.numpy(), minlength=20)
    mask, weights, _ = oracle.kept(logits.numpy(), asked)
    assert chi_square(counts, np.where(mask, weights, 0) / weights[mask].sum()) > 1e-4


@pytest.mark.quick(2)
@pytest.mark.parametrize("asked", DRAWN, ids=str)
def test_draws_of_the_kernel_follow_it_too_and_are_those_of_torch(asked):
    logits = (torch.randn(24) * 1.5).bfloat16()
    count = 4000
    rows = (logits.expand(count, 24).contiguous(), *rows_of([asked] * count, list(range(count))))
    samples, others = kernel()(*rows), sample_tokens(*rows)
    assert torch.equal(samples.tokens, others.tokens)
    assert torch.equal(samples.cutoffs, others.cutoffs)
    counts = np.bincount(samples.tokens.numpy(), minlength=24)
    mask, weights, _ = oracle.kept(logits.float().numpy(), asked)
    assert chi_square(counts, np.where(mask, weights, 0) / weights[mask].sum()) > 1e-4


def narrower(threads):
    """The spec with another number of threads per row."""

    def geometry(variant, sizes, gpu):
        whole = SPEC.geometry(variant, sizes, gpu)
        return LaunchGeometry(whole.grid, (threads, 1, 1), shared_bytes(sizes, threads))

    return replace(SPEC, geometry=geometry)


def test_no_output_depends_on_neighbours_position_padding_or_block_size():
    vocab, width = 1300, 20
    logits = shapes(vocab, torch.bfloat16)
    asked = [replace(ASKED[row], temperature=0.0 if row == 9 else ASKED[row].temperature)
             for row in range(12)]  # fmt: skip
    settings, keys = rows_of(asked, list(range(50, 62)), list(range(12)), report=width)
    alone = [
        kernel()(logits[i : i + 1], settings[i : i + 1], keys[i : i + 1], width=width)
        for i in range(12)
    ]
    runs = [kernel()] + [kernel(narrower(threads)) for threads in (32, 96, 256)]
    for trial in range(at_depth(36, 200)):
        chosen = torch.randint(0, 12, (1 + trial % 4,))
        gap = trial % 9
        padded = torch.full((len(chosen), vocab + gap), NAN, dtype=torch.bfloat16)
        padded[:, :vocab] = logits[chosen]
        samples = runs[trial % 4](padded[:, :vocab], settings[chosen], keys[chosen], width=width)
        for row, one in enumerate(chosen.tolist()):
            for name, got in samples.outputs().items():
                assert torch.equal(got[row], getattr(alone[one], name)[0]), (name, trial, one)


def edits_of(rows):
    """Edits from {token: (count, bias)} for each row."""
    tokens = [token for row in rows for token in row]
    counts, biases = zip(*[change for row in rows for change in row.values()], strict=True)
    ends = np.cumsum([len(row) for row in rows])
    spans = np.stack([ends - [len(row) for row in rows], ends], axis=1)
    return Edits(
        torch.tensor(spans, dtype=torch.int32),
        torch.tensor(tokens, dtype=torch.int32),
        torch.tensor(counts, dtype=torch.int32),
        torch.tensor(biases, dtype=torch.float32),
    )


@pytest.mark.parametrize("run", WAYS)
def test_a_bias_comes_first_then_repetition_frequency_and_presence(run):
    logits = torch.tensor([[4.0, 3.0, -2.0, 1.0, 0.5]]).repeat(5, 1)
    changes = {0: (2, 0.0), 2: (0, 1.0), 3: (-1, 2.5), 4: (1, -1.0)}
    # Token 0 is divided by 2, then loses twice 0.25 and once 0.5; token 3 is not penalised.
    wanted = [1.0, 3.0, -2.0, 3.5, -1.75]
    settings, keys = rows_of([Asked(top_k=k) for k in (0, 2, 3, 4, 0)], penalties=(2.0, 0.25, 0.5))
    settings[0, 0] = 0.0
    samples = run(logits, settings, keys, edits=edits_of([changes] * 5))
    assert samples.tokens[0].item() == 3
    assert samples.cutoffs[:4].tolist() == [3.5, *sorted(wanted)[::-1][1:4]]


@pytest.mark.parametrize("run", WAYS)
def test_masks_and_bans_leave_the_rest(run):
    vocab = 70
    logits, allowed = torch.randn(40, vocab), torch.rand(40, vocab) < 0.3
    allowed[:, 5] = True
    words = np.packbits(np.pad(allowed.numpy(), ((0, 0), (0, 26))), axis=1, bitorder="little")
    mask = torch.from_numpy(words.view(np.int32).copy())
    bans = [{int(t): (-1, -INF) for t in range(0, vocab, 2)} for _ in range(40)]
    rows = rows_of([Asked(3.0)] * 40, list(range(40)))
    samples = run(logits, *rows, mask=mask, edits=edits_of(bans))
    tokens = samples.tokens.tolist()
    assert all(allowed[row, token] and token % 2 for row, token in enumerate(tokens))
    assert len(set(tokens)) > 10
    only = run(logits, *rows_of([Asked(0.0)] * 40), mask=mask).tokens
    assert torch.equal(only.long(), logits.masked_fill(~allowed, -INF).argmax(-1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("run", WAYS)
def test_a_broken_row_is_flagged_and_the_others_are_as_they_were(run, dtype):
    vocab = 900
    logits = torch.randn(7, vocab).to(dtype)
    whole = logits.clone()
    logits[1, 400] = NAN
    logits[3, 899] = INF
    logits[5] = -INF
    asked = [ASKED[row] for row in range(7)]
    settings, keys = rows_of(asked, list(range(7)), report=2)
    samples = run(logits, settings, keys, width=3)
    assert samples.errors.tolist() == [0, 1, 0, 2, 0, 4, 0]
    wanted = run(whole, settings, keys, width=3)
    for name, got in samples.outputs().items():
        assert torch.equal(got[::2], getattr(wanted, name)[::2]), name
    assert samples.tokens[1::2].tolist() == [0, 0, 0]
    assert samples.top_tokens[1::2].unique().tolist() == [-1]


@pytest.mark.parametrize("run", WAYS)
def test_a_row_without_a_token_left_is_flagged(run):
    bans = [{t: (-1, -INF) for t in range(4)}, {0: (-1, -INF)}, {0: (3, 3e38)}]
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 2 + [[3e38, 1.0, 1.0, 1.0]])
    settings, keys = rows_of([Asked()] * 3)
    assert run(logits, settings, keys, edits=edits_of(bans)).errors.tolist() == [4, 0, 2]


@pytest.mark.parametrize("run", WAYS)
@pytest.mark.parametrize("vocab", [60, 2000])
def test_log_probabilities_are_plain_and_ties_go_to_the_lower_token(run, vocab):
    logits = (torch.randn(6, vocab) * 3).round()
    logits[4] = 0  # more equal logits than any list holds
    asked = [Asked(0.0), Asked(0.3, 5), Asked(1.0), Asked(2.0, 0, 0.5), Asked(0.0), Asked(1.0, 3)]
    bans = edits_of([{int(logits[row].argmax()): (-1, -INF)} for row in range(6)])
    for edits in (None, bans):
        settings, keys = rows_of(asked, list(range(6)), report=20)
        keys[1, 3], keys[2, 3] = 0, -1
        samples = run(logits, settings, keys, edits=edits, width=20)
        logprobs = logits.double().log_softmax(-1)
        order = logits.sort(descending=True, stable=True).indices
        for row, asked_for in enumerate(keys[:, 3].tolist()):
            if asked_for < 0:
                assert (samples.ranks[row], samples.logprobs[row]) == (0, 0)
                continue
            token = samples.tokens[row]
            assert samples.logprobs[row].item() == pytest.approx(
                logprobs[row, token].item(), abs=1e-5
            )
            assert samples.ranks[row] == 1 + (logits[row] > logits[row, token]).sum()
            wanted = order[row, :asked_for].tolist()
            assert samples.top_tokens[row].tolist() == wanted + [-1] * (20 - asked_for)
            likely = samples.top_logprobs[row, :asked_for].double()
            torch.testing.assert_close(likely, logprobs[row, wanted], rtol=0, atol=1e-5)


def test_tokens_that_cannot_win_the_race_are_skipped_and_the_kernel_agrees(monkeypatch):
    logits = torch.cat([shapes(300, torch.float32)] * 12)
    rows = rows_of([one for one in ASKED for _ in range(12)], list(range(144)))
    usual = sample_tokens(logits, *rows).tokens
    monkeypatch.setattr(reference, "_MANY", 0)
    assert torch.equal(sample_tokens(logits, *rows).tokens, usual)
    monkeypatch.setattr(reference, "_NEAR", 3.0)  # many arrivals are compared by their bits
    assert torch.equal(sample_tokens(logits, *rows).tokens, usual)
    assert torch.equal(kernel()(logits, *rows).tokens, usual)


def test_a_flat_row_that_does_not_fit_the_list_is_raced_as_a_whole():
    logits = torch.zeros(400, 1100)  # 1 in 70 has no low number, and late arrivals
    rows = rows_of([Asked()] * 400, list(range(400)))
    assert torch.equal(kernel()(logits, *rows).tokens, sample_tokens(logits, *rows).tokens)


def test_offsets_beyond_two_to_the_31st_element():
    stride, vocab = 2**31 + 24, 40
    sparse = mmap.MAP_PRIVATE | 0x4000  # MAP_NORESERVE: memory that is never touched costs nothing
    with mmap.mmap(-1, 2 * (stride + vocab) + 4096, sparse) as memory:
        flat = torch.frombuffer(memory, dtype=torch.bfloat16)
        logits = flat.as_strided((2, vocab), (stride, 1))
        logits[0], logits[1] = 0, 0
        logits[0, 3], logits[1, 7] = 5, 5
        samples = kernel()(logits, *rows_of([Asked(0.0)] * 2))
        assert samples.tokens.tolist() == [3, 7]
        del flat, logits


def test_noise_is_the_published_generator_and_known():
    assert oracle.splitmix((1234567 + oracle.GAMMA) & oracle.MASK) == 6457827717110365317
    settings, keys = rows_of([Asked()] * 8, list(range(8)), [5] * 8)
    keys[0, 0] = -7
    tokens = sample_tokens(torch.zeros(8, 50_000), settings, keys).tokens
    again = [int(oracle.exponentials(s, 5, 50_000).argmin()) for s in [-7, *range(1, 8)]]
    assert tokens.tolist() == again
    assert len(set(again)) == 8


def test_wrong_shapes_and_dtypes_are_refused():
    settings, keys = rows_of([Asked()] * 2)
    logits = torch.zeros(2, 40)
    for wrong in (
        (logits, settings[:1], keys),
        (logits, settings, keys[:, :3]),
        (logits, settings, keys, torch.zeros(2, 1, dtype=torch.int32)),
    ):
        with pytest.raises(ValueError, match="sample_tokens"):
            sample_tokens(*wrong)
    for wrong in (
        (logits.double(), settings, keys),
        (logits, settings.double(), keys),
        (logits, settings, keys.int()),
        (logits, settings, keys, torch.zeros(2, 2)),
    ):
        with pytest.raises(TypeError, match="sample_tokens"):
            sample_tokens(*wrong)


def test_logits_of_a_dtype_without_a_variant_are_converted_to_float32(monkeypatch):
    bound = []
    monkeypatch.setattr(
        functions,
        "call",
        lambda spec, **named: bound.append(spec.bind(spec.parameters.Arguments(**named))),
    )
    for dtype in (torch.float16, torch.float32, torch.bfloat16):
        sample_tokens(torch.zeros(2, 40, dtype=dtype), *rows_of([Asked()] * 2))
    types = [one.variant["logits_t"] for one in bound]
    assert types == ["float", "float", "kiln::bf16"]
    assert all(SPEC.has_variant(one.variant) for one in bound)


def test_the_reference_is_the_operator_of_a_cpu():
    a = SPEC.make_arguments({"logits_t": "float"}, SPEC.sizes[2], "cpu")
    assert SPEC.reference is reference.sample_reference
    torch.ops.kiln.sample_tokens(*a)
    for name, wanted in reference.sample_reference(a).items():
        assert torch.equal(getattr(a, name), wanted), name
    assert astuple(Asked()) == (1.0, 0, 1.0, 0.0)
