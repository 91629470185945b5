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
        "old": "    __syncthreads();\n    for (int t = thread; t < own.count",
        "new": "    for (int t = thread; t < own.count",
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
        "old": "own.tokens_at < 0 ? sampled[own.source] : ",
        "new": "",
    },
    _STEP
    | {
        "name": "the row taken for the source",
        "old": "sampled[own.source]",
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
        "old": "own.first + own.count - 1;",
        "new": "own.first;",
    },
    _STEP
    | {
        "name": "requests that do not sample write a sample",
        "old": "if (own.sample >= 0) {",
        "new": "if (true) {",
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
