"""The engine's error tree.

KilnError
├── ConfigError      a flag, a folder or a model's file asks for what cannot be served
│   ├── ModelError   the model folder is missing, incomplete, corrupt or of an unknown kind
│   └── SealedCacheError   the kernel cache is sealed, and a kernel of the model is not in it
├── RequestError     one request is invalid; it never reaches the engine
│   ├── ContextLengthError   the prompt does not fit the model's context
│   └── QueueFullError   the request is fine, but too many wait already
├── SlowReaderError  the reader of an answer fell too far behind; the answer ends
├── DeviceError      the device fails every call from now on; only a new process can use it
└── EngineDeadError  the engine process is gone or frozen
"""

from __future__ import annotations


class KilnError(Exception):
    """Base of every error that Kiln raises on purpose; its message is fit to show to a user."""


class ConfigError(KilnError):
    """A setting is out of range or does not fit the others."""


class ModelError(ConfigError):
    """A model folder is missing, half-downloaded, corrupt, or of an unknown architecture."""


class SealedCacheError(ConfigError):
    """The kernel cache is sealed, and lacks a kernel that the engine needs."""


class RequestError(KilnError):
    """One request is invalid. ``param`` names the field that is to blame, if one is."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestError):
    """The prompt is longer than the model's context."""


class QueueFullError(RequestError):
    """Too many requests wait already; the same request may be accepted later."""


class DeviceError(KilnError):
    """The device fails every call from now on; only a new process can use it again."""


class SlowReaderError(KilnError):
    """The tokens of an answer arrive faster than its reader takes them, and too many wait."""


class EngineDeadError(KilnError):
    """The engine process died or stopped making progress; requests in flight are lost."""
