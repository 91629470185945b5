"""Render a template and a variant to one self-contained translation unit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files

from kiln.jit_kernels.declare.errors import CompileError
from kiln.jit_kernels.declare.spec import KernelSpec, Variant

_INCLUDE = re.compile(r'#[ \t]*include[ \t]*"([^"\n]+)"')  # only at the start of a line
_HEADER_NAME = re.compile(r"[a-z0-9_]+(/[a-z0-9_]+)*\.(cuh|h)")
_HOST_ONLY = frozenset({"cuda_host.h"})  # ptx.cuh includes it for the host compiler only
# Text that would read anything else: a file that is not passed in memory, or the time of day.
_OPENINGS = re.compile(
    r"^[ \t]*(?:#|%:|\?\?=)(?:[ \t]|/\*.*?\*/|\\\n)*(?:include\w*|embed|import)\b(?P<rest>[^\n]*)"
    r"|(?P<word>__has_include\w*|__has_embed|__DATE__|__TIME__|__TIMESTAMP__)",
    re.M,
)
_OPENING = re.compile(
    r'extern "C" __global__[^{]*\{\s*'
    r"kiln::(pdl_wait_then_trigger|pdl_wait|pdl_hints_first|pdl_reads_plan|pdl_writes_plan)\(\);"
)
_QUOTED = re.compile(r'[ \t]*"[^"\n]+"')


@dataclass(frozen=True, slots=True)
class Unit:
    """A translation unit: the text, and every header reachable from it, by include name."""

    name: str  # virtual file name, for messages
    text: str
    headers: Mapping[str, str]


@cache
def read_source(path: str) -> str:
    """Return a file under kernel_sources/ as text. Raises CompileError if it cannot be read.

    Line ends are not translated, so that every byte of the file is part of the key.
    """
    try:
        return files("kiln.kernel_sources").joinpath(path).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CompileError(f"kernel_sources/{path} cannot be read: {error}") from None


def prelude(variant: Variant) -> str:
    """Render the variant as #defines, which override the template's #ifndef defaults."""
    return "".join(f"#define {name.upper()} {value}\n" for name, value in variant.items())


def include_closure(text: str) -> dict[str, str]:
    """Return every header reachable from ``text``, as include name -> content.

    Raises CompileError on a missing header and on a name outside kernel_sources.
    """
    seen: dict[str, str] = {}
    todo = list(_included_by(text))
    while todo:
        name = todo.pop()
        if name in seen or name in _HOST_ONLY:
            continue
        if not _HEADER_NAME.fullmatch(name):
            raise CompileError(
                f'#include "{name}": write "kiln/…" for a header of kernel_sources/include/, or '
                '"<family>/…" for one beside the templates of a family'
            )
        seen[name] = closed_source(header_path(name))
        todo += _included_by(seen[name])
    return dict(sorted(seen.items()))


def header_path(name: str) -> str:
    """Return a header's path under kernel_sources/ from its name in an ``#include``.

    Headers ``kiln/…`` are shared by families and are in include/; headers ``<family>/…`` are beside
    the family's templates.
    """
    return f"include/{name}" if name.startswith("kiln/") else name


@lru_cache(maxsize=256)
def _included_by(text: str) -> tuple[str, ...]:
    # A pattern with a leading ^ takes seven times as long, because it is tried at every character.
    found = ((match, text.rfind("\n", 0, match.start()) + 1) for match in _INCLUDE.finditer(text))
    return tuple(match[1] for match, line in found if not text[line : match.start()].strip(" \t"))


def render(spec: KernelSpec, variant: Variant) -> Unit:
    """Return the translation unit of one variant.

    Raises CompileError on a missing file, and on a source that reads anything outside its key.
    """
    source = closed_source(spec.source)
    name = f"kernel_sources/{spec.source}"
    text = f'{prelude(variant)}#line 1 "{name}"\n{source}'
    return Unit(name, text, include_closure(source))


@cache
def early_launch_hint(path: str) -> str:
    """Return the call at the start of a source's kernel that allows an early launch, "" if none.

    An early launch starts before the previous kernel of the stream has ended (programmatic
    dependent launch). The result is the name of a function of kiln/ptx/launch.cuh, which documents
    the guarantee that each one gives.
    """
    found = _OPENING.search(read_source(path))
    return found[1] if found else ""


@cache
def closed_source(path: str) -> str:
    """Return a source file after checking that its build reads only inputs that the key covers.

    A template may include only headers of kernel_sources, by ``#include "…"``: no system header, no
    macro as a name, no date, no time. Raises CompileError.
    """
    text = read_source(path)
    for match in _OPENINGS.finditer(text):
        quoted = match["word"] is None and _QUOTED.match(match["rest"])
        if quoted and _INCLUDE.match(match[0].lstrip(" \t")):
            continue
        line = text.count("\n", 0, match.start()) + 1
        raise CompileError(
            f"kernel_sources/{path}({line}): {match[0].strip()!r} reads an input that no key "
            f'covers; include headers of kernel_sources/ by #include "kiln/…" or "<family>/…"'
        )
    return text
