"""MODEL and the engine's flags, for the commands that start an engine."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kiln.engine.cli.engine_flags import ENGINE, LORA
from kiln.engine.cli.flags import Group, add_groups, command_line, settings_of
from kiln.engine.cli.serve_flags import LOGS
from kiln.engine.cli.several import is_model_folder
from kiln.engine.config import EngineConfig, LoRAModule, ModelConfig
from kiln.engine.config_forms import checked_speculative, config_of
from kiln.engine.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from kiln.engine.models.model_folder import ModelFiles

DEMO_FOLDER = Path(__file__).parents[1] / "demo"


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and one flag per setting of ``kiln.engine.config``."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="folder in Hugging Face format, or a hub id; default: the demo model",
    )
    parser.add_argument("--model", dest="model_flag", metavar="MODEL", help="the same as MODEL")
    add_groups(parser, ENGINE, "engine")


def engine_config(args: argparse.Namespace, model: Path | str) -> EngineConfig:
    """Return the flags as a configuration of a model. Raises ConfigError.

    A setting whose flag is not given keeps its default.
    """
    given = settings_of(args, (*ENGINE, LORA, LOGS))
    given.setdefault("model", {})["model"] = str(model)
    given.setdefault("lora", {})["modules"] = lora_modules(args)
    given["speculative"] = _speculative(args)
    config = config_of(given)
    if getattr(args, "enable_lora", None) and not config.lora.enabled:
        raise ConfigError("--enable-lora: name the adapters by --lora-modules or --lora-root")
    return config


def _speculative(args: argparse.Namespace) -> dict[str, Any]:
    """Return what ``--speculative-config``, a flag of some commands, says. Raises ConfigError."""
    text = getattr(args, "speculative_config", None)
    if text is None:
        return {}
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise ConfigError(f"--speculative-config {text[:80]!r}: is not a JSON object")
    return checked_speculative(given)


def lora_modules(args: argparse.Namespace) -> tuple[LoRAModule, ...]:
    """Return the adapters of ``--lora-modules``, a flag of some commands. Raises ConfigError."""
    return tuple(map(_lora_module, getattr(args, "lora_modules", None) or ()))


def _lora_module(given: str) -> LoRAModule:
    """Return an adapter given as NAME=PATH, or as vLLM's {"name": …, "path": …}."""
    wanted = ConfigError(
        f'--lora-modules {given[:80]!r}: want NAME=PATH, or {{"name": …, "path": …}}; write MODEL '
        "before it"
    )
    if not given.startswith("{"):
        name, equals, path = given.partition("=")
        if not equals:
            raise wanted
        return LoRAModule(name, path)
    try:
        said = json.loads(given)
    except ValueError as error:
        raise wanted from error
    if set(said) != {"name", "path"} or not all(isinstance(one, str) for one in said.values()):
        raise wanted
    return LoRAModule(**said)


def model_config(args: argparse.Namespace, name: str, flags: Group) -> ModelConfig:
    """Return the settings of a model by the flags of a group. Raises ConfigError."""
    return ModelConfig(name, **settings_of(args, [flags]).get("model", {}))


def model_of(args: argparse.Namespace) -> str:
    """Return MODEL, given alone or as ``--model``; else the demo model. Raises ConfigError."""
    alone, flag = args.model, args.model_flag
    if alone is not None and flag is not None and alone != flag:
        raise ConfigError(f"MODEL {alone[:80]!r} and --model {flag[:80]!r}: give one of them")
    return str(alone or flag or DEMO_FOLDER)


def served_names(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the names of the model: the flag's, else the folder's name or the hub id.

    Raises ConfigError if there is no MODEL, and the last name may be it.
    """
    names = tuple(getattr(args, "served_model_name", None) or ())
    is_unnamed = args.model is None and args.model_flag is None
    if is_unnamed and (len(names) > 1 or any(map(is_model_folder, names))):
        last = names[-1][:80]
        raise ConfigError(
            f"--served-model-name {' '.join(names)[:80]}: it takes every word behind it, so that "
            f"{last!r} may be a name or MODEL: write MODEL before it, or --model MODEL"
        )
    if names:
        return names
    path = Path(model_of(args)).expanduser()
    return (path.resolve().name if path.is_dir() else model_of(args),)


def served_name(args: argparse.Namespace) -> str:
    """Return the first name of the model, which reports and metrics carry. Raises ConfigError."""
    return served_names(args)[0]


def find_model(args: argparse.Namespace) -> tuple[EngineConfig, ModelFiles]:
    """Return the flags as a configuration, and the files of the model, as ``located`` does.

    Raises ModelError and ConfigError.
    """
    model = model_of(args)
    if model == str(DEMO_FOLDER) and not (DEMO_FOLDER / "config.json").exists():
        raise ModelError(f"{DEMO_FOLDER}: the demo model is missing; give a model folder")
    return located(engine_config(args, model))


def located(config: EngineConfig) -> tuple[EngineConfig, ModelFiles]:
    """Return a configuration with folders in the place of hub ids, and the files of the model.

    What this machine lacks is downloaded. Raises ModelError.
    """
    from kiln.engine.models.model_folder import find_model_files

    files = find_model_files(config.model)
    return replace(config, model=config.model.at(files.folder, files.tokenizer)), files


def engine_flags(args: argparse.Namespace) -> list[str]:
    """Return MODEL and the given flags, as a command line for another ``kiln``."""
    return [model_of(args), *command_line(args, ENGINE)]
