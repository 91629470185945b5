"""Checkpoints of compressed-tensors, as llm-compressor writes them.

    format            tensors of a module
    float-quantized   weight float8_e4m3fn, weight_scale, maybe input_scale
    int-quantized     weight int8, weight_scale, maybe input_scale
    naive-quantized   either of them
    pack-quantized    weight_packed, weight_shape, weight_scale, maybe weight_zero_point and
                      weight_g_idx; see packed_scheme
    mixed-precision   each group of modules has one of these

Source: compressed-tensors' QuantizationConfig
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from kiln.engine.errors import ModelError
from kiln.engine.models.compressed_args import check_kv_cache
from kiln.engine.models.compressed_groups import FORMATS, PRESETS, Stored, read_scheme
from kiln.engine.models.expressions import settle
from kiln.engine.models.fields import Fields
from kiln.engine.models.module_lists import ModuleList, check_module
from kiln.engine.models.name_rules import names_beside
from kiln.engine.models.quantization import Format, Quantization, refuse_others
from kiln.engine.models.scheme import DENSE, Scheme
from kiln.engine.models.weights import Weights

_FIELDS = (
    *("quant_method", "format", "quantization_status", "config_groups", "ignore"),
    *("kv_cache_scheme", "version", "global_compression_ratio"),
)
_STATUS = ("initialized", "calibration", "frozen", "compressed")  # tensors tell by themselves
_MIXED = "mixed-precision"


@dataclass(frozen=True)
class Group:
    """Modules that are quantised in the same way."""

    name: str = field(compare=False)
    targets: ModuleList
    scheme: Stored


@dataclass(frozen=True)
class CompressedTensors(Quantization):
    """``ignored`` modules are floats, whatever targets them. ``place``: in which file, for errors.

    Modules have the names of the checkpoint. The class of all projections, routers and the LM head
    is Linear, that of the embedding is Embedding.
    """

    groups: tuple[Group, ...]
    ignored: ModuleList
    place: str = field(compare=False)
    bits: float
    rounds_activations: bool = False
    _settled: set[str] = field(default_factory=set, compare=False, repr=False)
    method = "compressed-tensors"

    @property
    def schemes(self) -> Collection[Scheme]:
        """The schemes of all groups."""
        return [group.scheme for group in self.groups]

    def scheme(self, name: str, role: str, source: Weights) -> Scheme:
        """Return the scheme of a module."""
        names, kind = source.spellings(name), "Embedding" if role == "embed_tokens" else "Linear"
        self._settle(names, source)
        ignored = self.ignored.by_names(names) or self.ignored.by_class(kind)
        if ignored is not None:
            check_module(source, name, None, f"ignore leaves it out by its entry {ignored[:80]!r}")
            return DENSE
        found = self._targeting(names, kind)
        if found is None:
            check_module(source, name, None, "no group of config_groups targets it")
            return DENSE
        group, target = found
        reason = f"config_groups.{group.name} quantises it by its target {target[:80]!r}"
        check_module(source, name, group.scheme.suffixes, reason)
        return group.scheme

    def _targeting(self, names: Sequence[str], kind: str) -> tuple[Group, str] | None:
        """Return the group that targets a module by name, else by class, and the target."""
        by_name = [(one, one.targets.by_names(names)) for one in self.groups]
        by_class = [(one, one.targets.by_class(kind)) for one in self.groups]
        for pairs in (by_name, by_class):
            found = [(group, target) for group, target in pairs if target is not None]
            if len(found) > 1:
                both = " and ".join(f"{one.name} ({target[:80]!r})" for one, target in found[:2])
                raise ModelError(
                    f"{self.place}: the groups {both} of config_groups target {names[0]}, and "
                    "libraries differ in which one they choose"
                )
            if found:
                return found[0]
        return None

    def _settle(self, names: Sequence[str], source: Weights) -> None:
        """Match all expressions with all modules of the source, unless that is done."""
        if self._settled.issuperset(names):
            return
        beside = (names_beside(name, source) for name in names)
        new = {*names}.union(*beside) - self._settled
        lists = (self.ignored, *(group.targets for group in self.groups))
        settle([one for each in lists for _, one in each.expressions], sorted(new), self.place)
        self._settled.update(new)


def read(fields: Fields) -> CompressedTensors:
    """Read quantization_config. Raises ModelError."""
    refuse_others(fields, _FIELDS)
    if fields.text("quantization_status", "compressed") not in _STATUS:
        raise fields.error("quantization_status", f"want one of {', '.join(_STATUS)}")
    check_kv_cache(fields)
    listed = fields.group("config_groups")
    names = [] if listed is None else listed.names()
    groups = [] if listed is None else [_read_group(fields, listed, name) for name in names]
    schemes = [group.scheme for group in groups]
    return CompressedTensors(
        groups=tuple(groups),
        ignored=ModuleList.read(fields, "ignore"),
        place=fields.place,
        bits=max((one.bits_per_weight for one in schemes), default=0.0),
        rounds_activations=any(one.rounds for one in schemes),
    )


def _read_group(fields: Fields, listed: Fields, name: str) -> Group:
    """Read a group, or a list of targets whose name is that of a preset."""
    targets = listed.value(name)
    if isinstance(targets, list):
        preset = PRESETS.get(name.upper())
        if preset is None:
            raise listed.error(name, f"Kiln knows these schemes by name: {', '.join(PRESETS)}")
        group = listed.standing_for(name, {**preset, "targets": targets})
    else:
        found = listed.group(name)
        if found is None:
            raise listed.error(name, "want an object")
        group = found
    modules = ModuleList.read(group, "targets")
    if not modules.entries:
        raise group.error("targets", "want a list of modules")
    return Group(name, modules, read_scheme(group, _format(fields, group)))


def _format(fields: Fields, group: Fields) -> str:
    """Return the format of a group: its own, which must be that of all unless they are mixed."""
    for_all = fields.text("format", "fakequant")
    own = group if for_all == _MIXED or "format" in group else fields
    format_ = own.text("format", "fakequant")
    if format_ not in FORMATS:
        raise own.error("format", f"Kiln supports {', '.join(FORMATS)}")
    if for_all not in (_MIXED, format_):
        raise group.error("format", f"but that of all groups is {for_all!r}")
    return format_


FORMAT = Format(CompressedTensors.method, read)
