"""The engines behind one interface: Kiln, transformers, and vLLM in a process of its own."""

from __future__ import annotations

import json
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kiln.engine.bench import choice, device_time, in_process
from kiln.engine.bench.engine import BenchError
from kiln.engine.bench.kiln_engine import KilnEngine, MustFit
from kiln.engine.bench.lora_adapters import RandomAdapter
from kiln.engine.bench.vllm_engine import VLLMEngine, llm_keywords, require_vllm
from kiln.engine.config import (
    EngineConfig,
    KVConfig,
    LoRAConfig,
    LoRAModule,
    ModelConfig,
    SchedulerConfig,
)
from kiln.engine.errors import ConfigError

DEMO = Path(__file__).resolve().parents[3] / "engine" / "demo"
PROMPTS, LENGTHS = [[5] * 10, [6] * 4, [7] * 3], [4, 6, 3]
FAKE_VLLM = """
import json, os, pathlib, sys
from types import SimpleNamespace
__version__ = "0.0"
print("a line of the log")  # vLLM writes to stdout, too

class SamplingParams:
    def __init__(self, *, temperature, ignore_eos, max_tokens, detokenize):
        assert (temperature, ignore_eos, detokenize) == (0, True, False)
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, model, seed, skip_tokenizer_init, **others):
        assert "kernels" not in sys.modules and sys.path[0] != os.path.dirname(sys.argv[0])
        if seed == 13:
            raise RuntimeError("no such luck")
        self.lora = {name: value for name, value in others.items() if "lora" in name}
        budget = others.get("max_num_batched_tokens", "its own")
        config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=budget))
        self.llm_engine = SimpleNamespace(vllm_config=config)

    def generate(self, prompts, params, use_tqdm, **lora):
        asked = {name: [one and vars(one) for one in each] for name, each in lora.items()}
        (pathlib.Path(__file__).parent / "asked.json").write_text(json.dumps([self.lora, asked]))
        print("generating", flush=True)
        if prompts[0]["prompt_token_ids"] == [13]:
            os._exit(7)
        tokens = [[0] * one.max_tokens for one in params]
        if len(prompts) == 1:
            tokens[0].pop()
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=one)]) for one in tokens]
"""


FAKE_LORA_REQUEST = """
class LoRARequest:
    def __init__(self, lora_name, lora_int_id, lora_path):
        self.name, self.id, self.path = lora_name, lora_int_id, lora_path
"""


def config(**model):
    small = ModelConfig(str(DEMO), **{"device": "cpu", "max_model_len": 64, **model})
    return EngineConfig(small, KVConfig(num_blocks=64))


@pytest.fixture
def python(tmp_path):
    """An interpreter that has something called vllm, and Kiln's folder of modules nowhere."""
    (tmp_path / "vllm" / "lora").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text(FAKE_VLLM)
    (tmp_path / "vllm" / "lora" / "request.py").write_text(FAKE_LORA_REQUEST)
    (tmp_path / "torch.py").write_text('__version__ = "9"')
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)


def test_kiln_generates_ids_without_a_tokenizer(monkeypatch):
    engine = KilnEngine(config(load_format="dummy"), lambda text: None, MustFit(3, 16))
    assert engine.run(PROMPTS, LENGTHS) > 0
    assert engine.load_seconds > 0
    assert engine.step_details(PROMPTS, 1, 1) == {}  # a CPU has no device time
    assert engine.device_ms(PROMPTS, LENGTHS) is None
    ran = []
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_on_gpu", True)
        patch.setattr(device_time, "_spans_during", lambda run: ran.append(run()) or [(0, 1500)])
        assert engine.device_ms(PROMPTS, LENGTHS) == pytest.approx(1.5)
    assert ran[0] > 0
    assert (engine.token_budget, engine.own_budget) == (2048, True)
    runner = weakref.ref(engine._llm.core.runner)
    engine.close()
    assert runner() is None  # its memory is free for the next engine


def test_requests_that_do_not_fit_the_pool_together_are_refused():
    small = EngineConfig(config().model, KVConfig(num_blocks=5), SchedulerConfig(max_num_seqs=8))
    with pytest.raises(ConfigError, match=r"3 requests of 17 tokens need 6 KV blocks, .* has 5"):
        KilnEngine(small, lambda text: None, MustFit(3, 17))


