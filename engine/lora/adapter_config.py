"""adapter_config.json of a PEFT adapter: ranks, scales and target modules, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kiln.engine.errors import ModelError
from kiln.engine.lora.target_modules import EMBEDDINGS, TargetModules
from kiln.engine.models.expressions import Expression, settle
from kiln.engine.models.fields import Fields
from kiln.engine.models.model_folder import read_json

CONFIG_FILE = "adapter_config.json"
MAX_RANK = 65_536
MAX_ALPHA = 1e6

# Keys that describe the training or the file. The last four only detail other keys.
_METADATA = frozenset((
    *("task_type", "base_model_name_or_path", "revision", "auto_mapping", "peft_version"),
    *("inference_mode", "lora_dropout", "runtime_config"),
    *("megatron_core", "qalora_group_size", "eva_config", "fan_in_fan_out"),
))  # fmt: skip
_READ = frozenset((
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias"),
    *("init_lora_weights", "target_modules", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "ensure_weight_tying"),
))  # fmt: skip
_REFUSED = {
    "use_dora": "DoRA is not supported",
    "lora_bias": "a bias of LoRA B is not supported",
    "modules_to_save": "trained copies of whole modules are not supported",
    "alora_invocation_tokens": "activated LoRA is not supported",
    "trainable_token_indices": "trained tokens are not supported",
    "target_parameters": "LoRA on parameters, such as those of experts, is not supported",
    "layer_replication": "repeated layers are not supported",
    "use_qalora": "QA-LoRA is not supported",
    "use_bdlora": "BD-LoRA is not supported",
    "megatron_config": "Megatron's layers are not supported",
    "loftq_config": "LoftQ changes the base weights",
    "corda_config": "CorDA changes the base weights",
    "lora_ga_config": "LoRA-GA changes the base weights",
    "velora_config": "VeLoRA is not supported",
    "monteclora_config": "MonteCLoRA is not supported",
    "arrow_config": "Arrow routing is not supported",
    "kasa_config": "KaSA is not supported",
}
# The others, such as pissa and olora, train against base weights that they change.
_INITS = ("gaussian", "eva", "orthogonal")

Pattern = tuple[Expression, float]


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The part of adapter_config.json that changes what an adapter computes.

    ``fan_in_fan_out`` is accepted and has no effect: it describes the layout of base weights, and
    A and B always have the same layout.
    """

    default_rank: int
    default_alpha: float
    use_rslora: bool
    ranks: tuple[Pattern, ...]
    alphas: tuple[Pattern, ...]
    modules: TargetModules

    def settle(self, names: Sequence[str], what: str) -> None:
        """Match all expressions with the names of modules, before the methods below get them.

        Raises ModelError, which begins with ``what``, if that takes too long.
        """
        patterns = [pattern for pattern, _ in (*self.ranks, *self.alphas)]
        settle((*patterns, *self.modules.expressions), [*names, *EMBEDDINGS], what)

    def rank(self, module: str) -> int:
        """Return the rank of a module, such as "model.layers.0.self_attn.q_proj"."""
        return int(_first_match(self.ranks, module, self.default_rank))

    def scale(self, module: str) -> float:
        """Return the factor of B A x for a module."""
        alpha = _first_match(self.alphas, module, self.default_alpha)
        rank = self.rank(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read a folder's adapter_config.json.

    Raises ModelError naming the key if it is missing, malformed or not supported.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ModelError(f"{path} is missing: {folder} is not a LoRA adapter in PEFT's format")
    content = read_json(path)
    fields = Fields(content, path)
    _refuse(content, fields)
    return AdapterConfig(
        default_rank=_rank(content.get("r", 8), fields, "r"),
        default_alpha=_alpha(content.get("lora_alpha", 8), fields, "lora_alpha"),
        use_rslora=fields.flag("use_rslora", False),
        ranks=_patterns(content, fields, "rank_pattern", _rank),
        alphas=_patterns(content, fields, "alpha_pattern", _alpha),
        modules=TargetModules.read(content, fields),
    )


def _refuse(content: Mapping[str, Any], fields: Fields) -> None:
    """Raise ModelError for a key whose value Kiln does not support. Source: PEFT's LoraConfig."""
    if content.get("peft_type") != "LORA":
        raise fields.error("peft_type", "want 'LORA': other methods are not supported")
    for name in fields.switched_on():
        if name in _REFUSED:
            raise fields.error(name, _REFUSED[name])
        if name not in _METADATA and name not in _READ:
            raise fields.error(name, "Kiln does not know this key: it may change what is computed")
    if content.get("bias") not in ("none", None):
        raise fields.error("bias", "want 'none': trained biases are not supported")
    init = content.get("init_lora_weights")
    if not (init is None or isinstance(init, bool) or init in _INITS):
        raise fields.error(
            "init_lora_weights",
            "which may change the base weights: save the adapter as an ordinary LoRA "
            "(PEFT: path_initial_model_for_weight_conversion)",
        )
    fields.flag("fan_in_fan_out", False)


def _rank(value: Any, fields: Fields, name: str) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise fields.error(name, f"want an integer, 1 to {MAX_RANK}")
    return value


def _alpha(value: Any, fields: Fields, name: str) -> float:
    # Infinities, NaN and huge integers fail the comparison.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_ALPHA:
        raise fields.error(name, f"want a number of at most {MAX_ALPHA:g}")
    return float(value)


def _patterns(
    content: Mapping[str, Any], fields: Fields, name: str, check: Any
) -> tuple[Pattern, ...]:
    """Return the expressions of a pattern map, in their order, with their values."""
    given = content.get(name)
    if given is None:
        return ()
    if not isinstance(given, dict):
        raise fields.error(name, "want a map from module names or expressions to numbers")
    made = []
    for key, value in given.items():
        try:
            expression = Expression(key, r"(.*\.)?(", ")$")
        except ValueError as error:
            raise fields.error(name, f"{key[:80]!r} is not an expression: {error}") from error
        made.append((expression, check(value, fields, name)))
    return tuple(made)


def _first_match(patterns: tuple[Pattern, ...], module: str, default: float) -> float:
    """Return the value of the first expression that matches the end of a name."""
    return next((value for pattern, value in patterns if pattern.matches(module)), default)
