"""A key covers every input that can change a cubin, and nothing else."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
from depth import at_depth

from kiln.jit_kernels.compile import ingredients
from kiln.jit_kernels.compile.ingredients import (
    differing,
    ingredients_of,
    key_of,
    stored_ingredients,
)
from kiln.jit_kernels.declare.errors import CompileError
from kiln.jit_kernels.registry import all_specs, find_spec
from kiln.jit_kernels.toolchains import nvrtc, template
from kiln.jit_kernels.toolchains.template import header_path, read_source, render

SPECS = [pytest.param(spec, id=spec.name) for spec in all_specs().values()]
TOOLCHAIN = "nvrtc/aa/bb"


def key(spec, variant, arch="sm_90a", toolchain=TOOLCHAIN):
    return key_of(ingredients_of(spec, render(spec, variant), arch, toolchain))


@pytest.fixture
def sources(monkeypatch):
    """Let a test replace sources: path -> text."""
    changed = {}
    monkeypatch.setattr(
        template, "closed_source", lambda path: changed.get(path) or read_source(path)
    )
    return changed


def reachable(spec):
    unit = render(spec, next(iter(spec.variants())))
    return [spec.source, *map(header_path, unit.headers)]


TEMPLATES = list({spec.source: spec for spec in all_specs().values()}.values())
STEP = 13


@pytest.mark.quick(8)
@pytest.mark.parametrize("spec", TEMPLATES, ids=lambda spec: spec.name)
def test_any_byte_of_any_reachable_file_changes_the_key(spec, sources):
    """Every byte in the first kernel that includes a file; every thirteenth in the others.

    In quick runs every 149th.
    """
    variant = next(iter(spec.variants()))
    before = key(spec, variant)
    earlier = TEMPLATES[: TEMPLATES.index(spec)]
    known = {path for one in earlier for path in reachable(one)}
    for path in reachable(spec):
        text = read_source(path)
        step = at_depth(149, STEP if path in known else 1)
        places = range(len(earlier) % step, len(text), step)
        for place in places:
            other = chr(ord(text[place]) ^ 1)
            sources[path] = text[:place] + other + text[place + 1 :]
            with contextlib.suppress(CompileError):  # an #include that is broken now
                assert key(spec, variant) != before, f"{path} byte {place}"
        del sources[path]
    assert key(spec, variant) == before


def test_a_line_end_is_a_byte_too(sources):
    spec = find_spec("rms_norm")
    variant = next(iter(spec.variants()))
    before = key(spec, variant)
    for path in reachable(spec):
        sources[path] = read_source(path).replace("\n", "\r\n", 1)
        assert key(spec, variant) != before
        del sources[path]


def test_a_source_is_read_as_the_bytes_that_it_is(monkeypatch, tmp_path):
    (tmp_path / "x.cuh").write_bytes("a\r\nb\rc … \n".encode())
    monkeypatch.setattr(template, "files", lambda package: tmp_path)
    assert read_source.__wrapped__("x.cuh") == "a\r\nb\rc … \n"


@pytest.mark.parametrize("spec", SPECS)
def test_every_other_ingredient_changes_the_key(spec, monkeypatch):
    keys = []
    for variant in spec.variants():
        keys += [key(spec, variant), key(spec, variant, "sm_90"), key(spec, variant, "sm_80")]
        keys += [key(spec, variant, toolchain=f"{TOOLCHAIN}0")]
        keys.append(key(dataclasses.replace(spec, entry="other"), variant))
        unit = render(spec, variant)
        renamed = dataclasses.replace(unit, name="kernel_sources/other.cu")
        keys.append(key_of(ingredients_of(spec, renamed, "sm_90a", TOOLCHAIN)))
        extra = dataclasses.replace(unit, headers={**unit.headers, "kiln/zz.cuh": ""})
        keys.append(key_of(ingredients_of(spec, extra, "sm_90a", TOOLCHAIN)))
    assert len(set(keys)) == len(keys)


def test_every_option_and_their_order_change_the_key(monkeypatch):
    spec = find_spec("rms_norm")
    variant = next(iter(spec.variants()))
    options = nvrtc.options("sm_90a")
    lists = [options, [*options, "-lineinfo"], options[::-1]]
    lists += [options[:i] + options[i + 1 :] for i in range(len(options))]
    lists += [[*options[:i], options[i] + "0", *options[i + 1 :]] for i in range(len(options))]
    keys = set()
    for one in lists:
        monkeypatch.setattr(nvrtc, "options", lambda arch, one=one: one)
        keys.add(key(spec, variant))
    assert len(keys) == len(lists)


def test_nothing_else_changes_a_key(sources):
    keys = {
        (spec.name, str(variant)): key(spec, variant)
        for spec in all_specs().values()
        for variant in spec.variants()
    }
    assert len(set(keys.values())) == len(keys)
    for changed in [spec.source for spec in all_specs().values()]:
        sources[changed] = read_source(changed) + " "
        for spec in all_specs().values():
            for variant in spec.variants():
                same = key(spec, variant) == keys[spec.name, str(variant)]
                assert same == (changed not in reachable(spec))
        del sources[changed]
    # Only the norms include reduce.cuh.
    sources["include/kiln/math/reduce.cuh"] = read_source("include/kiln/math/reduce.cuh") + " "
    for spec in all_specs().values():
        unit = render(spec, next(iter(spec.variants())))
        same = key(spec, next(iter(spec.variants())))
        was = keys[spec.name, str(next(iter(spec.variants())))]
        assert (same == was) == ("kiln/math/reduce.cuh" not in unit.headers)
    # NVRTC never includes the header of the host toolchain.
    assert all(
        "cuda_host.h" not in path for spec in all_specs().values() for path in reachable(spec)
    )


@pytest.mark.parametrize(
    "line",
    [
        "#include <cuda/atomic>",
        "#include </etc/passwd>",
        '#include "../secret.cuh"',
        '#include "/etc/passwd.h"',
        "#include HEADER",
        "  #  include_next <kiln/rows/vec.cuh>",
        "#/* */include <kiln/rows/vec.cuh>",
        "#\\\ninclude <kiln/rows/vec.cuh>",
        '#embed "kiln/rows/vec.cuh"',
        "%:include <kiln/rows/vec.cuh>",
        '#if __has_include("kiln/rows/vec.cuh")',
        "const char* when = __DATE__ __TIME__;",
    ],
)
def test_a_source_that_reaches_out_of_the_closed_world_is_refused(monkeypatch, line):
    spec = find_spec("rms_norm")
    own = read_source(spec.source)
    monkeypatch.setattr(
        template, "read_source", lambda path: own + line + "\n" if path == spec.source else ""
    )
    template.closed_source.cache_clear()
    try:
        with pytest.raises(CompileError, match="include"):
            render(spec, next(iter(spec.variants())))
    finally:
        template.closed_source.cache_clear()


def test_what_an_entry_stores_gives_its_key_back():
    spec = find_spec("rms_norm")
    own = ingredients_of(spec, render(spec, next(iter(spec.variants()))), "sm_90a", TOOLCHAIN)
    assert stored_ingredients({"ingredients": [list(pair) for pair in own]}) == own
    for header in ({}, {"ingredients": "x"}, {"ingredients": [["one"]]}, {"ingredients": [[1, 2]]}):
        with pytest.raises(ValueError, match="ingredients"):
            stored_ingredients(header)


def test_differing_names_the_labels_and_only_those():
    spec = find_spec("rms_norm")
    unit = render(spec, next(iter(spec.variants())))
    own = ingredients_of(spec, unit, "sm_90a", TOOLCHAIN)
    other = ingredients_of(spec, unit, "sm_90a", "nvrtc/cc/dd")
    assert differing(own, own) == []
    assert differing(own, other) == ["toolchain"]
    headers = {name: text for name, text in unit.headers.items() if name != "kiln/rows/vec.cuh"}
    fewer = dataclasses.replace(unit, headers=headers)
    less = ingredients.ingredients_of(spec, fewer, "sm_90a", TOOLCHAIN)
    assert differing(own, less) == differing(less, own) == ["header kiln/rows/vec.cuh"]
