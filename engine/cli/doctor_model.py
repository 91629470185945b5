"""The checks of ``kiln doctor MODEL``: what of a checkpoint Kiln serves, and how.

Nothing but small files and the headers of large ones are read. Every problem is a finding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from kiln.engine.cli.diagnosis import Finding
from kiln.engine.cli.doctor_config import read_with_problems
from kiln.engine.cli.memory_plan import plan_on_gpus
from kiln.engine.config import DType, ModelConfig
from kiln.engine.errors import ConfigError
from kiln.engine.kv.pool import KVShape
from kiln.engine.kv.shape import Window
from kiln.engine.models.family import Family
from kiln.engine.models.hf_config import HFConfig
from kiln.engine.models.model_folder import read_json
from kiln.engine.models.rope_config import RopeConfig
from kiln.engine.models.safetensors_weights import SafetensorsWeights, file_problems
from kiln.engine.models.splitting import check_split
from kiln.engine.requests.pooling import Embedder
from kiln.engine.runner.device import resolve_dtype
from kiln.engine.runner.embedder import longest_text, read_embedder
from kiln.engine.runner.inspection import Inspection, inspect
from kiln.engine.text.replies.choice import choose_formats
from kiln.engine.text.tokenizer import Tokenizer

_SIZES = (24, 48, 80)  # GiB of a GPU
_MOST_RANKS = 64


def examine_model(folder: Path, model: ModelConfig | None = None) -> list[Finding]:
    """Run every check of a model's folder, with these settings of the model."""
    model = model or ModelConfig(str(folder))
    read, problems = read_with_problems(folder, model)
    found = [_refused("config.json", problem) for problem in problems]
    source, of_files = _files(folder)
    if read is None:
        return [*found, *of_files, *_text(folder)]
    family, config = read
    embedder, task = _task(folder, config)
    if embedder is not None:  # as when it is served: without a head of its own
        config = replace(config, tie_word_embeddings=True)
    dtype, told = _dtype(config, model.dtype)
    found += [*_config(folder, family, config), told, task, *of_files]
    config = replace(config, dtype=dtype)
    if source is not None:
        found += _tensors(inspect(family, config, source, headless=embedder is not None))
    return [*found, *_text(folder), *_sizes(config)]


def _refused(name: str, problem: str) -> Finding:
    return Finding("broken", name, "refused", problem)


def _config(folder: Path, family: Family, config: HFConfig) -> list[Finding]:
    named = ", ".join(map(str, read_json(folder / "config.json").get("architectures") or ()))
    inside = ", the text model in it" if config.wrapped else ""
    whose = f"{family.model_type} family{inside}"
    rows = [
        ("Architecture", f"{named or family.architectures[0]}: {whose}"),
        ("Layers", _layers(config)),
        ("Attention windows", _counted(config.windows, _window)),
        ("Rotary embedding", _counted(config.ropes, _rope)),
        ("Context", f"{config.max_positions:,} tokens"),
        ("LM head", "tied to the embedding" if config.tie_word_embeddings else "its own"),
    ]
    if start := config.long_start(config.max_positions):
        told = f"another for requests that may exceed {start:,} tokens, by prompt plus max_tokens"
        rows.append(("Long requests", f"longrope has two rotary tables, {told}"))
    if config.traits.experts is not None:
        rows.append(("Experts", _experts(config)))
    rows.append(("Quantisation", config.quantization.method or "none"))
    return [Finding("ok", *row) for row in rows]


def _dtype(config: HFConfig, name: DType) -> tuple[torch.dtype, Finding]:
    """Return the dtype that the model has on a GPU."""
    try:
        dtype = resolve_dtype(name, config, torch.device("cuda"))
    except ConfigError as error:
        return config.dtype, _refused("dtype", str(error))
    return dtype, Finding("ok", "dtype", str(dtype).removeprefix("torch."))


def _task(folder: Path, config: HFConfig) -> tuple[Embedder | None, Finding]:
    """Return how the model makes embeddings, if it does."""
    try:
        embedder = read_embedder(folder, "auto", config.hidden_size)
        if embedder is None:
            return None, Finding("ok", "Task", "to generate text")
        length = longest_text(folder, config.max_positions)
    except ConfigError as error:
        return None, _refused("Task", str(error))
    told = f"embeddings (pooling {embedder.pooling}) of texts of up to {length:,} tokens"
    return embedder, Finding("ok", "Task", told)


def _layers(config: HFConfig) -> str:
    return (
        f"{config.num_layers} of {config.hidden_size:,}, {config.num_heads} heads and "
        f"{config.num_kv_heads} KV heads of {config.head_dim}, {config.activation} of "
        f"{config.intermediate_size:,}, vocabulary of {config.vocab_size:,}"
    )


def _window(window: Window | None) -> str:
    if window is None:
        return "all tokens"
    return f"{'chunks of ' if window.chunked else ''}{window.size:,} tokens"


def _rope(rope: RopeConfig | None) -> str:
    if rope is None:
        return "none"
    scaling = "default" if rope.scaling is None else f"{rope.scaling.kind} x {rope.scaling.factor}"
    return f"{scaling}, theta {rope.theta:,.0f}, {rope.dim} dimensions of a head"