def test_static_batches_run_in_turn_and_the_choice_says_which():
    def baseline(config, **more):
        kiln, other = choice.kiln_and("transformers", "", config, print, **more).items()
        assert (kiln[0], other[0]) == ("kiln", "transformers")
        return other[1]()

    engine = baseline(config(load_format="dummy"))
    assert engine.name == "transformers, static batches"
    assert engine.run(PROMPTS, LENGTHS) > 0
    engine.close()
    pair = EngineConfig(config().model, scheduler=SchedulerConfig(max_num_seqs=2))
    engine = baseline(pair, mixed=True)  # with the checkpoint's weights
    assert engine.name == "transformers, static batches of 2"
    assert engine.run(PROMPTS, LENGTHS) > 0
    assert engine.step_details(PROMPTS, 1, 1) == {}
    engine.close()
    forms = {form: choice.kiln_and("vllm", "", pair, print) for form in ("", " again")}
    assert list(choice.by_product(forms)) == ["kiln", "kiln again", "vllm", "vllm again"]
    assert list(choice.kiln_and("none", "", pair, print)) == ["kiln"]


def test_continuous_batching_gives_every_request_its_own_length(monkeypatch):
    import transformers

    from kiln.engine.bench import transformers_engine

    mixin = transformers.GenerationMixin
    start = mixin.init_continuous_batching
    small = transformers.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    monkeypatch.setattr(
        mixin,
        "init_continuous_batching",
        lambda self, **asked: start(self, continuous_batching_config=small, **asked),
    )
    engine = transformers_engine.ContinuousBatches(config(load_format="dummy"))
    try:
        assert engine.run(PROMPTS, LENGTHS) > 0
        assert engine.run(PROMPTS[:2], LENGTHS[:2]) > 0
    finally:
        engine.close()


def test_transformers_gets_what_is_merged_into_the_config():
    from kiln.engine.bench import transformers_engine

    for load_format in ("dummy", "auto"):
        asked = config(load_format=load_format, hf_overrides='{"rms_norm_eps": 0.5}')
        engine = transformers_engine.StaticBatches(asked)
        assert engine._model.config.rms_norm_eps == 0.5
        assert engine._model.config.hidden_size == 192
        engine.close()


def test_vllm_runs_in_its_own_interpreter(python):
    limits = SchedulerConfig(max_num_batched_tokens=2048)
    engine = VLLMEngine(replace(config(), scheduler=limits), python)
    assert engine.versions == {"vllm": "0.0", "vllm's torch": "9"}
    assert engine.load_seconds >= 0
    assert (engine.token_budget, engine.own_budget) == (2048, False)
    assert engine.device_ms(PROMPTS, LENGTHS) is None
    assert engine.run(PROMPTS, LENGTHS) >= 0
    assert engine.step_details(PROMPTS, 1, 1) == {}
    with pytest.raises(BenchError, match=r"vllm: 1 of 1 requests .* such as 3 instead of 4"):
        engine.run(PROMPTS[:1], LENGTHS[:1])
    with pytest.raises(BenchError, match=r"its process ended\n(?s:.*)a line of the log") as raised:
        engine.run([[13], [13]], [1, 1])
    assert "generating" in str(raised.value)
    engine.close()
    with pytest.raises(BenchError, match="RuntimeError: no such luck"):
        VLLMEngine(config(seed=13), python)
    engine = VLLMEngine(config(), python)
    assert (engine.token_budget, engine.own_budget) == ("its own", True)
    engine.close()


def test_vllm_gets_the_limits_and_dtypes_of_kiln():
    wanted = EngineConfig(
        ModelConfig(str(DEMO), dtype="float16", device="cpu", max_model_len=99, seed=5),
        KVConfig(gpu_memory_utilization=0.7, kv_cache_dtype="fp8"),
        SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=77),
    )
    assert llm_keywords(wanted) == {
        "model": str(DEMO),
        "load_format": "auto",
        "skip_tokenizer_init": True,
        "dtype": "float16",
        "kv_cache_dtype": "fp8",
        "max_model_len": 99,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 77,
        "gpu_memory_utilization": 0.7,
        "enable_prefix_caching": False,
        "seed": 5,
    }
    at_load = replace(wanted, model=replace(wanted.model, quantization="fp8"))
    assert llm_keywords(at_load) == {**llm_keywords(wanted), "quantization": "fp8"}
    given = replace(wanted, model=replace(wanted.model, hf_overrides='{"rms_norm_eps": 0.5}'))
    assert llm_keywords(given) == {**llm_keywords(wanted), "hf_overrides": {"rms_norm_eps": 0.5}}


