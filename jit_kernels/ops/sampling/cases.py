"""The cases on which the sampler is tested and timed."""

from __future__ import annotations

import math
from typing import Any

import torch

from kiln.jit_kernels.declare.spec import DTYPES, Sizes, Variant
from kiln.jit_kernels.ops.sampling.noise import masses, weights
from kiln.jit_kernels.ops.sampling.reference import KEYS, SETTINGS, no_results

# (temperature, top_k, top_p, min_p, likeliest tokens to report) of the rows of a test, repeated.
_TESTED = (
    (0.0, 0, 1.0, 0.0, 3),
    (1.0, 0, 1.0, 0.0, -1),
    (0.7, 20, 0.9, 0.0, 0),
    (1.3, 0, 0.8, 0.0, 20),
    (0.8, 0, 1.0, 0.1, -1),
    (1.0, 300, 0.95, 0.02, 2),
    (0.5, 40, 1.0, 0.0, -1),
    (2.0, 0, 0.999, 0.0, 20),
    (1.0, 1, 1.0, 0.0, -1),
    (1.0, 7, 0.3, 0.5, 5),
    (3.0, 600, 1.0, 0.0, 0),
    (0.9, 0, 0.9, 0.05, 4),
    (1.0, 0, 0.9999999, 0.0, -1),  # the sum of the row's weights must be exact
)
_EDGE = (0.8, 0, 1.0, 0.0, -1)  # its top-p is replaced by top_p_at_an_edge
_UNFILTERED = ((8.0, 0, 1.0, 0.0, -1), (1.0, 0, 1.0, 0.0, -1))  # every token of a row may be drawn
_SERVED = {  # what a benchmark asks for
    1: (0.0, 0, 1.0, 0.0, -1),
    2: (1.0, 0, 1.0, 0.0, -1),
    3: (0.7, 0, 0.95, 0.0, -1),
    4: (0.7, 50, 0.95, 0.0, -1),
    5: (0.7, 50, 0.95, 0.0, 20),
    6: (1.0, 0, 0.95, 0.0, -1),  # keeps thousands of tokens: more than the kernel's list holds
}
_BENCHED = (  # key of _SERVED, whether there is a mask, edits per row; rows
    *((serve, 0, 0, (1, 8, 32, 128)) for serve in range(1, 6)),
    *(
        (serve, hides, edits, (1, 128))
        for serve, hides, edits in ((6, 0, 0), (3, 1, 0), (3, 1, 64))
    ),
)
_SPREADS = (3.0, 0.05, 8.0, 0.0, 1.0)  # of the logits: peaked, flat, very peaked, all equal

SIZES = [
    {"rows": rows, "vocab": vocab, "gap": gap, "width": width, "hides": hides, "edits": edits}
    for rows, vocab, gap, width, hides, edits in [
        (0, 64, 0, 0, 0, 0), (1, 1, 0, 1, 0, 0), (11, 100, 3, 20, 1, 7), (13, 700, 4, 5, 0, 0),
        (13, 1111, 1, 20, 1, 90), (13, 4104, 8, 20, 0, 0),
    ]
] + [
    {"rows": rows, "vocab": 1100, "gap": 4, "width": 0, "hides": hides, "edits": edits, "race": 1}
    for rows, hides, edits in ((100, 0, 0), (60, 1, 400))
] + [
    {"rows": 28, "vocab": 3000, "gap": 0, "width": 0, "hides": 0, "edits": 0, "edge": 1}
]  # fmt: skip
BENCH_SIZES = [
    {"rows": rows, "vocab": 131072, "width": 20, "hides": hides, "edits": edits, "serve": serve}
    for serve, hides, edits, counts in _BENCHED
    for rows in counts
]


def sampling_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return logits of several distributions and the settings of their rows.

    The settings are those of _SERVED under the key ``serve``; or, if the sizes have ``edge`` or
    ``race``, of _EDGE or _UNFILTERED; or else of _TESTED.
    """
    rows, vocab, serve = sizes["rows"], sizes["vocab"], sizes.get("serve", 0)
    logits = torch.randn(rows, vocab + sizes.get("gap", 0), device=device)
    if serve:  # like a model's: one token in a hundred stands out
        logits = logits.mul_(2) + 8 * (torch.rand_like(logits) < 0.01) * torch.rand_like(logits)
        asked = [_SERVED[serve]] * rows
    else:
        spreads = torch.tensor([_SPREADS[row % len(_SPREADS)] for row in range(rows)])
        logits = logits.mul_(spreads.to(device).unsqueeze(1))
        asked = [_EDGE] if sizes.get("edge") else list(_UNFILTERED if "race" in sizes else _TESTED)
        asked = [asked[row % len(asked)] for row in range(rows)]
    logits = logits.to(DTYPES[variant["logits_t"]])[:, :vocab]
    neutral = [1.0, 0.0, 0.0] if serve else [1.2, 0.3, 0.5]
    settings = [[t, p, math.log(m) if m else -math.inf, *neutral] for t, _, p, m, _ in asked]
    keys = [[row * 77 - 3, row * 5, one[1], one[4]] for row, one in enumerate(asked)]
    if sizes.get("edge"):
        for row, of_row in enumerate(settings):
            of_row[1] = top_p_at_an_edge(logits[row], of_row[0], row)
    mask = None
    edits: dict[str, torch.Tensor | None] = dict.fromkeys(
        ("edit_spans", "edit_tokens", "edit_counts", "edit_biases")
    )
    if sizes["hides"]:
        words = torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), device=device)
        mask = (words | torch.randint_like(words, 2**31)).int()
        edits.update(_random_edits(rows, vocab, sizes["edits"], device))
    return {
        **no_results(rows, sizes["width"], torch.device(device)),
        "logits": logits,
        "settings": torch.tensor(settings, device=device).view(rows, len(SETTINGS)),
        "keys": torch.tensor(keys, device=device, dtype=torch.int64).view(rows, len(KEYS)),
        "mask": mask,
        **edits,
    }


def top_p_at_an_edge(row: torch.Tensor, temperature: float, number: int) -> float:
    """Return a top-p at which one more token is kept, or one a few float32 steps away from it.

    Only an exact sum of the weights of ``row`` [vocab] gives the right cutoff. ``number`` chooses
    the token and the distance.
    """
    scale = torch.tensor(1.44269504) / temperature
    values, places = row.float().unique(return_inverse=True)
    mass = torch.zeros(len(values), dtype=torch.int64, device=row.device)
    mass.index_add_(0, places, masses(weights(row.float(), row.max().float(), scale)))
    shares = mass.flip(0).cumsum(0).double() / mass.sum()
    edge = float(shares[(shares < (0.5, 0.8, 0.9, 0.97)[number % 4]).sum()].float())
    return edge + (number // 4 - 3) * 2.0**-24


def _random_edits(rows: int, vocab: int, count: int, device: str) -> dict[str, torch.Tensor]:
    tokens = [torch.randperm(vocab, device=device)[:count] for _ in range(rows)]
    total = rows * count
    starts = torch.arange(rows, device=device, dtype=torch.int32) * count
    biases = torch.randn(total, device=device).mul_(4)
    biases[::5] = -math.inf
    return {
        "edit_spans": torch.stack([starts, starts + count], dim=1),
        "edit_tokens": torch.cat(tokens or [torch.empty(0, device=device)]).int(),
        "edit_counts": torch.randint(-1, 4, (total,), device=device, dtype=torch.int32),
        "edit_biases": biases,
    }
