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
            "KILN_KERNEL_CACHE": "sealed",
            "KILN_KERNEL_CACHE_SHARED": "1",
            "KILN_KERNEL_TRUSTED_UIDS": "1000, 1001",
            "KILN_KERNEL_CACHE_MAX_MB": "64",
            "KILN_KERNEL_BUNDLE": "/opt/kernels.kpack",
        },
    )
    assert read.kernel_choice("norm") == "triton"
    assert read.kernel_choice("activation") == "auto"
    assert read.cpu_kernels == "host-check"
    assert read.jit_jobs == 3
    assert read.kernel_cache_dir == Path.home() / "kernels"
    assert (read.kernel_cache, read.kernel_cache_shared) == ("sealed", True)
    assert read.kernel_trusted_uids == (1000, 1001)
    assert read.kernel_cache_max_mb == 64
    assert read.kernel_bundle == Path("/opt/kernels.kpack")


WITH_LORA = [*FAMILIES, "lora", "lora_chunked"]


@pytest.mark.parametrize(
    ("environ", "toggle", "asked"),
    [
        ({}, "auto", "KILN_LORA=auto"),
        ({"KILN_LORA": "torch"}, "torch", "KILN_LORA=torch"),
        ({"KILN_LORA_BACKEND": "jit"}, "jit", "KILN_LORA_BACKEND=jit"),
        ({"KILN_LORA_BACKEND": "torch_native"}, "torch", "KILN_LORA_BACKEND=torch_native"),
        (
            {"KILN_LORA_BACKEND": "triton", "KILN_LORA": "triton"},
            "triton",
            "KILN_LORA_BACKEND=triton",
        ),
        ({"KILN_LORA_BACKEND": "auto", "KILN_LORA": "jit"}, "jit", "KILN_LORA=jit"),
    ],
)
def test_the_lora_backend_sets_the_toggle_of_its_kernels(environ, toggle, asked):
    read = env.read(WITH_LORA, {**environ, "KILN_NORM": "jit"})
    assert read.kernel_choice("lora") == toggle
    assert read.asked("lora") == asked
    assert read.asked("norm") == "KILN_NORM=jit"


@pytest.mark.parametrize(
    ("environ", "toggles", "asked"),
    [
        ({}, ("jit", "jit"), "KILN_LORA_BACKEND=csgmv"),
        ({"KILN_LORA": "jit"}, ("jit", "jit"), "KILN_LORA_BACKEND=csgmv"),
        ({"KILN_LORA_CHUNKED": "jit"}, ("jit", "jit"), "KILN_LORA_BACKEND=csgmv"),
        ({"KILN_LORA_CHUNKED": "triton"}, ("triton", "triton"), "KILN_LORA_CHUNKED=triton"),
    ],
)
def test_chunks_use_both_families_of_lora_kernels(environ, toggles, asked):
    read = env.read(WITH_LORA, {**environ, "KILN_LORA_BACKEND": "csgmv"})
    assert (read.kernel_choice("lora"), read.kernel_choice("lora_chunked")) == toggles
    assert read.asked("lora") == read.asked("lora_chunked") == asked


@pytest.mark.parametrize(
    ("backend", "family", "toggle", "needs"),
    [
        ("jit", "LORA", "triton", "needs KILN_LORA=jit"),
        ("torch_native", "LORA", "jit", "needs KILN_LORA=torch"),
        ("csgmv", "LORA", "torch", "needs KILN_LORA=jit"),
        ("csgmv", "LORA_CHUNKED", "torch", "needs KILN_LORA_CHUNKED=jit"),
        ("jit", "LORA_CHUNKED", "jit", "does not use it"),
        ("triton", "LORA_CHUNKED", "triton", "does not use it"),
    ],
)
def test_a_lora_backend_that_contradicts_the_toggle_is_refused(backend, family, toggle, needs):
    environ = {"KILN_LORA_BACKEND": backend, f"KILN_{family}": toggle}
    says = f"KILN_{family}={toggle} .*KILN_LORA_BACKEND={backend}, which {needs}"
    with pytest.raises(env.EnvError, match=says):
        env.read(WITH_LORA, environ)


def test_a_lora_backend_that_does_not_exist_is_refused():
    with pytest.raises(env.EnvError, match="choose one of auto, jit, csgmv, triton"):
        env.read(WITH_LORA, {"KILN_LORA_BACKEND": "sgmv"})


