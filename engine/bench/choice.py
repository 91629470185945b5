"""Find the baseline that a name selects. Its packages are imported only when it is loaded."""

from __future__ import annotations

from collections.abc import Callable

from kiln.engine.bench.engine import BenchEngine
from kiln.engine.config import EngineConfig
from kiln.engine.runner.device import resolve_device

MakeEngine = Callable[[], BenchEngine]


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


def _named(
    name: str, transformers: MakeEngine, config: EngineConfig, python: str
) -> dict[str, MakeEngine]:
    def vllm() -> BenchEngine:
        from kiln.engine.bench.vllm_engine import VLLMEngine

        return VLLMEngine(config, python)

    makers: dict[str, MakeEngine] = {"transformers": transformers, "vllm": vllm}
    return {name: makers[name]} if name != "none" else {}
