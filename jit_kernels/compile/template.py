"""Template plus variant to one self-contained translation unit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from kiln.jit_kernels.errors import CompileError
from kiln.jit_kernels.spec import KernelSpec, Variant

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.M)
_HOST_ONLY = frozenset({"cuda_host.h"})  # stands behind the compiler switch of ptx.cuh


@dataclass(frozen=True, slots=True)
class Unit:
    """What a compiler reads: the text, and every header that it can reach, by include name."""

    name: str  # virtual file name, for messages
    text: str
    headers: Mapping[str, str]


@cache
def read_source(path: str) -> str:
    """Return a file under kernel_sources/ as text. Raises CompileError when it is absent."""
    try:
        return files("kiln.kernel_sources").joinpath(path).read_text(encoding="utf-8")
    except OSError as error:
        raise CompileError(f"kernel_sources/{path} cannot be read: {error}") from None


def prelude(variant: Variant) -> str:
    """Render the variant as #defines that come before the template's own #ifndef defaults."""
    return "".join(f"#define {name.upper()} {value}\n" for name, value in variant.items())


def include_closure(text: str) -> dict[str, str]:
    """Return every header reachable from ``text``, as include name -> content."""
    seen: dict[str, str] = {}
    todo = _INCLUDE.findall(text)
    while todo:
        name = todo.pop()
        if name not in seen and name not in _HOST_ONLY:
            seen[name] = read_source(f"include/{name}")
            todo += _INCLUDE.findall(seen[name])
    return dict(sorted(seen.items()))


def render(spec: KernelSpec, variant: Variant) -> Unit:
    """Return the translation unit of one variant. Raises CompileError on a missing file."""
    source = read_source(spec.source)
    name = f"kernel_sources/{spec.source}"
    text = f'{prelude(variant)}#line 1 "{name}"\n{source}'
    return Unit(name, text, include_closure(source))
