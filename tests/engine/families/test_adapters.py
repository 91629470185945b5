"""Adapters on every family: the answers are PEFT's."""

from __future__ import annotations

from functools import cache

import pytest
from depth import at_depth
from tiny.model import all_tiny
from tiny_adapters import adapt, check
from tiny_answers import serve

GRAPHS = {"KILN_CPU_GRAPHS": "emulate", "KILN_GRAPH_STRICT": "1", "KILN_GRAPH_VERIFY": "off"}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """Return a function from a tiny model's name to its folder, adapters, and logits with each."""
    return cache(lambda name: adapt(name, tmp_path_factory.mktemp(name)))


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", all_tiny())
def test_adapters_are_pefts(adapted, name):
    folder, adapters, logits = adapted(name)
    check(serve(folder, lora_modules=adapters, max_loras=2), logits)


@pytest.mark.parametrize("name", at_depth([], list(all_tiny())))
def test_adapters_in_graphs_by_host_kernels(adapted, environment, name):
    environment(KILN_CPU_KERNELS="host", **GRAPHS)
    folder, adapters, logits = adapted(name)
    sizes = {"max_num_batched_tokens": 48, "enable_cudagraph_gc": True, "cuda_graph_bs": [4]}
    check(serve(folder, lora_modules=adapters, **sizes), logits)
