"""An engine that can serve says so to the kernels: what is compiled from then on is told."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
import torch

from kiln.engine.config import EngineConfig, KVConfig, ModelConfig
from kiln.engine.errors import ModelError
from kiln.engine.llm import LLM
from kiln.engine.process import worker
from kiln.engine.runner import executor
from kiln.jit_kernels.compile.ready import ready_guard

DEMO = str(Path(__file__).parents[2] / "engine" / "demo")


@pytest.fixture(autouse=True)
def _fresh():
    threads = torch.get_num_threads()  # a worker sets them
    ready_guard.cache_clear()
    yield
    ready_guard.cache_clear()
    torch.set_num_threads(threads)


def is_ready(caplog):
    caplog.clear()
    with caplog.at_level(logging.WARNING, "kiln.jit_kernels.compile.ready"):
        ready_guard().passes("rms_norm[bf16]", "compiled")
    return "rms_norm[bf16] is compiled after the engine was ready" in caplog.text


def offline():
    return LLM(DEMO, device="cpu", load_format="dummy", max_model_len=64, num_kv_blocks=8).core


def engine_process():
    model = ModelConfig(DEMO, device="cpu", load_format="dummy", max_model_len=64)
    return worker.load_core(EngineConfig(model, KVConfig(num_blocks=8)), lambda *_: None)[0]


@pytest.mark.parametrize("start", [offline, engine_process])
def test_an_engine_tries_a_step_before_it_is_ready(monkeypatch, caplog, start):
    def broken(*args, **more):
        raise ValueError("no sampler")

    monkeypatch.setattr(executor, "sample", broken)
    with pytest.raises(ModelError, match=r"first step failed: .*ValueError: no sampler"):
        start()
    assert not is_ready(caplog)


@pytest.mark.parametrize("start", [offline, engine_process])
def test_the_step_that_was_tried_leaves_no_trace(start):
    counts = dataclasses.asdict(start().stats())
    assert counts.pop("kv_blocks_total") == 8
    assert [value for value in counts.values() if value] == []


@pytest.mark.parametrize("start", [offline, engine_process])
def test_an_engine_that_was_made_is_ready(caplog, start):
    assert not is_ready(caplog)
    start()
    assert is_ready(caplog)
