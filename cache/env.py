"""Every environment variable that Kiln reads: the only file that touches ``os.environ``.

``read`` is called once, at start-up; the frozen result is passed down. A misspelt or malformed
``KILN_`` variable stops the program. Each kernel family adds a toggle of its own name: the caller
passes the families' names, so that a new family needs no edit here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

PREFIX = "KILN_"
# What Kubernetes and Docker links inject for a service named kiln, such as KILN_PORT_8000_TCP_ADDR.
_SERVICE = re.compile(
    r"KILN_(SERVICE_(HOST|PORT(_[A-Z0-9_]+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?)?)"
)
KernelChoice = Literal["auto", "jit", "triton", "torch"]
CpuKernels = Literal["torch", "host", "host-check"]
CacheMode = Literal["rw", "ro", "off", "refresh", "sealed"]


class EnvError(ValueError):
    """An environment variable is unknown or malformed."""


def _var(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class Env:
    """One attribute a variable: ``KILN_`` plus the attribute's name in capitals."""

    kernel_cache_dir: Path | None = _var(
        None, "Folder of compiled kernels; default $XDG_CACHE_HOME/kiln/kernels or ~/.cache/…."
    )
    kernel_cache: CacheMode = _var(
        "rw",
        "Kernels on disk: read and write; read only; neither; build anew and replace; or sealed: "
        "a kernel that is not there is an error.",
    )
    kernel_bundle: Path | None = _var(None, "Bundle of kernels, read before the folder.")
    kernel_bundle_sha256: str | None = _var(None, "SHA-256 that the bundle must have.")
    kernel_cache_max_mb: int = _var(256, "Megabytes that pruning leaves in the folder.")
    kernel_cache_max_days: int = _var(90, "Days without use after which pruning drops a kernel.")
    kernel_cache_shared: bool = _var(
        False, "1: a folder that several users of one group fill, mode 2775."
    )
    kernel_trusted_uids: tuple[int, ...] = _var(
        (),
        "Users, as numbers with commas, whose kernels are believed besides one's own and root's.",
    )
    kernel_lock_dir: Path | None = _var(
        None,
        "Folder on this machine where builders of one kernel wait for each other; default "
        "$XDG_RUNTIME_DIR/kiln or /dev/shm/kiln-<uid>.",
    )
    kernel_arch: str | None = _var(None, "Compile for this target, such as sm_90a.")
    cpu_kernels: CpuKernels = _var(
        "torch", "Kernels on a CPU: torch, or Kiln's own sources, plain or checked."
    )
    jit_jobs: int = _var(0, "Kernels compiled at once; 0 takes the number of cores, at most 8.")
    jit_after_ready: Literal["warn", "error"] = _var(
        "warn", "What a compile or a load of a kernel is once the server is ready."
    )
    launcher: Literal["auto", "cuda-python", "cupy"] = _var(
        "auto",
        "What loads and launches kernels on a GPU; auto takes cuda-python, whose launches overlap, "
        "from sm_90 on, and CuPy before that where it is installed.",
    )
    host_compiler: str = _var("g++", "C++ compiler of the host toolchain: g++ or clang++.")
    kernels: Mapping[str, KernelChoice] = field(
        default_factory=lambda: MappingProxyType({}), metadata={"toggles": True}
    )

    def kernel_choice(self, family: str) -> KernelChoice:
        """Return the toggle of a kernel family: "auto" where nothing was set."""
        return self.kernels.get(family, "auto")


@dataclass(frozen=True, slots=True)
class Variable:
    """One row of the documentation: name, accepted values, default, value now, and help."""

    name: str
    values: str
    default: str
    value: str
    help: str


def _own_fields() -> list[Any]:
    return [f for f in fields(Env) if "toggles" not in f.metadata]


def _parse(name: str, kind: Any, text: str) -> Any:
    if get_origin(kind) is Literal:
        if text in get_args(kind):
            return text
        raise EnvError(f"{name}={text!r}: choose one of {', '.join(get_args(kind))}")
    if kind is bool:
        if text in ("0", "1"):
            return text == "1"
        raise EnvError(f"{name}={text!r}: choose one of 0, 1")
    if kind is int:
        return _number(name, text, text)
    if kind == tuple[int, ...]:
        return tuple(_number(name, text, part.strip()) for part in text.split(","))
    if not text:
        raise EnvError(f"{name} is empty: give it a value or unset it")
    return _path(name, text) if kind == Path | None else text


def _number(name: str, text: str, part: str) -> int:
    if part.isascii() and part.isdigit():
        return int(part)
    raise EnvError(f"{name}={text!r}: {part!r} is not a whole number, 0 or more")


def _path(name: str, text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise EnvError(f"{name}={text!r}: there is no home folder; write the whole path") from None


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return ",".join(str(part) for part in value)
    return str(int(value)) if isinstance(value, bool) else str(value)


def _choices(kind: Any) -> str:
    if kind is bool:
        return "0 | 1"
    return " | ".join(get_args(kind)) if get_origin(kind) is Literal else ""


def read(families: Iterable[str], environ: Mapping[str, str] | None = None) -> Env:
    """Return the environment as typed values.

    ``families`` are the kernel families, each of which has a toggle. Raises EnvError on an
    unknown ``KILN_`` name, with the nearest known one, and on a value that cannot be read. The
    variables that Kubernetes injects for a service named kiln are no settings: they are ignored.
    """
    environ = os.environ if environ is None else environ
    kinds = get_type_hints(Env)
    known: dict[str, tuple[str, Any]] = {
        PREFIX + f.name.upper(): (f.name, kinds[f.name]) for f in _own_fields()
    }
    toggles = {PREFIX + family.upper(): family for family in families}
    values: dict[str, Any] = {}
    choices: dict[str, KernelChoice] = {}
    for name, text in environ.items():
        if name in toggles:
            choices[toggles[name]] = cast(KernelChoice, _parse(name, KernelChoice, text))
        elif name in known:
            attribute, kind = known[name]
            values[attribute] = _parse(name, kind, text)
        elif name.startswith(PREFIX) and not _SERVICE.fullmatch(name):
            near = get_close_matches(name, [*known, *toggles], 1)
            hint = f"; did you mean {near[0]}?" if near else "; `kiln env` lists them"
            raise EnvError(f"{name} is not a Kiln variable{hint}")
    return Env(**values, kernels=MappingProxyType(choices))


def describe(families: Iterable[str], env: Env) -> list[Variable]:
    """Return every variable in the order of declaration, the families' toggles last."""
    kinds = get_type_hints(Env)
    rows = []
    for f in _own_fields():
        name, shown = PREFIX + f.name.upper(), _shown(getattr(env, f.name))
        rows.append(
            Variable(name, _choices(kinds[f.name]), _shown(f.default), shown, f.metadata["help"])
        )
    for family in families:
        rows.append(
            Variable(
                PREFIX + family.upper(),
                " | ".join(get_args(KernelChoice)),
                "auto",
                env.kernel_choice(family),
                f"Implementation of the {family} kernels on a GPU.",
            )
        )
    return rows


def user_cache_home() -> Path | None:
    """Return the user's cache folder, or None where there is no usable home."""
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):
        return Path(xdg)
    if not os.path.isabs(os.environ.get("HOME", "/")):  # set, to nothing or to a relative path
        return None
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # no HOME, and a uid without a passwd entry
        return None


def user_runtime_folder() -> Path | None:
    """Return the user's folder for files that live as long as a login, or None."""
    xdg = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(xdg) if os.path.isabs(xdg) else None
