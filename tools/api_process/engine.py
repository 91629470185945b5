"""An engine process that emits the tokens of a text at a fixed pace, instead of computing.

``serve`` is the ``kiln`` command with such an engine: server, process boundary and tokenizer are
the real ones.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kiln.engine.config import EngineConfig, LoRAConfig
from kiln.engine.lora.jobs import AdapterJobs
from kiln.engine.lora.slots import AdapterSlots
from kiln.engine.process.child import EngineProcess
from kiln.engine.process.wire import ModelInfo
from kiln.engine.process.worker import Progress, run
from kiln.engine.requests.request import NewRequest, TokenOutput
from kiln.engine.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
_BOOT = (
    f"import sys; sys.path[:0] = [{str(ROOT / 'tools' / 'import_root')!r}, {str(ROOT / 'tools')!r}]"
)
CONTEXT = 2**20


@dataclass
class Stats:
    """The counts that the server reads."""

    running: int
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 100


class TextCore:
    """Emits one token of a text for each request in each step, and steps every ``seconds``."""

    def __init__(self, text: list[int], seconds: float) -> None:
        self.adapters = AdapterJobs(AdapterSlots(), LoRAConfig())
        self._text = text
        self._seconds = seconds
        self._next = 0.0
        self._told: dict[str, tuple[int, int]] = {}  # tokens so far, and of all

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._told)

    def add(self, new: NewRequest) -> None:
        """Begin a request."""
        self._told[new.request_id] = (0, new.params.max_tokens or CONTEXT)

    def abort(self, request_id: str) -> None:
        """Drop a request."""
        self._told.pop(request_id, None)

    def check_ranks(self) -> None:
        """Do nothing: there is one."""

    def stats(self) -> Stats:
        """Return the current counts."""
        return Stats(len(self._told))

    def step(self) -> list[TokenOutput]:
        """Return the next token of every request, not before the step's time."""
        now = time.monotonic()
        self._next = max(self._next + self._seconds, now)
        time.sleep(self._next - now)
        outputs = []
        for name, (count, most) in list(self._told.items()):
            token, last = self._text[count % len(self._text)], count + 1 == most
            seed = 1 if count == 0 else None
            outputs.append(TokenOutput(name, [token], "length" if last else None, seed=seed))
            if last:
                del self._told[name]
            else:
                self._told[name] = (count + 1, most)
        return outputs


def load(config: EngineConfig, progress: Progress, seconds: float) -> tuple[TextCore, ModelInfo]:
    """Return the core, and what the server shows of it."""
    tokenizer = Tokenizer.load(Path(config.model.model))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
    vocabulary = tokenizer.backend.get_vocab_size()
    return TextCore(ids, seconds), ModelInfo(CONTEXT, vocabulary, "float32", "cpu")


def command(function: str, seconds: float) -> list[str]:
    """Return the command that runs a function of this module with the seconds of a step."""
    run_it = f"from api_process import engine; sys.exit(engine.{function}({seconds}))"
    return [sys.executable, "-P", "-c", f"{_BOOT}; {run_it}"]


def engine(seconds: float) -> int:
    """Run the engine process."""
    return run(partial(load, seconds=seconds), sys.argv[1:])  # type: ignore[arg-type]


def serve(seconds: float) -> int:
    """Run the ``kiln`` command."""
    from kiln.engine.cli.main import main

    spawn = EngineProcess.spawn
    EngineProcess.spawn = lambda config: spawn(config, command("engine", seconds))  # type: ignore[method-assign]
    return main()
