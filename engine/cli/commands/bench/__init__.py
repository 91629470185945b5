"""Measure Kiln, alone or beside other engines.

``latency``: the time of a decode step at several batch sizes. ``lora``: how much LoRA adapters add
to it. ``prefill``: prompt tokens per second by prompt length and token budget. ``offline``: output
tokens per second of many requests that arrive at once. ``serving``: the same and latencies over
HTTP. ``kernels``: each kernel's time, its fraction of the roofline, and the same for alternative
implementations.
"""

HELP = (
    "benchmark decode steps, LoRA adapters, prefill, throughput, serving over HTTP, or every kernel"
)
SUBCOMMANDS = {"title": "kinds", "metavar": "KIND", "dest": "kind"}
