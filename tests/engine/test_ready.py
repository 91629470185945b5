"""An engine that can serve says so to the kernels: what is compiled from then on is told."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from kiln.engine import worker
from kiln.engine.config import EngineConfig, KVConfig, ModelConfig
from kiln.engine.llm import LLM
from kiln.jit_kernels.ready import ready_guard

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
    with caplog.at_level(logging.WARNING, "kiln.jit_kernels.ready"):
        ready_guard().passes("rms_norm[bf16]", "compiled")
    return "rms_norm[bf16] is compiled after the engine was ready" in caplog.text


def test_an_offline_engine(caplog):
    assert not is_ready(caplog)
    LLM(DEMO, device="cpu", load_format="dummy", max_model_len=64, num_kv_blocks=8)
    assert is_ready(caplog)


def test_the_engine_process(caplog):
    model = ModelConfig(DEMO, device="cpu", load_format="dummy", max_model_len=64)
    worker.load_core(EngineConfig(model, KVConfig(num_blocks=8)), lambda stage, done, total: None)
    assert is_ready(caplog)
