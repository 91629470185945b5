"""The messages between the API process and the engine process, encoded as msgpack.

The two unions below list all messages, one for each direction. Nothing is pickled: messages hold
numbers, strings and lists, and their types are validated when decoded.
"""

from __future__ import annotations

import msgspec

from kiln.engine.requests.adapter_job import AdapterInfo, LoadAdapter, UnloadAdapter
from kiln.engine.requests.pooling import Embedder
from kiln.engine.requests.request import NewRequest, TokenOutput
from kiln.engine.requests.step_log import StepRecord


class ModelInfo(msgspec.Struct, frozen=True):
    """The served model, sent once when the engine is ready.

    ``kernels`` maps each kernel to the chosen implementation and the reason. ``budget``: how many
    tokens a step has at most, and why. ``embedder``: how it makes embeddings; None: it generates.
    ``image_token_ids``: no prompt may have them.
    """

    max_model_len: int  # tokens, prompt and output
    vocab_size: int
    dtype: str
    device: str
    kernels: dict[str, str] = {}
    budget: str = ""
    embedder: Embedder | None = None
    image_token_ids: list[int] = []


class Add(msgspec.Struct, frozen=True, tag=True):
    """Client to engine: start a request."""

    request: NewRequest


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Client to engine: drop this request and free its blocks."""

    request_id: str


class Load(msgspec.Struct, frozen=True, tag=True):
    """Client to engine: load a LoRA adapter; JobDone is the answer."""

    job: LoadAdapter


class Unload(msgspec.Struct, frozen=True, tag=True):
    """Client to engine: unload a LoRA adapter; JobDone is the answer."""

    job: UnloadAdapter


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Client to engine: forget the prefix index. Requests that are sent later find nothing."""


class WatchSteps(msgspec.Struct, frozen=True, tag=True):
    """Client to engine: for so many seconds, send the records of the last steps and of new ones."""

    seconds: float


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Client to engine: exit."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Engine to client while it loads: ``done`` of ``total`` units of a stage; 0 if unknown."""

    stage: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Engine to client: the model is loaded; requests are accepted."""

    info: ModelInfo


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """Engine to client: new outputs. Empty ones are the heartbeat during long steps."""

    outputs: list[TokenOutput]
    num_steps: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Engine to client: this request was rejected. ``kind`` as in Failed."""

    request_id: str
    kind: str
    message: str
    param: str | None = None


class Adapters(msgspec.Struct, frozen=True, tag=True):
    """Engine to client: the loaded LoRA adapters, whenever they have changed."""

    infos: list[AdapterInfo]


class JobDone(msgspec.Struct, frozen=True, tag=True):
    """Engine to client: a load or unload has ended. ``kind`` as in Failed; None: it succeeded."""

    job_id: str
    kind: str | None = None
    message: str = ""


class Stats(msgspec.Struct, frozen=True, tag=True):
    """Engine to client: the current counts by name; some are maps by label."""

    values: dict[str, float | dict[str, float]]


class Steps(msgspec.Struct, frozen=True, tag=True):
    """Engine to client, with Stats and only while it is asked to: steps that were not sent yet."""

    records: list[StepRecord]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Engine to client: the engine is about to exit.

    ``kind`` is the error's class; ``expected``: its message can be shown to users.
    """

    message: str
    kind: str
    expected: bool


ToEngine = Add | Abort | Load | Unload | ResetPrefixCache | WatchSteps | Stop
ToClient = Progress | Ready | Outputs | Refused | Adapters | JobDone | Stats | Steps | Failed
