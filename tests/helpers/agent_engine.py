"""An engine that answers by the rules of ``agent_model`` instead of computing.

``kiln_command`` is the ``kiln`` command with this engine: the server, its process boundary and its
tokenizer are the real ones.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import agent_model

import kiln
from kiln.engine.config import LoRAConfig
from kiln.engine.lora.jobs import AdapterJobs
from kiln.engine.lora.slots import AdapterSlots
from kiln.engine.process.child import EngineProcess
from kiln.engine.process.wire import ModelInfo
from kiln.engine.process.worker import run
from kiln.engine.requests.finish import stop_token_ids
from kiln.engine.requests.pooling import Embedder
from kiln.engine.requests.request import NewRequest, TokenLogprobs, TokenOutput
from kiln.engine.text.tokenizer import Tokenizer

_EMBEDDING_SIZE = 16
_BURSTS = (1, 3, 1, 7, 2)  # tokens that a step appends, in turn


@dataclass
class Stats:
    """The counts that the server reads."""

    running: int
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 100


class RuleCore:
    """Answers requests from their prompts, a few tokens a step."""

    def __init__(self, tokenizer: Tokenizer, context: int, most: int, seconds: float) -> None:
        self.adapters = AdapterJobs(AdapterSlots(), LoRAConfig())
        self._tokenizer = tokenizer
        self._context = context
        self._most = most
        self._seconds = seconds
        self._answers: dict[str, Iterator[TokenOutput]] = {}

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._answers)

    def add(self, new: NewRequest) -> None:
        """Begin a request."""
        self._answers[new.request_id] = self._answer(new)

    def abort(self, request_id: str) -> None:
        """Drop a request."""
        self._answers.pop(request_id, None)

    def reset_prefix_cache(self) -> None:
        """Do nothing: nothing is cached."""

    def check_ranks(self) -> None:
        """Do nothing: there is one."""

    def stats(self) -> Stats:
        """Return the current counts."""
        return Stats(len(self._answers), kv_blocks_used=len(self._answers))

    def step(self) -> list[TokenOutput]:
        """Return the next tokens of every request."""
        time.sleep(self._seconds)
        outputs = [next(answer) for answer in list(self._answers.values())]
        for output in outputs:
            if output.finish_reason is not None:
                del self._answers[output.request_id]
        return outputs

    def _answer(self, new: NewRequest) -> Iterator[TokenOutput]:
        """Yield the tokens of an answer; it begins again where it must not end."""
        if new.pooling is not None:
            yield TokenOutput(new.request_id, [], "stop", embedding=bytes(4 * _EMBEDDING_SIZE))
            return
        encode, params = self._tokenizer.backend.encode, new.params
        prompt = self._tokenizer.backend.decode(new.prompt_token_ids, skip_special_tokens=False)
        text = agent_model.answer(prompt) + agent_model.EOS
        tokens = itertools.cycle(encode(text, add_special_tokens=False).ids)
        eos = self._tokenizer.eos_token_ids
        stops = stop_token_ids(new, eos)
        room = min(self._context - len(new.prompt_token_ids), self._most)
        most = min(params.max_tokens or room, room)
        count, seed = 0, 1
        for burst in itertools.cycle(_BURSTS):
            said, reason, stop = [], None, None
            while len(said) < burst and reason is None:
                token = next(tokens)
                count += 1
                said.append(token)
                if token in stops and count > (params.min_tokens or 0):
                    reason = "stop"
                    stop = None if token in eos and not params.ignore_eos else token
                elif count >= most:
                    reason = "length"
            logprobs = self._logprobs(said, params.logprobs)
            yield TokenOutput(new.request_id, said, reason, stop, logprobs, seed=seed)

    def _logprobs(self, tokens: list[int], top: int | None) -> list[TokenLogprobs] | None:
        """Return made-up log-probabilities: the sampled token leads, its neighbours follow."""
        if top is None:
            return None
        near = [[(t + i) % agent_model.VOCABULARY for i in range(top)] for t in tokens]
        return [
            TokenLogprobs(t, -0.5, 1, [(one, -0.5 - i, i + 1) for i, one in enumerate(others)])
            for t, others in zip(tokens, near, strict=True)
        ]


def load(config, progress, most, seconds):
    """Return the core, and what the server shows of it."""
    context = config.model.max_model_len or agent_model.CONTEXT
    embedder = Embedder(_EMBEDDING_SIZE) if config.model.task == "embed" else None
    info = ModelInfo(context, agent_model.VOCABULARY, "float32", "cpu", embedder=embedder)
    return RuleCore(Tokenizer.load(Path(config.model.model)), context, most, seconds), info


def engine_command(most: int) -> list[str]:
    """Return the command of the engine process, whose outputs end after ``most`` tokens."""
    return _command("engine", most, 0.0)


def kiln_command(most: int = agent_model.CONTEXT, seconds: float = 0.0) -> list[str]:
    """Return the ``kiln`` command with such an engine, whose steps take so many seconds."""
    return _command("kiln_main", most, seconds)


def _command(function: str, most: int, seconds: float) -> list[str]:
    places = [str(Path(kiln.__file__).parents[1]), str(Path(__file__).parent)]
    boot = f"import sys; sys.path[:0] = {places!r}; import agent_engine as own"
    return [sys.executable, "-P", "-c", f"{boot}; sys.exit(own.{function}({most}, {seconds}))"]


def engine(most: int, seconds: float) -> int:
    """Run the engine process."""
    return run(partial(load, most=most, seconds=seconds), sys.argv[1:])


def kiln_main(most: int, seconds: float) -> int:
    """Run the ``kiln`` command."""
    from kiln.engine.cli.main import main

    spawn = EngineProcess.spawn
    EngineProcess.spawn = lambda config: spawn(config, _command("engine", most, seconds))
    return main()
