"""The public function of the sampler, and the types that it takes and returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

from kiln.jit_kernels.declare.spec import SCALARS
from kiln.jit_kernels.ops.sampling.reference import KEYS, SETTINGS
from kiln.jit_kernels.ops.sampling.spec import LOGITS_TYPES, SAMPLE_TOKENS
from kiln.jit_kernels.ops.shared.shapes import as_rows, check_shape
from kiln.jit_kernels.torch_ops import call

_SINGLE = 5  # results of one number a row
MAX_VOCAB_WITH_EDITS = 8 * 36 * 1024  # the kernel keeps one bit per token in shared memory


@dataclass(frozen=True, slots=True)
class Edits:
    """Changes of single logits: the lists of all rows, concatenated. A row lists a token once.

    The edits of row r are the elements ``spans[r, 0]`` to ``spans[r, 1] - 1`` of the other lists;
    ``spans`` is [num_rows, 2], the others are [num_edits]; an element may belong to no row.
    ``biases`` float32 are added first; -inf bans a token. ``counts`` says how often the output
    contains the token. If it is at least 0, the repetition penalty applies; if it is at least 1,
    the frequency and presence penalties apply too. So 0 means a token of the prompt alone, and -1
    one of neither. All but ``biases`` are int32.
    """

    spans: torch.Tensor
    tokens: torch.Tensor
    counts: torch.Tensor
    biases: torch.Tensor


class Samples:
    """The results of a draw, by row. All are views of one int32 tensor, ``storage``.

    ``tokens`` int32 [num_rows]: the drawn token.
    ``errors`` int32 [num_rows]: 0, or NAN, INFINITE or NOTHING of the reference. The other results
    of such a row are 0, -1 in ``top_tokens`` and -inf in ``top_logprobs``.
    ``cutoffs`` float32 [num_rows]: the smallest logit, after edits, that could be drawn.
    ``logprobs`` float32 and ``ranks`` int32 [num_rows]: of the drawn token; ranks start at 1.
    ``top_tokens`` int32 and ``top_logprobs`` float32 [num_rows, width]: the likeliest tokens, the
    lower id first among equal ones; -1 and -inf from the number that the row asked for on.

    Log-probabilities and ranks are those of the softmax of the logits before edits, mask,
    temperature and filters. They are 0 in rows that did not ask for them.
    """

    def __init__(self, storage: torch.Tensor, rows: int) -> None:
        width = (storage.numel() // rows - _SINGLE) // 2 if rows else 0
        parts = iter(storage.split([rows] * _SINGLE + [rows * width] * 2))
        self.storage = storage
        self.tokens = next(parts)
        self.errors = next(parts)
        self.cutoffs = next(parts).view(torch.float32)
        self.logprobs = next(parts).view(torch.float32)
        self.ranks = next(parts)
        self.top_tokens = next(parts).view(rows, width)
        self.top_logprobs = next(parts).view(torch.float32).view(rows, width)

    @classmethod
    def empty(cls, rows: int, width: int, device: torch.device) -> Samples:
        """Return uninitialised results of ``rows`` rows with ``width`` likeliest tokens each."""
        return cls(torch.empty(cls.size_of(rows, width), dtype=torch.int32, device=device), rows)

    @staticmethod
    def size_of(rows: int, width: int) -> int:
        """Return the number of elements of the storage of such results."""
        return rows * (_SINGLE + 2 * width)

    def outputs(self) -> dict[str, torch.Tensor]:
        """Return the operator's outputs by name."""
        return {name: getattr(self, name) for name in SAMPLE_TOKENS.parameters.outputs}


def sample_tokens(
    logits: torch.Tensor,
    settings: torch.Tensor,
    keys: torch.Tensor,
    mask: torch.Tensor | None = None,
    edits: Edits | None = None,
    width: int = 0,
    out: Samples | None = None,
) -> Samples:
    """Draw a token for each row of logits [num_rows, vocab], bf16, fp16 or fp32.

    ``settings`` [num_rows, 6] float32: temperature (below 1e-5: greedy, the lowest id among equal
    logits), top_p, log(min_p), repetition, frequency and presence penalty. The neutral values are
    1, 1, -inf, 1, 0, 0. ``keys`` [num_rows, 4] int64: seed, position, top_k (0: no limit; 1:
    greedy), and the number of likeliest tokens to report, at most ``width``; 0 reports the
    log-probability of the drawn token alone, -1 none. ``mask`` [num_rows, ceil(vocab / 32)] int32:
    one bit per token, lowest bit first; 1 allows the token. ``out``, if given, gets the results; it
    has ``rows`` rows and ``width`` likeliest tokens.

    Edits and mask apply before the temperature, then top-k, then top-p over what top-k kept, then
    min-p. Tokens that are equal to a cutoff are kept. A row's result depends on that row alone.
    Its token wins a race of exponential variates, which are functions of seed, position and token
    id. Raises ValueError on a wrong shape, TypeError on a wrong dtype.
    Source: kernel_sources/sampling/sample_tokens.cu
    """
    rows, vocab = logits.shape
    if logits.dtype not in SCALARS:
        raise TypeError(f"sample_tokens: logits is {logits.dtype}; use bf16, fp16 or fp32")
    check_shape("sample_tokens", "settings", settings, (rows, len(SETTINGS)))
    check_shape("sample_tokens", "keys", keys, (rows, len(KEYS)))
    wanted = {"settings": (settings, torch.float32), "keys": (keys, torch.int64)}
    if mask is not None:
        check_shape("sample_tokens", "mask", mask, (rows, -(-vocab // 32)))
        wanted["mask"] = (mask, torch.int32)
    if edits is not None:
        check_shape("sample_tokens", "edits.spans", edits.spans, (rows, 2))
        for field in fields(edits):
            dtype = torch.float32 if field.name == "biases" else torch.int32
            wanted[f"edits.{field.name}"] = (getattr(edits, field.name), dtype)
    for name, (tensor, dtype) in wanted.items():
        if tensor.dtype != dtype or not tensor.is_contiguous():
            raise TypeError(f"sample_tokens: {name} must be contiguous {dtype}")
    if (mask is not None or edits is not None) and vocab > MAX_VOCAB_WITH_EDITS:
        raise ValueError(
            f"sample_tokens: mask and edits need a vocabulary of at most {MAX_VOCAB_WITH_EDITS} "
            f"tokens, not {vocab}"
        )
    samples = Samples.empty(rows, width, logits.device) if out is None else out
    call(
        SAMPLE_TOKENS,
        **samples.outputs(),
        logits=_dense(logits),
        settings=settings,
        keys=keys,
        mask=mask,
        **edit_arguments(edits),
    )
    return samples


def edit_arguments(edits: Edits | None) -> Mapping[str, torch.Tensor | None]:
    """Return the operator's arguments for some edits, by name; None for no edits."""
    return {
        f"edit_{field.name}": None if edits is None else getattr(edits, field.name)
        for field in fields(Edits)
    }


def _dense(logits: torch.Tensor) -> torch.Tensor:
    """Return logits of a dtype that the kernel supports, with the last dimension dense."""
    if SCALARS[logits.dtype] not in LOGITS_TYPES:
        logits = logits.float()
    rows = as_rows(logits)
    return logits.contiguous() if rows is None else rows
