"""Every environment variable that Kiln reads; no other file uses ``os.environ``.

``read`` is called once at start-up, and its frozen result is passed down. An unknown or malformed
``KILN_`` variable stops the program. Each kernel family has a toggle with its name: the caller
passes the families' names, so a new family needs no edit here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

PREFIX = "KILN_"
# Kubernetes and Docker links inject these for a service named kiln: KILN_PORT_8000_TCP_ADDR.
_SERVICE = re.compile(
    r"KILN_(SERVICE_(HOST|PORT(_[A-Z0-9_]+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?)?)"
)
KernelChoice = Literal["auto", "jit", "triton", "torch"]
# Families whose toggle has other choices: no form of Triton's sums over ranks.
_CHOICES: Mapping[str, Any] = {"all_reduce": Literal["auto", "jit", "torch"]}
LORA, LORA_CHUNKED = "lora", "lora_chunked"  # families that KILN_LORA_BACKEND decides for too
CpuKernels = Literal["torch", "host", "host-check"]
Compile = Literal["off", "eager", "inductor", "aot"]
LoRABackend = Literal["auto", "jit", "csgmv", "triton", "torch_native"]
AllReduceAlgorithm = Literal["auto", "one_shot_push", "two_shot_push", "one_shot_pull", "two_shot"]
CacheMode = Literal["rw", "ro", "off", "refresh", "sealed"]


class EnvError(ValueError):
    """An environment variable is unknown or malformed."""


def _var(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class Env:
    """One attribute per variable, which is ``KILN_`` plus the attribute's name in capitals."""

    kernel_cache_dir: Path | None = _var(
        None, "Folder of compiled kernels; default $XDG_CACHE_HOME/kiln/kernels or ~/.cache/…."
    )
    kernel_cache: CacheMode = _var(
        "rw",
        "Kernel cache: read and write; read only; off; rebuild and replace; or sealed: a kernel "
        "that is not in it is an error.",
    )
    kernel_bundle: Path | None = _var(None, "Bundle of kernels, searched before the folder.")
    kernel_bundle_sha256: str | None = _var(None, "Required SHA-256 of the bundle.")
    kernel_cache_max_mb: int = _var(256, "Largest size of the folder after pruning, in megabytes.")
    kernel_cache_max_days: int = _var(90, "Days without use after which pruning removes a kernel.")
    kernel_cache_shared: bool = _var(
        False, "1: the users of one group share the folder, mode 2775."
    )
    kernel_trusted_uids: tuple[int, ...] = _var(
        (),
        "User ids, separated by commas, whose kernels are trusted besides your own and root's.",
    )
    kernel_lock_dir: Path | None = _var(
        None,
        "Local folder of the locks between processes that build the same kernel; default "
        "$XDG_RUNTIME_DIR/kiln or /dev/shm/kiln-<uid>.",
    )
    kernel_arch: str | None = _var(None, "Compile for this target, such as sm_90a.")
    cpu_kernels: CpuKernels = _var(
        "torch", "Kernels on a CPU: torch, or Kiln's own sources, plain or checked."
    )
    cpu_graphs: Literal["off", "emulate"] = _var(
        "off", "CUDA graphs on a CPU: none, or emulated with their rules checked."
    )
    graph_prefill: Literal["full", "piecewise", "off"] = _var(
        "full",
        "CUDA graphs of steps with prefills: of whole steps; of the pieces between attention "
        "layers; or none.",
    )
    graph_verify: str = _var(
        "fast",
        "Compare captured graphs with eager steps before they serve: off, fast (three sizes), full "
        "(all), or shadow:N, which also compares one of N steps while serving.",
    )
    graph_strict: bool = _var(
        False, "1: a graph that cannot be captured or differs from eager steps is an error."
    )
    compile: Compile = _var(
        "off",
        "torch.compile of what lies between two attention layers: off; eager, split but not "
        "compiled; inductor; or aot, AOTInductor packages.",
    )
    lora_backend: LoRABackend = _var(
        "auto",
        "What computes LoRA adapters: Kiln's kernels, by tiles of one adapter that the host makes "
        "(jit) or by chunks of sorted tokens, whose table the GPU makes (csgmv); Triton's; or "
        "torch. auto as for a family of kernels.",
    )
    lora_overlap: bool = _var(
        True, "0: in CUDA graphs, adapters run behind a layer only, and not beside it."
    )
    all_reduce_algorithm: AllReduceAlgorithm = _var(
        "auto",
        "How Kiln's kernels sum over ranks. auto chooses by the size of the message; the bits are "
        "the same.",
    )
    all_reduce_pcie: bool = _var(
        False, "1: Kiln's all-reduce also serves more than two GPUs without NVLink between them."
    )
    jit_jobs: int = _var(0, "Kernels compiled at once; 0 takes the number of cores, at most 8.")
    jit_after_ready: Literal["warn", "error"] = _var(
        "warn", "What to do if a kernel is compiled or loaded after the server is ready."
    )
    launcher: Literal["auto", "cuda-python", "cupy"] = _var(
        "auto",
        "Library that loads and launches kernels; auto: cuda-python from sm_90 on, because its "
        "launches can overlap, else CuPy if it is installed.",
    )
    host_compiler: str = _var("g++", "C++ compiler of the host toolchain: g++ or clang++.")
    kernels: Mapping[str, KernelChoice] = field(
        default_factory=lambda: MappingProxyType({}), metadata={"toggles": True}
    )

    def kernel_choice(self, family: str) -> KernelChoice:
        """Return the toggle of a kernel family; "auto" if it is not set."""
        return self.kernels.get(family, "auto")

    def asked(self, family: str) -> str:
        """Return the variable that decides for a kernel family, with its value: KILN_NORM=jit."""
        if family in (LORA, LORA_CHUNKED) and self.lora_backend != "auto":
            if self.lora_backend != "csgmv" or self.kernel_choice(LORA_CHUNKED) != "triton":
                return f"{PREFIX}LORA_BACKEND={self.lora_backend}"
            family = LORA_CHUNKED  # its toggle was set: see _with_lora_backend
        return f"{PREFIX}{family.upper()}={self.kernel_choice(family)}"


