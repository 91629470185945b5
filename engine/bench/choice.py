"""Find the baseline that a name selects. Its packages are imported only when it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kiln.engine.bench.engine import BenchEngine, LoRABenchEngine, Tell, name_with_lora
from kiln.engine.bench.kiln_engine import KilnEngine, MustFit
from kiln.engine.bench.vllm_engine import VLLMEngine
from kiln.engine.config import EngineConfig
from kiln.engine.runner.device import resolve_device

MakeEngine = Callable[[], BenchEngine]
MakeLoRAEngine = Callable[[], LoRABenchEngine]


def static_or_vllm(name: str, config: EngineConfig, python: str) -> dict[str, MakeEngine]:
    """Return the engine that ``--baseline`` names, for requests of one length; empty for "none".

    For transformers this is ``generate`` on all requests at once. ``python``: see VLLMEngine.
    """

    def transformers() -> BenchEngine:
        from kiln.engine.bench.transformers_engine import StaticBatches

        return StaticBatches(config)

    return _named(name, transformers, config, python)


def continuous_or_vllm(name: str, config: EngineConfig, python: str) -> dict[str, MakeEngine]:
    """Return the same for requests of several lengths.

    For transformers this is its continuous batching, or static batches of ``max_num_seqs`` requests
    on a CPU and if the installed version has no continuous batching.
    """

    def transformers() -> BenchEngine:
        from kiln.engine.bench import transformers_engine as made

        on_gpu = resolve_device(config.model.device).type == "cuda"
        if on_gpu and made.can_batch_continuously():
            return made.ContinuousBatches(config)
        return made.StaticBatches(config, config.scheduler.max_num_seqs)

    return _named(name, transformers, config, python)


def without_and_with_lora(
    baseline: str,
    config: EngineConfig,
    adapted: EngineConfig,
    python: str,
    tell: Tell,
    room: MustFit,
) -> dict[str, MakeLoRAEngine]:
    """Return Kiln, and the engine that ``--baseline`` names, each without adapters and with them.

    ``adapted``: the config with adapters. ``room``: what must fit Kiln's KV pool.
    """
    products: dict[str, Callable[[EngineConfig], LoRABenchEngine]] = {
        "kiln": lambda each: KilnEngine(each, tell, room)
    }
    if baseline == "vllm":
        products["vllm"] = lambda each: VLLMEngine(each, python)
    return {
        name_with_lora(product, [module.name for module in each.lora.modules]): partial(make, each)
        for product, make in products.items()
        for each in (config, adapted)
    }


def _named(
    name: str, transformers: MakeEngine, config: EngineConfig, python: str
) -> dict[str, MakeEngine]:
    makers: dict[str, MakeEngine] = {
        "transformers": transformers,
        "vllm": lambda: VLLMEngine(config, python),
    }
    return {name: makers[name]} if name != "none" else {}
