"""Engines whose ranks sum by Kiln's kernels answer with the tokens of transformers."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest
import torch
from depth import at_depth
from rank_programs import run_program

from kiln.engine.distributed.group import Group
from kiln.jit_kernels.ops.all_reduce.layout import ALGORITHMS

PROMPTS = [[1, 9, 3], [4, 5, 6, 7, 8, 9, 10]]
WORLDS = at_depth([2], [2, 4])
SUMS = at_depth(["auto"], ["auto", *ALGORITHMS])
FUSED = "fused_all_reduce_add_rms_norm"


@pytest.fixture(scope="module")
def made(model_of):
    return model_of("sums", "Llama")


@pytest.fixture(scope="module")
def results(made):
    """Return what each engine of the program answered, and counted."""
    here = Path(__file__).with_name("token_cases.py")
    return run_program(here, str(made[0]), *map(json.dumps, (PROMPTS, WORLDS, SUMS)))


@pytest.mark.parametrize("algorithm", SUMS)
@pytest.mark.parametrize("world", WORLDS)
def test_tokens_are_those_of_transformers_for_each_algorithm(made, results, world, algorithm):
    found = results[f"{world} {algorithm}"]
    assert found["tokens"] == [answer(made[1], prompt) for prompt in PROMPTS]
    used = FUSED if algorithm == "auto" else algorithm
    assert set(found["sums"]) == {used}  # the metrics show these
    assert found["sums"][used] >= 30  # five sums a step, one of them the trial step
    assert found["kernels"].startswith("host: access over shared memory is proven")


def names_of_groups_made_at_once(count: int) -> list[str]:
    """Return the names of groups that threads make at the same time."""
    together, made = threading.Barrier(count), []

    def make() -> None:
        together.wait()
        made.append(Group(0, 2, torch.device("cpu")))

    threads = [threading.Thread(target=make) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [group.name for group in made]


@pytest.mark.usefixtures("in_threads")
def test_where_no_kernel_can_sum_the_engine_says_why(made, llm_of):
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # two ranks that share a group wait for each other for ever
    try:
        assert all(len(set(names_of_groups_made_at_once(8))) == 8 for _ in range(50))
    finally:
        sys.setswitchinterval(before)
    llm = llm_of(made[0], 2)
    assert llm.core.runner.loaded.kernels["all_reduce"] == (
        "torch, by gloo: rank 0, 1: on a CPU it needs KILN_CPU_KERNELS=host"
    )


@pytest.mark.parametrize("algorithm", at_depth(["auto"], ["auto", "two_shot"]))
def test_graphs_contain_the_sums(results, algorithm):
    assert results[f"2 {algorithm}"]["replays"] > 0
    assert results[f"2 {algorithm}"]["graphs_left"] == 0, "NCCL would wait for them"


def test_a_sum_that_a_rank_leaves_out_ends_the_engine_and_is_named(results):
    found = results["skipped"]
    assert found["error"].startswith("DeviceError: rank 1 of 2")
    assert "rank 0 waited in vain for rank 1" in found["error"]
    assert found["seconds"] < 20
    assert found["closed"] < 20


def answer(model, prompt):
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False
        )
    return out[0, len(prompt) :].tolist()
