"""The state shared by the routes: engine, tokenizer, settings, and readiness."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

from kiln.engine.errors import ConfigError, EngineDeadError, ModelError, RequestError
from kiln.engine.models.model_folder import read_json
from kiln.engine.process.client import EngineClient
from kiln.engine.process.supervisor import Supervisor
from kiln.engine.process.wire import ModelInfo
from kiln.engine.requests.adapter_job import AdapterInfo
from kiln.engine.requests.sampling_params import SamplingParams
from kiln.engine.server.errors import ApiError
from kiln.engine.server.grammars import GrammarGuard
from kiln.engine.server.metrics import Metrics
from kiln.engine.server.protocol import Defaults
from kiln.engine.server.threads import Threads
from kiln.engine.server.tracing import RequestTraces
from kiln.engine.text.replies.choice import ReplyFormats
from kiln.engine.text.tokenizer import Tokenizer

_SHOWN_NAMES = 400  # characters
MAX_BODY_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The server's settings.

    ``served_model_names``: the model's names for requests, with at least one. ``adapters``: the
    names of the LoRA adapters of the start. ``replies``: how the model writes reasoning and tool
    calls. ``ignore_unknown_fields``: fields of a request that Kiln does not know are a line in the
    log instead of an error. ``quiet_paths``: paths that the access log leaves out; None: there is
    no access log. ``root_path``: where a proxy serves this server, such as "/kiln".
    ``allowed_hosts``: the names that a request's Host may have; None: all. Raises ConfigError if a
    name is empty or used twice.
    """

    served_model_names: tuple[str, ...]
    defaults: Defaults = field(default_factory=Defaults)
    api_key: str | None = None
    adapters: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()  # of pages that may use the API; "*": all
    max_body_bytes: int = MAX_BODY_BYTES
    ignore_unknown_fields: bool = False
    replies: ReplyFormats = field(default_factory=ReplyFormats)
    quiet_paths: tuple[str, ...] | None = None
    root_path: str = ""
    allowed_hosts: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Check the names."""
        names = self.served_model_names
        for name in names:
            if not name or names.count(name) > 1:
                raise ConfigError(
                    f"served_model_name={name[:80]!r}: is empty or given twice; give names that "
                    "differ"
                )
            if name in self.adapters:
                raise ConfigError(
                    f"lora_modules name={name[:80]!r}: is a name of the model; rename one of them"
                )

    @property
    def served_model_name(self) -> str:
        """The first name: of metrics, and of an answer to a request without a name."""
        return self.served_model_names[0]


class ServedModel(NamedTuple):
    """What answers a request: the name in its response, and the LoRA adapter if it is one."""

    name: str
    adapter: str | None = None


@dataclass(slots=True)
class Serving:
    """The state shared by the routes. ``draining`` becomes true at shutdown."""

    engine: Supervisor
    tokenizer: Tokenizer | None
    settings: ServerSettings
    metrics: Metrics
    traces: RequestTraces | None = None
    threads: Threads = field(default_factory=Threads)
    grammars: GrammarGuard = field(init=False)
    started: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False

    def __post_init__(self) -> None:
        """Make what tries grammars out."""
        self.grammars = GrammarGuard(self._vocabulary)

    def _vocabulary(self) -> dict[str, object]:
        assert self.tokenizer is not None, "without one there are no grammars"
        return {
            "tokenizer": self.tokenizer.backend.to_str(),
            "vocab_size": self.client.model_info.vocab_size,
            "eos_token_ids": sorted(self.tokenizer.eos_token_ids),
        }

    @property
    def client(self) -> EngineClient:
        """The client of the engine that serves, or of the last one that did."""
        return self.engine.client

    def require_ready(self) -> ModelInfo:
        """Return the served model. Raises ApiError 503 while the engine is not ready."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="draining", retry_after=5)
        if self.engine.is_restarting:
            message = "the engine has ended and is being restarted"
            raise ApiError(503, message, code="restarting", retry_after=5)
        if not self.client.is_alive:
            raise ApiError(503, "the engine has stopped", code="engine_unavailable", retry_after=5)
        try:
            return self.client.model_info
        except EngineDeadError as error:
            raise ApiError(503, str(error), code="loading", retry_after=5) from error

    @property
    def adapters(self) -> dict[str, AdapterInfo]:
        """The loaded LoRA adapters by name; none while the model loads."""
        return self.client.adapters.adapters

    def require_model(self, name: str | None) -> ServedModel:
        """Return what a model's name stands for; None is the base model.

        An adapter is requested as "name" or as "base:name", where base is a name of the model.
        Raises ApiError 404 for another name: it never stands for the base model.
        """
        served, adapters = self.settings.served_model_names, self.adapters
        if name is None or name in served:
            return ServedModel(self.settings.served_model_name if name is None else name)
        bases = [base for base in served if name.startswith(f"{base}:")]
        for adapter in (name, *(name.removeprefix(f"{base}:") for base in bases)):
            if adapter in adapters:
                return ServedModel(adapter, adapter)
        known = ", ".join(repr(one) for one in (*served, *adapters))[:_SHOWN_NAMES]
        message = f"model: {name[:80]!r} is not served here; these are: {known}"
        raise ApiError(404, message, "model", "model_not_found")


def read_defaults(folder: Path) -> Defaults:
    """Return the model's default sampling values from generation_config.json.

    ``do_sample`` false means greedy. Raises ModelError on a file that is not JSON and on a value
    that is invalid in a request.
    """
    path = folder / "generation_config.json"
    config = read_json(path)
    names = [field.name for field in fields(Defaults)]
    found = {name: config[name] for name in names if config.get(name) is not None}
    if config.get("do_sample") is False:
        found["temperature"] = 0.0
    try:
        SamplingParams(**found)
    except RequestError as error:
        raise ModelError(f"{path}: {error}") from error
    return Defaults(**found)