def test_all_reduce_has_a_toggle_for_whose_kernels_and_one_for_the_algorithm():
    families = [*FAMILIES, "all_reduce"]
    assert env.read(families, {}).all_reduce_algorithm == "auto"
    environ = {"KILN_ALL_REDUCE": "torch", "KILN_ALL_REDUCE_ALGORITHM": "two_shot"}
    read = env.read(families, environ)
    assert (read.kernel_choice("all_reduce"), read.all_reduce_algorithm) == ("torch", "two_shot")
    rows = {row.name: row for row in env.describe(families, read)}
    assert rows["KILN_ALL_REDUCE"].values == "auto | jit | torch"
    assert rows["KILN_ALL_REDUCE_ALGORITHM"].value == "two_shot"
    for name, text, told in [
        ("KILN_ALL_REDUCE", "triton", "choose one of auto, jit, torch"),
        ("KILN_ALL_REDUCE", "two_shot", "choose one of auto, jit, torch"),
        ("KILN_ALL_REDUCE_ALGORITHM", "jit", "choose one of auto, one_shot_push, two_shot_push"),
    ]:
        with pytest.raises(env.EnvError, match=told):
            env.read(families, {name: text})


SERVICE = {  # what Kubernetes injects into each pod for a service named kiln
    "KILN_SERVICE_HOST": "10.96.12.4",
    "KILN_SERVICE_PORT": "8000",
    "KILN_SERVICE_PORT_HTTP": "8000",
    "KILN_SERVICE_PORT_METRICS_2": "9000",
    "KILN_PORT": "tcp://10.96.12.4:8000",
    "KILN_PORT_8000_TCP": "tcp://10.96.12.4:8000",
    "KILN_PORT_8000_TCP_ADDR": "10.96.12.4",
    "KILN_PORT_8000_TCP_PORT": "8000",
    "KILN_PORT_8000_TCP_PROTO": "tcp",
    "KILN_PORT_53_UDP_PROTO": "udp",
}


def test_the_variables_of_a_kubernetes_service_are_passed_over():
    assert env.read(FAMILIES, SERVICE) == env.Env()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        *(
            (name + "S", "1", "is not a Kiln variable")
            for name in SERVICE
            if "METRICS" not in name and "HTTP" not in name
        ),
        ("KILN_PORTS", "1", "is not a Kiln variable"),
        ("KILN_PORT_HTTP", "1", "is not a Kiln variable"),
        ("KILN_SERVICE_PORT_", "1", "is not a Kiln variable"),
        ("KILN_SERVICE", "1", "is not a Kiln variable"),
        ("KILN_NROM", "jit", "did you mean KILN_NORM?"),
        ("KILN_XYZZY_PLUGH", "1", "is not a Kiln variable"),
        ("KILN_NORM", "cuda", "choose one of auto, jit, triton, torch"),
        ("KILN_CPU_KERNELS", "", "choose one of torch, host, host-check"),
        ("KILN_JIT_JOBS", "-1", "whole number"),
        ("KILN_JIT_JOBS", "two", "whole number"),
        ("KILN_KERNEL_ARCH", "", "is empty"),
        ("KILN_KERNEL_CACHE", "w", "choose one of rw, ro, off, refresh, sealed"),
        ("KILN_KERNEL_CACHE_SHARED", "yes", "choose one of 0, 1"),
        ("KILN_KERNEL_TRUSTED_UIDS", "1000,root", "'root' is not a whole number"),
        ("KILN_KERNEL_TRUSTED_UIDS", "", "'' is not a whole number"),
        ("KILN_KERNEL_BUNDLE", "", "is empty"),
        ("KILN_JIT_AFTER_READY", "raise", "choose one of warn, error"),
        ("KILN_LAUNCHER", "cuda", "choose one of auto, cuda-python, cupy"),
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
    set_to = env.read(
        FAMILIES,
        {"KILN_NORM": "jit", "KILN_KERNEL_CACHE_SHARED": "1", "KILN_KERNEL_TRUSTED_UIDS": "7,8"},
    )
    rows = {row.name: row for row in env.describe(FAMILIES, set_to)}
    assert rows["KILN_NORM"].value == "jit"
    assert rows["KILN_ACTIVATION"].default == "auto"
    shared, trusted = rows["KILN_KERNEL_CACHE_SHARED"], rows["KILN_KERNEL_TRUSTED_UIDS"]
    assert (shared.values, shared.default, shared.value) == ("0 | 1", "0", "1")
    assert (trusted.default, trusted.value) == ("", "7,8")
    assert rows["KILN_KERNEL_CACHE"].default == "rw"
    assert all(row.help for row in rows.values())
    assert len(rows) == len(FAMILIES) + len(env.Env.__dataclass_fields__) - 1


def test_every_value_that_describe_shows_can_be_read_back():
    for row in env.describe(FAMILIES, env.Env()):
        for value in (row.values.split(" | ") if row.values else ["1"]) + [row.default]:
            if value:
                read = env.read(FAMILIES, {row.name: value})
                shown = {r.name: r.value for r in env.describe(FAMILIES, read)}
                assert shown[row.name] == value