def test_vllm_loads_as_many_adapters_as_kiln_and_gets_the_same_for_each_request(python, tmp_path):
    modules = tuple(LoRAModule(name, str(DEMO / "adapters")) for name in ("a", "b", "c"))
    adapted = replace(config(), lora=LoRAConfig(modules, max_lora_rank=17))
    engine = VLLMEngine(adapted, python)
    assert (engine.name, engine.product, engine.adapters) == (
        "vllm with LoRA",
        "vllm",
        ("a", "b", "c"),
    )
    wanted = {"enable_lora": True, "max_loras": 3, "max_cpu_loras": 3, "max_lora_rank": 32}
    for adapters, numbers in ((["c", "a", None], [3, 1, None]), (None, None)):
        assert engine.run(PROMPTS, LENGTHS, adapters) >= 0
        keywords, asked = json.loads((tmp_path / "vllm" / "asked.json").read_text())
        assert keywords == wanted
        if numbers is None:
            assert asked == {}
            continue
        assert [one and one["id"] for one in asked["lora_request"]] == numbers
        assert [one and one["name"] for one in asked["lora_request"]] == adapters
        assert {one["path"] for one in asked["lora_request"] if one} == {str(DEMO / "adapters")}
    engine.close()
    largest = replace(config(), lora=LoRAConfig(modules, max_lora_rank=1000))
    assert llm_keywords(largest)["max_lora_rank"] == 1000  # vLLM's own error says what it takes


def test_kiln_runs_the_adapters_that_it_is_asked_for_and_frees_them(tmp_path):
    plain = config(load_format="dummy")
    adapter = RandomAdapter.of_model(DEMO, 4, torch.float32)
    adapter.save(tmp_path)
    engine = KilnEngine(adapter.configure(plain, tmp_path, 3), lambda text: None, MustFit(3, 16))
    assert (engine.name, engine.product) == ("kiln with LoRA", "kiln")
    assert "torch_native" in engine.lora_backend
    names = engine.adapters
    assert names == ("adapter-1", "adapter-2", "adapter-3")

    def tokens():
        return engine._llm.core.stats().adapter_tokens

    engine.run(PROMPTS, LENGTHS)
    assert tokens() == dict.fromkeys(names, 0)
    engine.run(PROMPTS, LENGTHS, [names[0], None, names[2]])
    # Every adapter has room of its own on the device, although one folder holds them all.
    store = engine._llm.core.runner.adapter_store
    assert store.size >= 3 * adapter.num_bytes // 4
    runner = weakref.ref(engine._llm.core.runner)
    assert [count > 0 for count in tokens().values()] == [True, False, True]
    del store
    engine.close()
    assert runner() is None
    without = KilnEngine(plain, lambda text: None)
    assert (without.name, without.adapters, without.lora_backend) == ("kiln", (), None)
    without.close()


def test_the_profiled_steps_have_the_adapters_of_the_timed_ones(tmp_path, monkeypatch):
    adapter = RandomAdapter.of_model(DEMO, 2, torch.float32)
    adapter.save(tmp_path)
    base = config(load_format="dummy")
    engine = KilnEngine(adapter.configure(base, tmp_path, 2), lambda text: None)
    grown = []

    def profiled(core, steps):
        before = core.stats().adapter_tokens
        for _ in range(steps):
            core.step()
        after = core.stats().adapter_tokens
        grown.append({name: after[name] - before[name] for name in after})
        return [(0, 1000)] * 3

    monkeypatch.setattr(device_time, "_profiled", profiled)
    monkeypatch.setattr(engine, "_on_gpu", True)
    work = engine.step_details(PROMPTS, 2, 4, ["adapter-1", None, "adapter-1"])
    assert work == pytest.approx({"device_ms": 1 / 4, "device_launches": 3 / 4})
    assert grown == [{"adapter-1": 2 * steps, "adapter-2": 0} for steps in (2, 4)]
    monkeypatch.undo()
    engine.close()


def test_without_vllm_or_its_gpu_the_error_says_so(python, tmp_path):
    with pytest.raises(ConfigError, match=r"has no package vllm.*--baseline-python"):
        require_vllm(sys.executable, "cpu")
    with pytest.raises(ConfigError, match="nobody: it does not run"):
        require_vllm(str(tmp_path / "nobody"), "cpu")
    with pytest.raises(ConfigError, match="--device cpu: vLLM runs on the first GPU"):
        require_vllm(python, "cpu")


def test_engines_without_a_server_have_a_row_each(monkeypatch):
    monkeypatch.setattr(in_process, "fastest_threads", lambda trial: trial() and 7)
    small = replace(config(load_format="dummy"), scheduler=SchedulerConfig(max_num_seqs=2))
    rows = in_process.measure(small, PROMPTS, [3, 2, 4], lambda text: None, kiln=True)
    assert [row["engine"] for row in rows] == [
        "transformers, static batches of 1, in process",
        "transformers, static batches of 2, in process",
        "kiln, in process",
    ]
    for row in rows:
        assert (row["threads"], row["requests"]) == (7, 3)
        assert (row["prompt_tokens"], row["output_tokens"]) == (17, 9)
        assert row["output_tokens_per_s"] == pytest.approx(9 / row["seconds"])
    with_server = in_process.measure(small, PROMPTS[:1], [2], lambda text: None, kiln=False)
    assert [row["engine"] for row in with_server] == [row["engine"] for row in rows[:2]]
