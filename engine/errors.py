"""The engine's error tree.

KilnError
├── ConfigError      a flag, a folder or a model's file is invalid or unsupported
│   ├── ModelError   the model folder is missing, incomplete, corrupt or unsupported
│   ├── AdapterError the folder of a LoRA adapter is; the message names the adapter
│   │   └── AdapterPathError   a path given while serving is outside of lora_root
│   ├── PieceError   torch.compile cannot trace, split, build or load the pieces of a model
│   └── SealedCacheError   the kernel cache is sealed and lacks a kernel of the model
├── RequestError     one request is invalid; it never reaches the engine
│   ├── ContextLengthError   the prompt does not fit the model's context
│   ├── AdapterNotFoundError the request names a LoRA adapter that is not loaded
│   └── QueueFullError   the request is valid, but the queue is full
├── EmbeddingError   the engine failed at one text to be embedded; it serves the others
├── AdapterBusyError a LoRA adapter is in use, or the place that it needs
├── SlowReaderError  the reader of a stream fell too far behind; the stream ends
├── DeviceError      the device fails every call from now on; only a new process can use it
│   └── CustomAllReduceTimeout   a rank did not come to a sum over the ranks; the message names it
├── EngineClosedError  the engine was closed, or this process is a fork of the one that made it
└── EngineDeadError  the engine process is gone or frozen
    └── RequestLostError   it had the request, which may be what ended it: do not send it again
"""

from __future__ import annotations

import sys


class KilnError(Exception):
    """Base of all errors that Kiln raises on purpose; the message can be shown to users."""


class ConfigError(KilnError):
    """A setting is out of range or conflicts with another."""


class ModelError(ConfigError):
    """A model folder is missing, half-downloaded, corrupt, or of an unknown architecture."""


class AdapterError(ConfigError):
    """A LoRA adapter is missing, damaged, does not fit the model, or needs what Kiln lacks."""


class AdapterPathError(AdapterError):
    """A path that was given while serving is not inside lora_root."""


class PieceError(ConfigError):
    """The pieces of a model cannot be traced, split, built or loaded with torch.compile."""


class SealedCacheError(ConfigError):
    """The kernel cache is sealed and lacks a kernel that the engine needs."""


def explain_import(error: ImportError) -> ConfigError | None:
    """Return what to tell of a package that is not installed; None for any other fault."""
    package = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or package in ("", "kiln"):
        return None
    return ConfigError(
        f"the Python package {package} is not installed; run `pip install -e .` in Kiln's "
        f"checkout with the pip of {sys.executable}, or delete .venv and run `make serve`"
    )


def loading_error(kind: str, message: str) -> ConfigError:
    """Return an error that another process raised while it loaded, by the name of its class.

    A name that is none of a ConfigError's gives a ConfigError.
    """
    known = {one.__name__: one for one in (ModelError, AdapterError, PieceError, SealedCacheError)}
    known["SealedMiss"] = SealedCacheError  # the kernel cache's own error
    return known.get(kind, ConfigError)(message)


class RequestError(KilnError):
    """One request is invalid. ``param`` names the offending field, if any."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def field_error(where: str, says: str) -> RequestError:
    """Return the error of a field: its path, such as ``messages[0].role``, and what is wrong."""
    return RequestError(f"{where}: {says}", where)


class ContextLengthError(RequestError):
    """The prompt is longer than the model's context."""


def too_long(context: int, problem: str, param: str = "prompt") -> ContextLengthError:
    """Return the error of a prompt that does not fit a context of so many tokens.

    Clients recognise OpenAI's first sentence, and then shorten the conversation.
    """
    return ContextLengthError(
        f"This model's maximum context length is {context} tokens. However, {problem}", param
    )


class AdapterNotFoundError(RequestError):
    """The request names a LoRA adapter that is not loaded."""


class QueueFullError(RequestError):
    """The queue is full; the same request may be accepted later."""


class EmbeddingError(KilnError):
    """The engine failed at one request for an embedding; it serves the others."""


class AdapterBusyError(KilnError):
    """Requests use a LoRA adapter, or the place that it needs; it may be free later."""


class DeviceError(KilnError):
    """The device fails every call from now on; only a new process can use it again."""


class CustomAllReduceTimeout(DeviceError):
    """A rank waited for another one in a sum over the ranks until its time limit."""


class SlowReaderError(KilnError):
    """Tokens arrive faster than the stream's reader takes them, and too many are waiting."""


class EngineClosedError(KilnError):
    """The engine was closed, or runs in the process that this one was forked from."""


class EngineDeadError(KilnError):
    """The engine process died or stopped making progress; requests in flight are lost."""


class RequestLostError(EngineDeadError):
    """The engine ended while it had this request.

    The request may be what ended it. So it must not be sent again without the user's decision.
    """
