"""Host libraries are built once, and loaded only from a trusted folder."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from importlib.resources import files

import pytest
import torch

from kiln.cache.env import Env
from kiln.jit_kernels.declare.errors import CompileError, ToolchainMissing
from kiln.jit_kernels.declare.spec import LaunchGeometry
from kiln.jit_kernels.toolchains import host, host_build, host_runtime
from kiln.jit_kernels.toolchains.host_build import Recipe, compile_library, find_compiler
from kiln.jit_kernels.toolchains.host_folder import LibraryFolder, library_folder
from kiln.jit_kernels.toolchains.host_world import World
from kiln.jit_kernels.toolchains.template import Unit, include_closure

TEXT = """#include "kiln/ptx/ptx.cuh"
extern "C" __global__ void k(float* p) { p[threadIdx.x] = 7; }
"""
RECIPE = Recipe("one", '#include "two.h"\nint one() { return TWO; }', {"two.h": "#define TWO 2"},
                (".",), ("-shared", "-fPIC", "-nostdlib"))  # fmt: skip
KEY = "0" * 64


@pytest.fixture
def env(tmp_path):
    return Env(kernel_cache_dir=tmp_path / "kernels")


@pytest.fixture
def compiled(monkeypatch):
    """The names of the recipes that were compiled."""
    names = []

    def count(recipe, compiler):
        names.append(recipe.name)
        return compile_library(recipe, compiler)

    monkeypatch.setattr(host_runtime, "compile_library", count)
    return names


def run(env, text=TEXT):
    unit = Unit("test.cu", text, include_closure(text))
    kernel = host.build(unit, "k", ["pointer"], name="k", checked=False, env=env)
    p, world = torch.zeros(32), World()
    world.enqueue(0, kernel, LaunchGeometry((1, 1, 1), (32, 1, 1)), (p,))
    world.run()
    return p


def kernel_files(env):
    folder = env.kernel_cache_dir / "host"
    marker = b"kiln_host_entry"
    return [path for path in folder.iterdir() if marker in path.read_bytes()]


def test_a_library_is_compiled_once(env, compiled):
    assert run(env).eq(7).all()
    assert run(env).eq(7).all()
    assert compiled.count("k (host)") == 1
    assert env.kernel_cache_dir.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in kernel_files(env)] == [0o600]


def test_any_change_of_the_source_is_another_library(env, compiled):
    run(env)
    assert run(env, TEXT.replace("7", "8")).eq(8).all()
    assert compiled.count("k (host)") == 2


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def link(path):
    real = path.with_suffix(".real")
    path.rename(real)
    path.symlink_to(real)


HARM = {
    "flipped": flip,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "writable by others": lambda path: path.chmod(0o666),
    "a symbolic link": link,
}
if os.geteuid() == 0:
    HARM["somebody else's"] = lambda path: os.chown(path, 65534, 65534)


@pytest.mark.parametrize("harm", HARM)
def test_a_library_that_cannot_be_trusted_is_compiled_again(tmp_path, harm):
    folder, path = LibraryFolder(tmp_path), tmp_path / f"{KEY}.so"
    tmp_path.chmod(0o700)
    folder.publish(KEY, b"library")
    assert folder.holds(KEY)
    HARM[harm](path)
    assert not folder.holds(KEY)
    folder.publish(KEY, b"library")
    assert folder.holds(KEY)
    assert not path.is_symlink()


def test_a_library_under_another_key_is_not_taken_for_it(tmp_path):
    folder = LibraryFolder(tmp_path)
    folder.publish(KEY, b"library")
    (tmp_path / f"{KEY}.so").rename(tmp_path / f"{'1' * 64}.so")
    assert not folder.holds("1" * 64)


def test_a_publish_leaves_no_temporary_file(tmp_path):
    LibraryFolder(tmp_path).publish(KEY, b"library")
    assert os.listdir(tmp_path) == [f"{KEY}.so"]


def test_a_folder_that_others_can_write_is_not_used(tmp_path, caplog):
    folder = tmp_path / "host"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(PermissionError):
        LibraryFolder(folder)
    library_folder(tmp_path).publish(KEY, b"library")
    assert not list(folder.iterdir())
    assert "other users can write to it" in caplog.text


def test_without_a_home_libraries_live_in_a_private_folder():
    folder = library_folder(None)
    folder.publish(KEY, b"library")
    assert folder.holds(KEY)


def test_a_missing_compiler_says_what_to_install(env):
    with pytest.raises(ToolchainMissing, match=r"no-such-g\+\+.*apt-get install g\+\+"):
        run(replace(env, host_compiler="no-such-g++"))


def test_a_source_that_does_not_compile_shows_the_compilers_log(env):
    with pytest.raises(CompileError, match=r"(?s)k \(host\) does not compile.*test\.cu"):
        run(env, '#line 1 "test.cu"\nthis is not C++;')


def test_a_build_sees_its_own_files_and_leaves_no_path_behind():
    compiler = find_compiler("g++")
    library = compile_library(RECIPE, compiler)
    assert library.startswith(b"\x7fELF")
    assert b"kiln-host-" not in library
    assert compile_library(RECIPE, compiler) == library
    with pytest.raises(CompileError, match=r"two\.h"):
        compile_library(replace(RECIPE, files={}), compiler)


def test_a_key_covers_all_that_can_change_a_library():
    compiler = find_compiler("g++")
    others = [
        RECIPE.key(replace(compiler, version="g++ 1")),
        RECIPE.key(replace(compiler, path="/opt/g++")),
        RECIPE.key(replace(compiler, programs="another cc1plus")),
        replace(RECIPE, main="int one();").key(compiler),
        replace(RECIPE, flags=("-shared",)).key(compiler),
        replace(RECIPE, files={"two.h": "#define TWO 3"}).key(compiler),
        replace(RECIPE, files={"3.h": "#define TWO 2"}).key(compiler),
    ]
    assert len({RECIPE.key(compiler), *others}) == 1 + len(others)
    assert replace(RECIPE, name="two").key(compiler) == RECIPE.key(compiler)


def test_a_key_covers_the_system_headers_that_a_source_includes(tmp_path, monkeypatch):
    monkeypatch.setenv("CPATH", str(tmp_path))
    (tmp_path / "outer.h").write_text('#include "inner.h"\n')
    keys = set()
    for text in ("int one;", "int two;"):
        (tmp_path / "inner.h").write_text(text)
        host_build._system_headers.cache_clear()
        for recipe in (
            replace(RECIPE, main="#include <outer.h>"),
            replace(RECIPE, files={"two.h": "  #  include <outer.h>"}),
        ):
            keys.add(recipe.key(find_compiler("g++")))
    assert len(keys) == 4


def test_an_assembler_that_was_replaced_is_another_compiler(tmp_path, monkeypatch):
    before = find_compiler("g++")
    (tmp_path / "as").write_text("#!/bin/sh\n")
    (tmp_path / "as").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    after = find_compiler.__wrapped__("g++")
    assert (before.path, before.version) == (after.path, after.version)
    assert before.programs != after.programs


DAY = 86400


def aged(folder, ages):
    """Publish a library for each age, in seconds; return their names."""
    libraries, keys = LibraryFolder(folder), [f"{n:064}" for n in range(1, len(ages) + 1)]
    for key, age in zip(keys, ages, strict=True):
        libraries.publish(key, b"x" * 968)
        os.utime(folder / f"{key}.so", (time.time() - age,) * 2)
    return [f"{key}.so" for key in keys]


def test_libraries_that_nobody_used_for_two_weeks_go_when_another_is_published(tmp_path):
    fresh, _, last = aged(tmp_path, [13 * DAY, 15 * DAY, 0])
    for name in (".tmp-1-ab", ".tmp-2-ab"):
        (tmp_path / name).write_bytes(b"of a writer that was killed")
    os.utime(tmp_path / ".tmp-1-ab", (time.time() - 7200,) * 2)
    LibraryFolder(tmp_path).publish(KEY, b"library")
    assert set(os.listdir(tmp_path)) == {fresh, last, f"{KEY}.so", ".tmp-2-ab"}


def test_the_longest_unused_go_when_there_is_no_room_and_what_is_in_use_stays(tmp_path):
    names = aged(tmp_path, [3 * DAY, 2 * DAY, 3000, DAY])
    LibraryFolder(tmp_path).prune(max_bytes=3000)
    assert sorted(os.listdir(tmp_path)) == names[1:]
    LibraryFolder(tmp_path).prune(max_bytes=0)
    assert os.listdir(tmp_path) == [names[2]]


def test_a_use_is_noted(tmp_path):
    (name,) = aged(tmp_path, [13 * DAY])
    assert LibraryFolder(tmp_path).holds(name.removesuffix(".so"))
    LibraryFolder(tmp_path).prune(max_seconds=DAY)
    assert os.listdir(tmp_path) == [name]


def test_the_runtime_stays_small_enough_to_read():
    folder = files("kiln.kernel_sources").joinpath("host")
    texts = {path.name: path.read_text().splitlines() for path in folder.iterdir()}
    language = texts.pop("cuda_host.h")
    assert sum(len(lines) for lines in texts.values()) < 1700
    assert max(len(lines) for lines in [language, *texts.values()]) <= 400
    assert max(len(line) for lines in [language, *texts.values()] for line in lines) <= 100