@dataclass(frozen=True, slots=True)
class Variable:
    """One row of the documentation: name, accepted values, default, current value, and help."""

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
        raise EnvError(f"{name}={text!r}: there is no home folder; use an absolute path") from None


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

    ``families`` are the kernel families; each has a toggle. Variables that Kubernetes injects for a
    service named kiln are ignored. Raises EnvError on an unknown ``KILN_`` name, suggesting the
    nearest known one, and on a malformed value.
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
            kind = _CHOICES.get(toggles[name], KernelChoice)
            choices[toggles[name]] = cast(KernelChoice, _parse(name, kind, text))
        elif name in known:
            attribute, kind = known[name]
            values[attribute] = _parse(name, kind, text)
        elif name.startswith(PREFIX) and not _SERVICE.fullmatch(name):
            near = get_close_matches(name, [*known, *toggles], 1)
            hint = f"; did you mean {near[0]}?" if near else "; `kiln env` lists them"
            raise EnvError(f"{name} is not a Kiln variable{hint}")
    env = Env(**values, kernels=MappingProxyType(choices))
    return env if env.lora_backend == "auto" else _with_lora_backend(env)


def _with_lora_backend(env: Env) -> Env:
    """Return the environment with the toggles of the LoRA kernels that follow from the backend.

    csgmv uses both families: chunks for the projections, and the embedding's A. Triton's forms
    take part in it only if KILN_LORA_CHUNKED says so.
    """
    wanted: dict[str, KernelChoice] = {LORA: "jit", LORA_CHUNKED: "auto"}  # auto: not used
    match env.lora_backend:
        case "csgmv":
            own = env.kernel_choice(LORA_CHUNKED)
            wanted[LORA] = wanted[LORA_CHUNKED] = "triton" if own == "triton" else "jit"
        case "triton":
            wanted[LORA] = "triton"
        case "torch_native":
            wanted[LORA] = "torch"
    for family, choice in wanted.items():
        toggle = env.kernel_choice(family)
        if toggle in ("auto", choice):
            continue
        name, backend = f"{PREFIX}{family.upper()}", f"{PREFIX}LORA_BACKEND={env.lora_backend}"
        needs = "does not use it" if choice == "auto" else f"needs {name}={choice}"
        raise EnvError(f"{name}={toggle} contradicts {backend}, which {needs}: unset one of them")
    return replace(env, kernels=MappingProxyType({**env.kernels, **wanted}))


def describe(families: Iterable[str], env: Env) -> list[Variable]:
    """Return every variable in declaration order, the families' toggles last."""
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
                _choices(_CHOICES.get(family, KernelChoice)),
                "auto",
                env.kernel_choice(family),
                f"Implementation of the {family} kernels on a GPU.",
            )
        )
    return rows


def user_cache_home() -> Path | None:
    """Return the user's cache folder, or None without a usable home."""
    return _user_folder("XDG_CACHE_HOME", ".cache")


def user_state_home() -> Path | None:
    """Return the user's folder for files such as histories, or None without a usable home."""
    return _user_folder("XDG_STATE_HOME", ".local/state")


def _user_folder(variable: str, inside_home: str) -> Path | None:
    xdg = os.environ.get(variable, "")
    if os.path.isabs(xdg):
        return Path(xdg)
    if not os.path.isabs(os.environ.get("HOME", "/")):  # HOME is empty or a relative path
        return None
    try:
        return Path.home() / inside_home
    except RuntimeError:  # no HOME, and a uid without a passwd entry
        return None


def traces_protocol() -> tuple[str, str]:
    """Return OpenTelemetry's variable that chooses how traces are sent, and its value.

    It is empty if none is set. Source: the specification of OpenTelemetry's OTLP exporter.
    """
    general = "OTEL_EXPORTER_OTLP_PROTOCOL"
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", general):
        if value := os.environ.get(name, "").strip():
            return name, value
    return general, ""


def wants_plain_text() -> bool:
    """Whether the user asks for no colours. Source: https://no-color.org."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def user_runtime_folder() -> Path | None:
    """Return XDG_RUNTIME_DIR, the user's folder for files of the login session, or None."""
    xdg = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(xdg) if os.path.isabs(xdg) else None


def torchrun_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what torchrun tells the processes that it starts; nothing in other processes.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables"
    """
    environ = os.environ if environ is None else environ
    if "TORCHELASTIC_RUN_ID" not in environ:
        return {}
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {
        name: value
        for name, value in environ.items()
        if name in names or name.startswith("TORCHELASTIC_")
    }


def prepare_nccl(*, one_machine: bool) -> None:
    """Set variables that NCCL and torch's use of it read, unless the user has set them.

    Ranks of one machine meet on no network. Buffers of CUDA graphs are not registered: NCCL may
    sum registered ones in another order, and a replayed step would differ from a launched one.
    By default torch ends the process when a rank is gone. That is off: Kiln tells clients first.
    Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
    """
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    if one_machine:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
