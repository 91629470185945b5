"""Toggles are typed, complete and refused when wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiln.cache import env

FAMILIES = ["activation", "norm"]


def test_nothing_set_gives_the_defaults():
    read = env.read(FAMILIES, {"PATH": "/bin", "KILNLIKE": "x"})
    assert read == env.Env()
    assert read.kernel_choice("norm") == "auto"


def test_values_are_typed():
    read = env.read(
        FAMILIES,
        {
            "KILN_NORM": "triton",
            "KILN_CPU_KERNELS": "host-check",
            "KILN_JIT_JOBS": "3",
            "KILN_KERNEL_CACHE_DIR": "~/kernels",
        },
    )
    assert read.kernel_choice("norm") == "triton"
    assert read.kernel_choice("activation") == "auto"
    assert read.cpu_kernels == "host-check"
    assert read.jit_jobs == 3
    assert read.kernel_cache_dir == Path.home() / "kernels"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("KILN_NROM", "jit", "did you mean KILN_NORM?"),
        ("KILN_XYZZY_PLUGH", "1", "is not a Kiln variable"),
        ("KILN_NORM", "cuda", "choose one of auto, jit, triton, torch"),
        ("KILN_CPU_KERNELS", "", "choose one of torch, host, host-check"),
        ("KILN_JIT_JOBS", "-1", "whole number"),
        ("KILN_JIT_JOBS", "two", "whole number"),
        ("KILN_KERNEL_ARCH", "", "is empty"),
    ],
)
def test_a_wrong_name_or_value_is_refused_with_help(name, value, says):
    with pytest.raises(env.EnvError, match=name) as caught:
        env.read(FAMILIES, {name: value})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_new_family_has_its_toggle_by_its_name_alone():
    assert env.read([*FAMILIES, "trial"], {"KILN_TRIAL": "torch"}).kernel_choice("trial") == "torch"
    with pytest.raises(env.EnvError):
        env.read(FAMILIES, {"KILN_TRIAL": "torch"})


def test_describe_has_a_row_for_every_variable():
    set_to = env.read(FAMILIES, {"KILN_NORM": "jit"})
    rows = {row.name: row for row in env.describe(FAMILIES, set_to)}
    assert rows["KILN_NORM"].value == "jit"
    assert rows["KILN_ACTIVATION"].default == "auto"
    assert all(row.help for row in rows.values())
    for name in rows:
        known = env.read(FAMILIES, {name: "torch" if "|" in rows[name].values else "1"})
        assert known is not None


def test_without_a_home_there_is_no_cache_folder(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert env.user_cache_home() is None
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/folder")  # the standard says: ignore it
    assert env.user_cache_home() is None
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/somewhere")
    assert env.user_cache_home() == Path("/var/somewhere")
