"""8-bit floats of NVIDIA's ModelOpt.

    quant_algo                  tensors of a module
    FP8                         weight, weight_scale [], input_scale []
    FP8_PER_CHANNEL_PER_TOKEN   weight, weight_scale [out, 1] or [out]; tokens have a scale each
    FP8_PB_WO                   weight, weight_scale [out / 128, 1, in / 128, 1], rounded up
    FP8_BLOCK_SCALES            the same; each 128 inputs of a token have a scale

The fields are in quantization_config, in older checkpoints only in hf_quant_config.json.

Source: ModelOpt's export of unified Hugging Face checkpoints
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection
from dataclasses import dataclass, field

from kiln.engine.layers.block_weight import BLOCK
from kiln.engine.models.compressed_args import check_kv_cache
from kiln.engine.models.compressed_groups import read_scheme
from kiln.engine.models.expressions import Expression
from kiln.engine.models.fields import Fields
from kiln.engine.models.fp8_schemes import BlockFP8, ChannelFP8
from kiln.engine.models.module_lists import check_module
from kiln.engine.models.quantization import Format, Quantization, refuse_others
from kiln.engine.models.scheme import DENSE, Scheme
from kiln.engine.models.weights import Weights

_STORED = ("quant_algo", "kv_cache_quant_algo", "group_size", "exclude_modules")
_FIELDS = (*_STORED, "quant_method", "ignore", "kv_cache_scheme", "config_groups", "producer")
_SCHEMES: dict[str, ChannelFP8 | BlockFP8] = {
    "FP8": ChannelFP8("tensor", "static"),
    "FP8_PER_CHANNEL_PER_TOKEN": ChannelFP8("channel", "token"),
    "FP8_PB_WO": BlockFP8("weight_scale", rounds=False),
    "FP8_BLOCK_SCALES": BlockFP8("weight_scale"),
}
_WILD, _MOST = "*?[", 1000


@dataclass(frozen=True)
class Excluded:
    """Modules by their names, by parts of their names between dots, and by wildcards.

    What is within an excluded module is excluded too.
    """

    entries: frozenset[str]
    wildcards: tuple[tuple[str, Expression], ...] = field(compare=False)

    def entry(self, module: str) -> str | None:
        """Return the entry that excludes a module, or None."""
        parts = module.split(".")
        ends = range(1, len(parts) + 1)
        runs = (".".join(parts[start:end]) for end in ends for start in range(end))
        places = [".".join(parts[:end]) for end in ends]
        literal = next((run for run in runs if run in self.entries), None)
        return literal or next(
            (entry for entry, one in self.wildcards if any(map(one.matches, places))), None
        )


@dataclass(frozen=True)
class ModelOpt(Quantization):
    """Every projection but the excluded modules is stored in the same way."""

    algorithm: str
    excluded: Excluded
    rounds_activations: bool = True
    method = "modelopt"
    bits = 8.0

    @property
    def schemes(self) -> Collection[Scheme]:
        """The scheme of what is not excluded."""
        return (_SCHEMES[self.algorithm],)

    def scheme(self, name: str, role: str, source: Weights) -> Scheme:
        """Return the scheme of a module."""
        entry = next(filter(None, map(self.excluded.entry, source.spellings(name))), None)
        if entry is not None or role == "embed_tokens":
            reason = (
                f"it is excluded by {entry[:80]!r}" if entry else "embeddings are not quantised"
            )
            check_module(source, name, None, reason)
            return DENSE
        scheme = _SCHEMES[self.algorithm]
        reason = f"quant_algo {self.algorithm} quantises it, and exclude_modules does not list it"
        check_module(source, name, scheme.suffixes, reason)
        return scheme


def read(fields: Fields) -> ModelOpt:
    """Read quantization_config. Raises ModelError."""
    refuse_others(fields, _FIELDS)
    check_kv_cache(fields)
    made = _read(fields, "ignore")
    groups = fields.group("config_groups")
    for name in groups.switched_on() if groups is not None else ():
        group = groups.group(name) if groups is not None else None
        if group is None or group.texts("targets") != ["Linear"]:
            raise fields.error("config_groups", "want groups with the targets ['Linear']")
        if read_scheme(group, "float-quantized") != _SCHEMES[made.algorithm]:
            raise fields.error("config_groups", f"but quant_algo is {made.algorithm!r}")
    return made


def read_file(fields: Fields) -> ModelOpt:
    """Read hf_quant_config.json. Raises ModelError."""
    refuse_others(fields, ("producer", "quantization"))
    producer, own = fields.group("producer"), fields.group("quantization")
    if producer is not None and producer.text("name", "modelopt") != "modelopt":
        raise producer.error("name", "Kiln supports only 'modelopt'")
    if own is None:
        raise fields.error("quantization", "want an object")
    refuse_others(own, _STORED)
    return _read(own)


def _read(fields: Fields, *lists: str) -> ModelOpt:
    """Read the fields that both files have; ``lists``: more lists of excluded modules."""
    algorithm = fields.text("quant_algo").upper()
    if algorithm not in _SCHEMES:
        raise fields.error("quant_algo", f"Kiln supports {', '.join(_SCHEMES)}")
    if fields.text("kv_cache_quant_algo", "FP8").upper() != "FP8":
        raise fields.error("kv_cache_quant_algo", "Kiln supports 'FP8' and null")
    scheme = _SCHEMES[algorithm]
    in_blocks = isinstance(scheme, BlockFP8)
    if fields.value("group_size") not in ((None, 0, BLOCK) if in_blocks else (None, 0)):
        raise fields.error("group_size", f"which does not go with quant_algo {algorithm!r}")
    excluded = _read_excluded(fields, ("exclude_modules", *lists))
    return ModelOpt(algorithm, excluded, scheme.rounds)


def _read_excluded(fields: Fields, names: tuple[str, ...]) -> Excluded:
    entries, wildcards = set(), []
    for name in names:
        for entry in fields.texts(name):
            entries.add(entry)
            if not any(mark in entry for mark in _WILD):
                continue
            try:  # what fnmatch makes of wildcards takes no exponential time
                made = Expression(fnmatch.translate(entry), trusted=True)
            except ValueError as error:
                raise fields.error(name, f"{entry[:80]!r} is not a wildcard: {error}") from error
            wildcards.append((entry, made))
        if len(wildcards) > _MOST:
            raise fields.error(name, f"it has {len(wildcards)} wildcards, at most {_MOST} are read")
    return Excluded(frozenset(entries), tuple(wildcards))


FORMAT = Format(ModelOpt.method, read, file="hf_quant_config.json", read_file=read_file)
