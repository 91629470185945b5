"""Start a module of this copy of Kiln in a new process, and write a configuration as text."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import kiln
from kiln.engine.config import (
    EngineConfig,
    GraphConfig,
    KVConfig,
    LoRAConfig,
    LoRAModule,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)

_LONGEST_PATH = 80  # of the folder; that of a Unix socket in it has at most 107 bytes
# Kiln's folder is first in sys.path only while Kiln is imported, then last: if it is site-packages,
# it may contain backports that shadow the standard library.
_BOOT = (
    "import sys; root = sys.argv.pop(1); sys.path.insert(0, root); import kiln; del sys.path[0]; "
    "root in sys.path or sys.path.append(root); "
    "from {module} import main; sys.exit(main(sys.argv[1:]))"
)


def module_command(module: str) -> list[str]:
    """Return the command that calls ``main(arguments) -> int`` of a module in a new Python process.

    The child imports this copy of Kiln even if another is installed, and modules in the working
    folder do not shadow its imports (``-P``).
    """
    root = str(Path(kiln.__file__).parents[1])
    return [sys.executable, "-P", "-c", _BOOT.format(module=module), root]


def private_folder() -> Path:
    """Make a folder that only this user can read (mode 0700), for sockets and rendezvous files."""
    folder = Path(tempfile.mkdtemp(prefix="kiln-"))
    if len(str(folder)) > _LONGEST_PATH:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="kiln-", dir="/tmp"))
    return folder


def config_text(config: EngineConfig) -> str:
    """Return a configuration as JSON."""
    return json.dumps(asdict(config))


def read_config_text(text: str) -> EngineConfig:
    """Return the configuration that ``config_text`` wrote. Raises ConfigError and TypeError."""
    given = json.loads(text)
    graphs, lora = given["graphs"], given["lora"]
    if graphs["bs"] is not None:
        graphs["bs"] = tuple(graphs["bs"])
    lora["modules"] = tuple(LoRAModule(**module) for module in lora["modules"])
    return EngineConfig(
        ModelConfig(**given["model"]),
        KVConfig(**given["kv"]),
        SchedulerConfig(**given["scheduler"]),
        GraphConfig(**graphs),
        LoRAConfig(**lora),
        ParallelConfig(**given["parallel"]),
    )
