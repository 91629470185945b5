"""Faults planted in propose_ngram and verify_chain; see test_faults.py. Each must be caught."""

_VERIFY = {"kernel": "verify_chain", "needs": {}}
_NGRAM = {"kernel": "propose_ngram", "needs": {}}

FAULTS = [
    _VERIFY
    | {
        "name": "a draft that stands behind one that does not",
        "old": "while (accepted < drafts && sampled[own.sample + accepted] == draft[accepted]) "
        "++accepted;",
        "new": "for (int i = 0; i < drafts; ++i) accepted += sampled[own.sample + i] == draft[i];",
    },
    _VERIFY
    | {
        "name": "the wrong tokens taken for drafts",
        "old": "own.first + own.count - drafts;",
        "new": "own.first;",
    },
    _VERIFY
    | {
        "name": "rows without drafts cleared",
        "old": "  if (drafts < 1) return;\n",
        "new": "",
    },
    _NGRAM
    | {
        "name": "the newest token matched with itself",
        "old": "size + i < last",
        "new": "size + i <= last",
    },
    _NGRAM
    | {
        "name": "the first match instead of the last",
        "old": "uint32_t(position + 1))",
        "new": "uint32_t(last - position))",
    },
    _NGRAM
    | {
        "name": "a later match before a longer one",
        "old": "best = max(best, uint32_t(length) << kLengthAt |",
        "new": "best = max(best, 1u << kLengthAt |",
    },
    _NGRAM
    | {
        "name": "matches that are too short",
        "old": "      if (length >= prompt_lookup_min)\n",
        "new": "",
    },
    _NGRAM
    | {
        "name": "matches of more tokens than asked for",
        "old": "length < prompt_lookup_max && length <= position",
        "new": "length < kMaxNgram && length <= position",
    },
    _NGRAM
    | {
        "name": "tokens ahead of the row compared",
        "old": "length <= position &&",
        "new": "true &&",
    },
    _NGRAM
    | {
        "name": "a thread stops at any match",
        "old": "whole = length == prompt_lookup_max;",
        "new": "whole = length >= prompt_lookup_min;",
    },
    _NGRAM
    | {
        "name": "a thread goes from the start to the end",
        "old": "<< ((kAtOnce - 1 - v) * Tokens::kSize + i)",
        "new": "<< ((kAtOnce - 1 - v) * Tokens::kSize + Tokens::kSize - 1 - i)",
    },
    _NGRAM
    | {
        "name": "vectors of earlier tokens left out",
        "old": "at >= 0 && !whole",
        "new": "at >= 4 && !whole",
    },
    _NGRAM
    | {
        "name": "rejected drafts taken for history",
        "old": "last = seq_lens[request] - wrong;",
        "new": "last = seq_lens[request];",
    },
    _NGRAM
    | {
        "name": "the sample behind the last draft taken",
        "old": "own.num_samples - 1 - wrong]",
        "new": "own.num_samples - 1]",
    },
    _NGRAM
    | {
        "name": "drafts go on behind the newest token",
        "old": "behind + i % (last + 1 - behind)",
        "new": "behind + i",
    },
    _NGRAM
    | {
        "name": "the newest token read from the pool",
        "old": "position == last ? newest : ",
        "new": "",
    },
    _NGRAM
    | {
        "name": "drafts of another row",
        "old": "drafts[own.row * drafts_row + i]",
        "new": "drafts[request * drafts_row + i]",
    },
    _NGRAM
    | {
        "name": "drafts counted without a match",
        "old": "found ? wanted : 0",
        "new": "wanted",
    },
    _NGRAM
    | {
        "name": "the number of a row without drafts left as it was",
        "old": "    if (thread == 0) num_drafts[own.row] = 0;\n",
        "new": "",
    },
    _NGRAM
    | {
        "name": "drafts behind a part of a prompt",
        "old": "own.num_samples > 0 ? ",
        "new": "own.num_samples >= 0 ? ",
    },
    _NGRAM
    | {
        "name": "wanted drafts where the message lists none",
        "header": "kiln/step/message.cuh",
        "old": "message[kWanted] ? message",
        "new": "true ? message",
    },
    _NGRAM
    | {
        "name": "padding taken for requests",
        "old": "  if (request >= message[0]) return;\n",
        "new": "",
    },
    _NGRAM
    | {
        "name": "the suffix read before it is written",
        "old": "  __syncthreads();\n\n",
        "new": "\n",
    },
    _NGRAM
    | {
        "name": "the best match read while it is sought",
        "old": "atomicMax(&found, best);\n  __syncthreads();",
        "new": "atomicMax(&found, best);",
    },
    _NGRAM
    | {
        "name": "the best match not found atomically",
        "old": "atomicMax(&found, best);",
        "new": "found = max(found, best);",
    },
    _NGRAM
    | {
        "name": "vectors across blocks",
        "old": "block_size % Tokens::kSize == 0 && ",
        "new": "",
    },
    _NGRAM
    | {
        "name": "vectors ahead of the row taken for others",
        "old": "at >= v * threads && ",
        "new": "",
    },
]
