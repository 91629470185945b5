"""The parameters that the decode and prefill kernels share."""

from __future__ import annotations

from kiln.jit_kernels.declare.parameters import Arguments, derived, inputs, outputs

TENSORS = [*outputs("out", "lse"), *inputs("query", "key_pool", "value_pool", "block_table")]
STRIDES = derived(
    "int64",
    *("query_token", "query_head", "key_block", "key_head", "key_token"),
    *("value_block", "value_head", "value_token", "table_row"),
)


def strides_of(a: Arguments) -> dict[str, int]:
    """Return the strides that the kernels need, in elements."""
    query, keys, values = a.query.stride(), a.key_pool.stride(), a.value_pool.stride()
    return {
        "query_token": query[0],
        "query_head": query[1],
        "key_block": keys[0],
        "key_head": keys[1],
        "key_token": keys[2],
        "value_block": values[0],
        "value_head": values[1],
        "value_token": values[2],
        "table_row": a.block_table.stride(0),
    }
