"""Seconds from files to the GPU: an 8B's weights read by threads, and copied from a map."""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gpu.pace import NotMeasured, Row
from kiln.engine.bench.shapes import SHAPES
from kiln.engine.compile.parameters import named_tensors
from kiln.engine.models.family import Model
from kiln.engine.models.hub import INDEX
from kiln.engine.models.loader import load_model
from kiln.engine.models.registry import read_model
from kiln.engine.models.safetensors_weights import SafetensorsWeights
from kiln.engine.models.split import WHOLE, Split
from kiln.engine.models.staged_copies import Copier
from kiln.engine.runner.memory import free_unused

_SHARD = 5_000_000_000  # bytes
_ROOM = 18_000_000_000  # bytes on the disk
_LIMIT = 3.0  # seconds for an 8B, from the page cache
_TIMES = 3
_MEMORY = Path("/dev/shm")


class _Mapped(SafetensorsWeights):
    """Copies each tensor from the map of its file, as any device can."""

    def _read(self, path: Path, name: str, out: torch.Tensor, *rest: Any) -> None:
        index = rest[-1]
        out.copy_(self._files[path].get_slice(name)[index or ...])


def weight_loading(args: argparse.Namespace) -> list[Row]:
    """Return a row for each way, for a whole model and for one rank of two.

    The files are in the page cache. Both ways of loading run in turn. ``--quick``: with two layers.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    layers = {"num_hidden_layers": 2} if args.quick else {}
    with tempfile.TemporaryDirectory(dir=_place()) as folder:
        write_checkpoint(SHAPES["llama3-8b"] | layers, Path(folder), device)
        return rows_of(Path(folder), device, limit=_LIMIT)


def rows_of(
    folder: Path, device: torch.device, copier: Copier | None = None, limit: float = 1e9
) -> list[Row]:
    """Return the rows of a checkpoint. ``limit``: seconds for the whole model by threads."""
    ways: dict[str, Callable[[], SafetensorsWeights]] = {
        "mapped": lambda: _Mapped(folder, copier),
        "threads": lambda: SafetensorsWeights(folder, copier),
    }
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    rows: list[Row] = []
    for split in (WHOLE, Split(1, 2, "ranks")):
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        equal = True
        for _ in range(_TIMES if split == WHOLE else 1):
            models = []
            for way, make in ways.items():
                took, model = _loaded(folder, make(), device, split)
                seconds[way].append(took)
                models.append(model)
            equal = equal and _equal(*models)
            del model, models
        for way, times in seconds.items():
            middle = statistics.median(times)
            slow = way == "threads" and split == WHOLE and middle > limit
            row = {
                "way": way,
                "ranks": split.world,
                "seconds": round(middle, 3),
                "gb_per_second": round(size / split.world / middle / 1e9, 2),
                "all_seconds": [round(one, 3) for one in times],
                "equal": equal,
                "ok": equal and not slow,
            }
            rows.append(row)
    return rows


def write_checkpoint(config: Mapping[str, Any], folder: Path, device: torch.device) -> None:
    """Write random weights in bfloat16 of a Llama, in files as large as published ones."""
    (folder / "config.json").write_text(json.dumps(config))
    shards: list[dict[str, torch.Tensor]] = [{}]
    placed: dict[str, str] = {}
    for name, sizes in llama_shapes(config).items():
        values = torch.randn(sizes, dtype=torch.bfloat16, device=device).mul_(0.02).cpu()
        if sum(one.nbytes for one in shards[-1].values()) + values.nbytes > _SHARD:
            _save(shards[-1], folder / f"model-{len(shards)}.safetensors")
            shards.append({})
        shards[-1][name] = values
        placed[name] = f"model-{len(shards)}.safetensors"
    _save(shards[-1], folder / f"model-{len(shards)}.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": placed}))


def _save(shard: dict[str, torch.Tensor], path: Path) -> None:
    save_file(shard, path)
    shard.clear()  # its memory


def llama_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a Llama's tensors."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    table = (config["vocab_size"], hidden)
    found = {"model.embed_tokens.weight": table}
    for number in range(config["num_hidden_layers"]):
        found |= {f"model.layers.{number}.{name}.weight": one for name, one in layer.items()}
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": table}


def _loaded(
    folder: Path, weights: SafetensorsWeights, device: torch.device, split: Split
) -> tuple[float, Model]:
    """Return the seconds until all weights are on the device, and the model."""
    family, config = read_model(folder)
    free_unused(device.type)  # so that the model's memory is allocated anew, as at a start
    _wait(device)
    begun = time.perf_counter()
    with torch.inference_mode():
        model = load_model(family, config, weights, 64, torch.bfloat16, device, split=split)
    _wait(device)
    return time.perf_counter() - begun, model


def _equal(one: Model, other: Model) -> bool:
    """Whether two models have the same tensors, to the bit."""
    left, right = named_tensors(one), named_tensors(other)
    return left.keys() == right.keys() and all(
        torch.equal(left[name].view(torch.uint8), right[name].view(torch.uint8)) for name in left
    )


def _place() -> Path:
    """Return a folder with room for the files: on the disk, else in memory."""
    for place in (Path(tempfile.gettempdir()), _MEMORY):
        if place.is_dir() and shutil.disk_usage(place).free >= _ROOM:
            return place
    raise NotMeasured(f"no {_ROOM / 1e9:.0f} GB are free in {tempfile.gettempdir()} or {_MEMORY}")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
