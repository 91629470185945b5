"""The messages between the API process and the engine process, and their bytes (msgpack).

Requests go down and tokens come up; the two unions below are the whole conversation. Nothing is
pickled: a message holds numbers, strings and lists, and is checked against its type when read.
"""

from __future__ import annotations

import msgspec

from kiln.engine.config import EngineConfig
from kiln.engine.request import NewRequest, TokenOutput


class ModelInfo(msgspec.Struct, frozen=True):
    """What the engine serves, told once, when it is ready.

    ``kernels`` maps a kernel to the implementation that was chosen and why.
    """

    max_model_len: int  # tokens, prompt and output
    vocab_size: int
    dtype: str
    device: str
    kernels: dict[str, str] = {}


class Add(msgspec.Struct, frozen=True, tag=True):
    """Client to engine: start a request."""

    request: NewRequest


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Client to engine: nobody waits for this request any more; free what it holds."""

    request_id: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Client to engine: leave."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Engine to client while it loads: ``done`` of ``total`` units of a stage; 0 if unknown."""

    stage: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Engine to client: loaded; requests are welcome."""

    info: ModelInfo


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """Engine to client: what the steps so far gave. Empty ones are the heartbeat of long steps."""

    outputs: list[TokenOutput]
    num_steps: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Engine to client: this one request is not taken, the others go on. ``kind`` as in Failed."""

    request_id: str
    kind: str
    message: str
    param: str | None = None


class Stats(msgspec.Struct, frozen=True, tag=True):
    """Engine to client: the counts of the moment, by name."""

    values: dict[str, float]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Engine to client: the engine is about to exit.

    ``kind`` is the class of the error; ``expected`` tells that its message is fit for a user.
    """

    message: str
    kind: str
    expected: bool


ToEngine = Add | Abort | Stop
ToClient = Progress | Ready | Outputs | Refused | Stats | Failed


def to_engine_decoder() -> msgspec.msgpack.Decoder[ToEngine]:
    """Return a decoder of what a client sends; it raises msgspec.ValidationError on the rest."""
    return msgspec.msgpack.Decoder(ToEngine)


def to_client_decoder() -> msgspec.msgpack.Decoder[ToClient]:
    """Return a decoder of what an engine sends; it raises msgspec.ValidationError on the rest."""
    return msgspec.msgpack.Decoder(ToClient)


def encode_config(config: EngineConfig) -> str:
    """Return the configuration as JSON, for the engine's command line."""
    return msgspec.json.encode(config).decode()


def decode_config(text: str) -> EngineConfig:
    """Read a configuration written by ``encode_config``. Raises ConfigError on a bad value."""
    return msgspec.json.decode(text, type=EngineConfig)
