"""Faults planted in step_inputs; see test_faults.py. Each must be caught."""

_STEP = {"kernel": "step_inputs", "needs": {}}

FAULTS = [
    _STEP
    | {
        "name": "no token kept for the slot",
        "old": "      token_pool[slot] = token;\n",
        "new": "",
    },
    _STEP
    | {
        "name": "new blocks read before they are written",
        "old": "    __syncthreads();\n    if (thread == 0) rejected",
        "new": "    if (thread == 0) rejected",
    },
    _STEP
    | {
        "name": "new blocks at the start of the row",
        "old": "blocks[own.num_blocks + i]",
        "new": "blocks[i]",
    },
    _STEP
    | {
        "name": "every token from the message",
        "old": ": t == 0          ? sampled[own.source - unknown]",
        "new": ": t == 0          ? message[own.tokens_at]",
    },
    _STEP
    | {
        "name": "the row taken for the source",
        "old": "sampled[own.source - unknown]",
        "new": "sampled[own.row]",
    },
    _STEP
    | {
        "name": "the last block of a request left out",
        "old": "i * block_size < length",
        "new": "(i + 1) * block_size < length",
    },
    _STEP
    | {
        "name": "a block too many copied",
        "old": "i * block_size < length",
        "new": "i * block_size <= length",
    },
    _STEP
    | {
        "name": "the first token sampled from",
        "old": "own.first + own.count - own.num_samples + i",
        "new": "own.first + i",
    },
    _STEP
    | {
        "name": "all drafts taken for accepted",
        "old": "const int start = own.start - unknown;",
        "new": "const int start = own.start;",
    },
    _STEP
    | {
        "name": "drafts subtracted where the host knows the start",
        "old": "own.num_given == 0 ? rejected[own.row] : 0",
        "new": "rejected[own.row]",
    },
    _STEP
    | {
        "name": "rejected drafts subtracted again in the next step",
        "old": "    if (thread == 0) rejected[own.row] = 0;\n",
        "new": "",
    },
    _STEP
    | {
        "name": "the token behind the last draft taken",
        "old": "sampled[own.source - unknown]",
        "new": "sampled[own.source]",
    },
    _STEP
    | {
        "name": "one seed number for all samples",
        "old": "(column == 1 ? i / kSettings - unknown : 0)",
        "new": "(column == 1 ? -unknown : 0)",
    },
    _STEP
    | {
        "name": "long requests rotated as short ones",
        "old": "positions[own.first + t] = position + own.rotary_start;",
        "new": "positions[own.first + t] = position;",
    },
    _STEP
    | {
        "name": "the start of the rotary table taken for one of the KV blocks",
        "old": "const int position = start + t;",
        "new": "const int position = start + t + own.rotary_start;",
    },
    _STEP
    | {
        "name": "another row's drafts",
        "old": "drafts[own.row * drafts_row + t - 1]",
        "new": "drafts[t - 1]",
    },
    _STEP
    | {
        "name": "the slots of padding left as they were",
        "old": "    slot_mapping[t] = -1;\n",
        "new": "",
    },
    _STEP
    | {
        "name": "padding in slot 0",
        "old": "slot_mapping[t] = -1;",
        "new": "slot_mapping[t] = 0;",
    },
    _STEP
    | {
        "name": "the tokens of padding left as they were",
        "old": "    token_ids[t] = 0;\n",
        "new": "",
    },
    _STEP
    | {
        "name": "the positions of padding left as they were",
        "old": "    positions[t] = 0;\n",
        "new": "",
    },
    _STEP
    | {
        "name": "the lengths of padding left as they were",
        "old": "    seq_lens[request] = 0;\n",
        "new": "",
    },
    _STEP
    | {
        "name": "the ends of padding left as they were",
        "old": "    cu_seqlens_q[request + 1] = used_tokens;\n",
        "new": "",
    },
    _STEP
    | {
        "name": "the samples of padding left as they were",
        "old": "    sample_rows[s] = 0;\n",
        "new": "",
    },
    _STEP
    | {
        "name": "the settings of padding left as they were",
        "old": "settings[s * kSettings + i] = i == 1",
        "new": "if (i > 6) settings[s * kSettings + i] = i == 1",
    },
    _STEP
    | {
        "name": "padding reports log-probabilities",
        "old": "i == 3 ? -1 : 0;",
        "new": "0;",
    },
    _STEP
    | {
        "name": "the first end not written",
        "old": "cu_seqlens_q[0] = 0;",
        "new": "{}",
    },
]
