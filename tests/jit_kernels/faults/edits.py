"""Faults planted in token_edits and ban_words; see test_faults.py. Each must be caught."""

_EDITS = {"kernel": "token_edits", "needs": {}}
_WORDS = {"kernel": "ban_words", "needs": {}}

FAULTS = [
    _EDITS
    | {
        "name": "fixed tokens listed while others are counted",
        "old": "listed = job.num_fixed;\n    __syncthreads();",
        "new": "listed = job.num_fixed;",
    },
    _EDITS
    | {
        "name": "others listed while fixed tokens are",
        "old": "    }\n    __syncthreads();\n    for (int i = thread; i < length",
        "new": "    }\n    for (int i = thread; i < length",
    },
    _EDITS
    | {
        "name": "the end of a row written while it is listed",
        "old": "    __syncthreads();\n    if (thread == 0) spans",
        "new": "    if (thread == 0) spans",
    },
    _EDITS
    | {
        "name": "tokens of the prompt counted as output",
        "old": "if (i < job.prompt) atomicOr(&own[token_at(i)], kPrompt);\n      else ",
        "new": "",
    },
    _EDITS
    | {
        "name": "counts left behind for the next row",
        "old": "const uint32_t count = atomicExch(&own[token], 0u);",
        "new": "const uint32_t count = atomicAdd(&own[token], 0u);",
    },
    _WORDS
    | {
        "name": "one token of a word not compared",
        "old": "i < word.size - 1",
        "new": "i < word.size - 2",
    },
    _WORDS
    | {
        "name": "words that are longer than the history",
        "old": "  if (begin < 0) return;\n",
        "new": "",
    },
    _WORDS
    | {
        "name": "an element of the mask changed by several threads",
        "old": "atomicAnd(element, ~(1u << token % 32))",
        "new": "*element &= ~(1u << token % 32)",
    },
]
