"""The message that describes a step: a header, a record for each request, then lists."""

from __future__ import annotations

import numpy as np

HEADER = 4  # int32 words: requests, tokens, samples, place of the wanted drafts (0: none)
WANTED = 3  # the last of them; at that place is a number for each request, see propose_ngram
# Record of kernel_sources/include/kiln/step/message.cuh, where each field is explained.
SINGLE = (
    "row", "start", "count", "first", "tokens_at", "num_given", "source", "blocks_at", "num_blocks",
    "num_new", "sample", "num_samples", "rotary_start",
)  # fmt: skip
RECORD = np.dtype(
    [
        *((name, "<i4") for name in SINGLE),
        ("settings", "<f4", 6),  # the columns of sample_tokens' settings
        ("keys", "<i8", 4),  # the columns of sample_tokens' keys
    ],
    align=True,  # as in C
)
RECORD_WORDS = RECORD.itemsize // 4


def message_words(requests: int, listed: int) -> int:
    """Return the size of a message in int32 words; ``listed``: tokens plus new blocks."""
    return HEADER + requests * RECORD_WORDS + listed


def records_of(message: np.ndarray, requests: int) -> np.ndarray:
    """Return the records of a message [words] int32 as a view, [requests] of RECORD."""
    return message[HEADER : HEADER + requests * RECORD_WORDS].view(RECORD)


def begin_message(message: np.ndarray, counts: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Write the header and the records' counts, first tokens and samples; return the records.

    message: [words] int32; counts, samples: [requests] int32, the tokens and samples of each
    request.
    """
    requests = len(counts)
    message[:HEADER] = (requests, counts.sum(), samples.sum(), 0)
    records = records_of(message, requests)
    records["count"] = counts
    records["first"] = counts.cumsum() - counts
    records["sample"] = samples.cumsum() - samples
    records["num_samples"] = samples
    return records
