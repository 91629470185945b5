"""Template plus variant to one self-contained translation unit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files

from kiln.jit_kernels.errors import CompileError
from kiln.jit_kernels.spec import KernelSpec, Variant

_INCLUDE = re.compile(r'#[ \t]*include[ \t]*"([^"\n]+)"')  # where nothing but blanks is before it
_HEADER_NAME = re.compile(r"[a-z0-9_]+(/[a-z0-9_]+)*\.(cuh|h)")
_HOST_ONLY = frozenset({"cuda_host.h"})  # stands behind the compiler switch of ptx.cuh
# What would let the outside in: a file that is not passed in memory, or the time of day.
_OPENINGS = re.compile(
    r"^[ \t]*(?:#|%:|\?\?=)(?:[ \t]|/\*.*?\*/|\\\n)*(?:include\w*|embed|import)\b(?P<rest>[^\n]*)"
    r"|(?P<word>__has_include\w*|__has_embed|__DATE__|__TIME__|__TIMESTAMP__)",
    re.M,
)
_OPENING = re.compile(
    r'extern "C" __global__[^{]*\{\s*'
    r"kiln::(take_turn|pdl_wait|pdl_hints_first|pdl_reads_plan|pdl_writes_plan)\(\);"
)
_QUOTED = re.compile(r'[ \t]*"[^"\n]+"')


@dataclass(frozen=True, slots=True)
class Unit:
    """What a compiler reads: the text, and every header that it can reach, by include name."""

    name: str  # virtual file name, for messages
    text: str
    headers: Mapping[str, str]


@cache
def read_source(path: str) -> str:
    """Return a file under kernel_sources/ as text. Raises CompileError when it is absent.

    The text is the file's bytes, line ends included, so that every byte counts in the key.
    """
    try:
        return files("kiln.kernel_sources").joinpath(path).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CompileError(f"kernel_sources/{path} cannot be read: {error}") from None


def prelude(variant: Variant) -> str:
    """Render the variant as #defines that come before the template's own #ifndef defaults."""
    return "".join(f"#define {name.upper()} {value}\n" for name, value in variant.items())


def include_closure(text: str) -> dict[str, str]:
    """Return every header reachable from ``text``, as include name -> content.

    Raises CompileError on an absent one, and on a name that leaves kernel_sources.
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
    """Return where a header lies below kernel_sources/, by its name in an ``#include``.

    ``kiln/…`` is shared by families and lies in include/; ``<family>/…`` lies beside the family's
    templates.
    """
    return f"include/{name}" if name.startswith("kiln/") else name


@lru_cache(maxsize=256)
def _included_by(text: str) -> tuple[str, ...]:
    # A pattern that begins with ^ would take seven times as long: it is tried at every letter.
    found = ((match, text.rfind("\n", 0, match.start()) + 1) for match in _INCLUDE.finditer(text))
    return tuple(match[1] for match, line in found if not text[line : match.start()].strip(" \t"))


def render(spec: KernelSpec, variant: Variant) -> Unit:
    """Return the translation unit of one variant.

    Raises CompileError on a missing file, and on a source that reaches out of the closed world.
    """
    source = closed_source(spec.source)
    name = f"kernel_sources/{spec.source}"
    text = f'{prelude(variant)}#line 1 "{name}"\n{source}'
    return Unit(name, text, include_closure(source))


@cache
def early_launch_hint(path: str) -> str:
    """Return what a source's kernel begins with that allows to launch it early, "" for nothing.

    The name of a function of kiln/ptx/launch.cuh, which says what it promises.
    """
    found = _OPENING.search(read_source(path))
    return found[1] if found else ""


@cache
def closed_source(path: str) -> str:
    """Return a source that reads nothing but the headers that its key names.

    Everything that can change a cubin must be in its key, so a template includes only headers of
    kernel_sources, by ``#include "…"``: no system header, no macro for a name, no date, no time.
    """
    text = read_source(path)
    for match in _OPENINGS.finditer(text):
        quoted = match["word"] is None and _QUOTED.match(match["rest"])
        if quoted and _INCLUDE.match(match[0].lstrip(" \t")):
            continue
        line = text.count("\n", 0, match.start()) + 1
        raise CompileError(
            f"kernel_sources/{path}({line}): {match[0].strip()!r} reads what the key of a build "
            f'cannot name; include headers of kernel_sources/ by #include "kiln/…" or "<family>/…"'
        )
    return text