def _experts(config: HFConfig) -> str:
    experts = config.traits.experts
    assert experts is not None
    shared = f", a shared one of {experts.shared_size:,}" if experts.shared_size else ""
    return (
        f"{experts.num_experts} of {experts.intermediate_size:,}, {experts.top_k} for a token"
        f"{shared}, in {sum(experts.layers)} of {config.num_layers} layers"
    )


def _counted(values: tuple[object, ...], text: Callable[..., str]) -> str:
    """Return what is said of each layer, with how many layers if they differ."""
    kinds = Counter(map(text, values))
    if len(kinds) == 1:
        return next(iter(kinds))
    return "; ".join(f"{kind} in {count} layers" for kind, count in kinds.items())


def _files(folder: Path) -> tuple[SafetensorsWeights | None, list[Finding]]:
    """Return the source of the weights, if all files are there, and what was found."""
    try:
        problems = file_problems(folder)
        source = None if problems else SafetensorsWeights(folder)
    except ConfigError as error:
        source, problems = None, [str(error)]
    if source is None:
        return None, [_refused("Files", problem) for problem in problems]
    count = len(list(folder.glob("*.safetensors")))
    told = (
        f"{count} of safetensors, {source.progress[1] / 1e9:.2f} GB, {len(source.names):,} tensors"
    )
    return source, [Finding("ok", "Files", told)]


def _tensors(found: Inspection) -> Iterator[Finding]:
    for problem in found.problems:
        yield _refused("Tensors", problem)
    if not found.problems:
        yield Finding("ok", "Tensors", "all that the model asks for, in the right shapes")
    for form, roles in found.forms.items():
        meaning = "unless the GPU multiplies the codes" if form in found.dequantised else ""
        yield Finding("ok", "Weights", f"{', '.join(roles)}: {form}", meaning)
    yield Finding("ok", "LoRA targets", ", ".join(found.targets))


def _text(folder: Path) -> Iterator[Finding]:
    """Say what there is of a tokenizer, and how the replies are read."""
    try:
        tokenizer = Tokenizer.load_if_present(folder)
    except ConfigError as error:
        yield _refused("Tokenizer", str(error))
        return
    if tokenizer is None:
        yield Finding("missing", "Tokenizer", "none", "prompts and replies are token ids")
        return
    yield Finding("ok", "Tokenizer", f"{tokenizer.vocab_size:,} tokens")
    templates = tokenizer.chat_template_sources
    if not templates:
        meaning = "/v1/chat/completions needs --chat-template"
        yield Finding("missing", "Chat template", "none", meaning)
        return
    yield Finding("ok", "Chat template", f"{len(templates)} found")
    formats = choose_formats(templates)
    has_tools = any("tools" in template for template in templates)
    if formats.tools is not None:
        yield Finding("ok", "Tool calls", f"--tool-call-parser {formats.tools.names[0]}, by itself")
    elif has_tools:
        meaning = "they stay in the content; --tool-call-parser names a format"
        yield Finding("missing", "Tool calls", "in a format that Kiln does not know", meaning)
    if formats.reasoning is not None:
        told = f"--reasoning-parser {formats.reasoning.names[0]}, by itself"
        yield Finding("ok", "Reasoning", told)


def _sizes(config: HFConfig) -> list[Finding]:
    """Say what the model takes, how many ranks may share it, and on which GPUs it fits."""
    ranks = [world for world in range(1, _MOST_RANKS + 1) if _can_share(config, world)]
    kept = "layers with a window keep all tokens too" if any(config.windows) else ""
    per_token = KVShape(config.attention, config.dtype).bytes_per_token
    found = [
        Finding("ok", "--tensor-parallel-size", ", ".join(map(str, ranks))),
        Finding("ok", "KV pool", f"{per_token * 1000 / 2**20:,.1f} MiB for 1,000 tokens", kept),
    ]
    return found + [_fits(config, size, ranks) for size in _SIZES]


def _can_share(config: HFConfig, world: int) -> bool:
    try:
        check_split(config, world)
    except ConfigError:
        return False
    return True


def _fits(config: HFConfig, size: int, ranks: list[int]) -> Finding:
    """Say how many GPUs of a size hold the weights, and how many a request of the whole context."""
    name = f"GPUs of {size} GiB"
    plans = {world: plan_on_gpus(config, size << 30, world) for world in ranks}
    holds = [world for world, plan in plans.items() if plan.pool_tokens > 0]
    if not holds:
        return Finding("missing", name, "too small for the weights", "use larger ones")
    first = holds[0]
    told = f"on {first}, {plans[first].weight_bytes / 2**30:.3g} GiB of weights each, "
    told += f"a KV pool of {plans[first].pool_tokens:,} tokens"
    if plans[first].fits:
        return Finding("ok", name, told)
    whole = next((world for world in holds if plans[world].fits), None)
    more = f"--max-model-len {plans[first].pool_tokens}"
    if whole is not None:
        more += f", or {whole} GPUs for the whole context"
    return Finding("missing", name, told, more)
