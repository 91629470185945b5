"""``kiln warmup`` and the verbs of ``kiln kernels``, in this process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from kiln.cache.disk.bundle import Bundle, write_bundle
from kiln.engine.cli import kernel_progress
from kiln.engine.cli.commands import kernels
from kiln.engine.cli.commands.kernels.choices import _lines, group_choices
from kiln.engine.cli.main import main
from kiln.engine.cli.parser import commands_of
from kiln.jit_kernels import implementations, registry
from kiln.jit_kernels.compile import kernel_cache as cache_module
from kiln.jit_kernels.compile.open_cache import kernel_cache
from kiln.jit_kernels.declare.arch import ALL_ARCHS, compute_capability, target_of
from kiln.jit_kernels.declare.errors import KernelError
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import label
from kiln.jit_kernels.implementations import Decision
from kiln.jit_kernels.launch import target_arch
from kiln.jit_kernels.registry import all_specs
from kiln.jit_kernels.toolchains import nvrtc, template
from kiln.jit_kernels.toolchains.template import read_source

DEMO = Path(__file__).parents[3] / "engine" / "demo"
FAMILIES = ["activation", "norm", "rotary"]  # what stands here for the whole library
NUM_VARIANTS = sum(
    len(list(spec.variants())) for spec in all_specs().values() if spec.family in FAMILIES
)


@pytest.fixture(scope="module", autouse=True)
def _few_families():
    with pytest.MonkeyPatch.context() as patch:
        all_specs.cache_clear()
        few = {family: registry.family_modules()[family] for family in FAMILIES}
        patch.setattr(registry, "family_modules", lambda: few)
        yield
    all_specs.cache_clear()


@pytest.fixture(scope="module")
def warm_root(tmp_path_factory):
    """A folder with every kernel for one target, and its bundle."""
    folder = tmp_path_factory.mktemp("commands")
    with pytest.MonkeyPatch.context() as patch:
        _forget()
        patch.setenv("KILN_KERNEL_CACHE_DIR", str(folder / "kernels"))
        assert main(["warmup", "--arch", "sm_80", "--json", "--export", str(folder / "b")]) == 0
        _forget()
    return folder


def _forget():
    for cached in (settings, kernel_cache, cache_module._installed):
        cached.cache_clear()
    implementations._decided.clear()


@pytest.fixture
def kiln(tmp_path, capsys):
    """Run a command line over an empty cache; return code, stdout and stderr."""

    def run(*arguments, **environment):
        own = {"KILN_KERNEL_CACHE_DIR": tmp_path / "kernels", "COLUMNS": 160, **environment}
        _forget()
        capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in own.items():
                patch.setenv(name, str(value))
            code = main([str(argument) for argument in arguments])
        _forget()
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def over(kiln, warm_root):
    """Run a command line over the warm cache; read only, for tests share it."""

    def run(*arguments, **environment):
        own = {"KILN_KERNEL_CACHE_DIR": warm_root / "kernels", "KILN_KERNEL_CACHE": "ro"}
        return kiln(*arguments, **{**own, **environment})

    return run


def test_every_module_of_the_folder_is_a_verb():
    names = set(commands_of(kernels))
    folder = Path(kernels.__file__).parent
    assert len(names) == len(list(folder.glob("*.py"))) - 1
    wanted = {"list", "choices", "check", "why", "verify", "prune", "export", "import", "extract"}
    assert wanted <= names


def test_a_dry_run_names_the_programs_and_builds_nothing(kiln, tmp_path):
    code, out, _ = kiln("warmup", "--arch", "sm_80,sm_90a", "--dry-run")
    assert code == 0
    assert len(out.splitlines()) == 2 * NUM_VARIANTS
    assert "rms_norm[bf16] sm_90a" in out
    code, out, _ = kiln("warmup", "--arch", "all", "--dry-run", "--json")
    assert json.loads(out)["kernels"] == 7 * NUM_VARIANTS
    assert not (tmp_path / "kernels").exists()


def test_a_model_limits_what_is_built_to_what_it_calls_in_its_dtype(kiln, tmp_path):
    config = json.loads((DEMO / "config.json").read_text())
    for old in ("dtype", "torch_dtype"):
        config.pop(old, None)
    (tmp_path / "config.json").write_text(json.dumps({**config, "torch_dtype": "float16"}))
    _, out, _ = kiln("warmup", "--arch", "sm_80", "--dry-run", "--model", tmp_path)
    assert out.splitlines() == ["silu_and_mul[fp16,silu] sm_80", "fused_add_rms_norm[fp16] sm_80"]
    code, _, err = kiln("warmup", "--model", tmp_path / "absent")
    assert (code, err.startswith("error: ")) == (1, True)


def test_the_flag_then_the_toggle_say_how_many_compile_at_once(over, monkeypatch):
    asked = []

    def warm_up(jobs, cache, num_threads, on_outcome):
        asked.append(num_threads)
        return [], 0.0

    monkeypatch.setattr(kernel_progress, "warm_up", warm_up)
    over("warmup", "--arch", "sm_80", "--json")
    over("warmup", "--arch", "sm_80", "--json", KILN_JIT_JOBS="3")
    over("warmup", "--arch", "sm_80", "--json", "--jobs", "2", KILN_JIT_JOBS="3")
    assert asked == [0, 3, 2], "0 takes the cores"


def test_a_warm_up_holds_the_cache_to_its_limits(kiln, warm_root, tmp_path):
    kiln("kernels", "import", warm_root / "b")
    code, out, _ = kiln("warmup", "--arch", "sm_80", "--json", KILN_KERNEL_CACHE_MAX_MB="0")
    assert (code, json.loads(out)["hit"]) == (0, NUM_VARIANTS)
    assert not list((tmp_path / "kernels").rglob("*.kk"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["warmup", "--arch", "sm_xyz"], "sm_xyz"),
        (["warmup", "--jobs", "0"], "--jobs 0"),
        (["kernels", "why", "softmaxx"], "softmaxx"),
        (["kernels", "check", "rms_norm", "--seeds", "0"], "--seeds 0"),
        (["kernels", "extract", "abc"], "hex digits"),
        (["kernels", "extract", "0123456789"], "0 entries"),
        (["kernels", "prune", "--max-mb", "-1"], "--max-mb -1"),
        (["kernels", "export", "/tmp/none.kpack"], "kiln warmup first"),
    ],
)
def test_wrong_use_is_named_in_one_line(kiln, arguments, says):
    code, _, err = kiln(*arguments)
    assert code == 1
    assert len(err.strip().splitlines()) == 1
    assert says in err


def test_a_compile_error_is_exit_code_5_and_the_rest_is_built(kiln, monkeypatch):
    whole = template.closed_source
    broken = {"norm/rms_norm.cu": read_source("norm/rms_norm.cu") + "}\n"}
    monkeypatch.setattr(template, "closed_source", lambda path: broken.get(path) or whole(path))
    code, out, err = kiln("warmup", "--arch", "sm_80", "--json")
    counts = json.loads(out)
    assert code == 5
    assert (counts["failed"], counts["built"]) == (3, NUM_VARIANTS - 3)
    line = broken["norm/rms_norm.cu"].count("\n")
    assert f"kernel_sources/norm/rms_norm.cu({line})" in err


@pytest.mark.parametrize(("columns", "has_templates"), [(80, False), (140, True)])
def test_list_tells_what_is_built_and_what_it_takes(over, columns, has_templates):
    code, out, _ = over("kernels", "list", COLUMNS=columns)
    assert code == 0
    assert "…" not in out, "every column fits"
    (row,) = [line for line in out.splitlines() if " rms_norm " in line]
    assert "3 of 21" in row
    assert ("norm/rms_norm.cu" in row) == has_templates
    _, out, _ = over("kernels", "list", "--arch", "sm_80,sm_75", "--json")
    rows = json.loads(out)
    assert len(rows) == 2 * NUM_VARIANTS
    for row in rows:
        assert row["tier"] == ("disk" if row["arch"] == "sm_80" else "")
        if row["tier"]:
            assert 8 <= row["registers"] <= 255
            assert row["spills"] >= 0
            assert len(row["key"]) == 64


def test_why_says_where_a_kernel_is_or_what_differs(over, warm_root, monkeypatch):
    _, out, _ = over("kernels", "why", "rms_norm", "--arch", "sm_80")
    assert out.count("in " + str(warm_root / "kernels" / "v2" / "sm_80")) == 3
    options = nvrtc.options
    monkeypatch.setattr(nvrtc, "options", lambda arch: [*options(arch), "-lineinfo"])
    _, out, _ = over("kernels", "why", "rms_norm", "--arch", "sm_80")
    assert out.count("not there; the nearest entry is rms_norm for sm_80") == 3
    assert out.count("-lineinfo here, nothing there") == 3


def test_verify_finds_a_changed_entry_with_exit_code_4(kiln, tmp_path, warm_root):
    assert kiln("kernels", "import", warm_root / "b")[0] == 0
    code, out, _ = kiln("kernels", "verify")
    assert (code, out) == (0, f"{NUM_VARIANTS} entries, 0 corrupt\n")
    entry = next((tmp_path / "kernels").rglob("*.kk"))
    data = bytearray(entry.read_bytes())
    data[-100] ^= 1
    entry.write_bytes(data)
    code, out, _ = kiln("kernels", "verify", "--json")
    report = json.loads(out)
    assert code == 4
    assert report["entries"] == NUM_VARIANTS
    ((where, reason),) = report["corrupt"]
    assert where == str(entry)
    assert "SHA-256" in reason
    code, out, _ = kiln("kernels", "verify", "--rebuild")
    assert code == 4
    assert f"{NUM_VARIANTS - 1} built again, 0 differ" in out


def test_a_bundle_goes_out_and_comes_in_as_the_same_bytes(over, kiln, warm_root, tmp_path):
    code, out, _ = over("kernels", "export", tmp_path / "b", "--arch", "sm_80,sm_75")
    assert code == 0
    assert (tmp_path / "b").read_bytes() == (warm_root / "b").read_bytes()
    sha256 = Bundle.open(tmp_path / "b").sha256
    assert f"{NUM_VARIANTS} kernels, sha256 {sha256}" in out
    assert "not in the cache, so not in the bundle: " in out
    assert out.count("sm_75") == NUM_VARIANTS

    code, out, _ = kiln("kernels", "import", tmp_path / "b", "--sha256", sha256)
    assert (code, out.split()[0]) == (0, str(NUM_VARIANTS))
    code, out, _ = kiln("warmup", "--arch", "sm_80", "--json")
    assert json.loads(out)["hit"] == NUM_VARIANTS
    code, _, err = kiln("kernels", "import", tmp_path / "b", "--sha256", "0" * 64)
    assert (code, "has SHA-256" in err) == (4, True)


def test_an_import_that_cannot_be_kept_is_an_error(kiln, warm_root):
    code, _, err = kiln("kernels", "import", warm_root / "b", KILN_KERNEL_CACHE="ro")
    assert (code, "cannot be kept" in err) == (1, True)


def test_an_entry_under_another_key_is_not_imported(kiln, warm_root, tmp_path):
    arch, _, entry = next(Bundle.open(warm_root / "b").entries())
    write_bundle(tmp_path / "swapped", [(arch, "0" * 64, entry)])
    code, _, err = kiln("kernels", "import", tmp_path / "swapped")
    assert (code, "do not hash to its key" in err) == (4, True)
    assert not list((tmp_path / "kernels").rglob("*.kk"))


def test_extract_writes_the_cubin(over, tmp_path):
    _, out, _ = over("kernels", "list", "--arch", "sm_80", "--json")
    row = next(row for row in json.loads(out) if row["kernel"] == "apply_rotary")
    path = tmp_path / "x.cubin"
    code, out, _ = over("kernels", "extract", row["key"][:12], "-o", path)
    assert code == 0
    assert "apply_rotary" in out
    assert len(path.read_bytes()) == row["cubin_bytes"]
    assert b"apply_rotary" in path.read_bytes()


def test_prune_says_what_goes_and_does_it(kiln, warm_root, tmp_path):
    kiln("kernels", "import", warm_root / "b")
    entries = sorted((tmp_path / "kernels").rglob("*.kk"))
    for path in entries[:4]:
        os.utime(path, (0, 0))
    code, out, _ = kiln("kernels", "prune", "--dry-run")
    assert code == 0
    assert "would remove 4 entries" in out
    assert all(str(path) in out for path in entries[:4])
    assert all(path.exists() for path in entries)
    _, out, _ = kiln("kernels", "prune")
    assert out.startswith("removed 4 entries")
    assert [path.exists() for path in entries[:4]] == [False] * 4
    _, out, _ = kiln("kernels", "prune", "--max-mb", "0")
    assert out.startswith(f"removed {NUM_VARIANTS - 4} entries")
    assert "0 stay" in out


def test_a_sealed_cache_that_lacks_a_kernel_is_exit_code_3(over):
    code, out, err = over("warmup", "--arch", "sm_75", "--json", KILN_KERNEL_CACHE="sealed")
    assert code == 3
    assert json.loads(out)["failed"] == NUM_VARIANTS
    assert "arch (the target): sm_75 here, sm_80 there" in err


def test_the_engine_process_passes_a_sealed_miss_on(monkeypatch):
    from kiln.engine.cli.exit_codes import SEALED_MISS, code_of
    from kiln.engine.process import client, wire

    failed = wire.Failed("rms_norm is not in the sealed cache", "SealedMiss", True)
    assert code_of(client._failure(failed, loading=True)) == SEALED_MISS
    assert code_of(client._failure(failed, loading=False)) == 1


def test_choices_have_a_row_for_each_reason(kiln):
    code, out, _ = kiln("kernels", "choices", KILN_NORM="torch", COLUMNS=60)
    assert code == 0
    one, other, last = out.split("\n\n")
    assert one.splitlines()[0] == "torch: KILN_CPU_KERNELS=torch"
    assert "activation, rotary" in " ".join(one.split())
    assert other.splitlines() == ["torch: KILN_NORM=torch", "    norm"]
    assert "KILN_CPU_KERNELS" in last
    code, out, _ = kiln("kernels", "choices", "--json", KILN_NORM="torch")
    told = json.loads(out)
    assert (told["device"], told["launcher"], told["toggles"]["norm"]) == ("cpu", None, "torch")
    assert [one["reason"] for one in told["choices"]] == [
        "KILN_CPU_KERNELS=torch",
        "KILN_NORM=torch",
    ]
    assert "rms_norm[bf16]" in told["choices"][1]["families"]["norm"]


def test_of_a_family_that_runs_in_two_ways_the_fewer_variants_are_named():
    spec = all_specs()["rms_norm"]
    variants = list(spec.variants())
    made = [Decision(spec, one, "jit", "auto", None) for one in variants[1:]]
    made += [Decision(spec, variants[0], "torch", "no bf16", None)]
    choices = group_choices(made)
    assert [one.implementation for one in choices] == ["jit", "torch"]
    texts = [" ".join(" ".join(_lines(one, choices)).split()) for one in choices]
    assert texts == ["jit: auto norm", f"torch: no bf16 norm ({label(spec, variants[0])})"]


def test_a_target_is_one_that_a_gpu_has(kiln):
    code, out, err = kiln("warmup", "--arch", "sm_90,sm_90a", "--dry-run")
    assert code == 0
    assert "sm_90: taken as sm_90a" in err
    names = out.splitlines()
    assert len(set(names)) == len(names)
    assert all(name.endswith(" sm_90a") for name in names)
    code, out, err = kiln("warmup", "--arch", "sm_91")
    assert (code, out) == (1, "")
    assert "'sm_91': no GPU has this architecture; did you mean sm_90a?" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("given", "target"),
    [
        *(("sm_90", "sm_90a"), ("sm_90a", "sm_90a"), ("sm_90f", "sm_90a"), ("sm_75a", "sm_75")),
        *(("sm_100", "sm_100a"), ("sm_100f", "sm_100f"), ("sm_120", "sm_120")),
    ],
)
def test_a_target_has_the_suffix_that_its_gpus_need(kiln, monkeypatch, given, target):
    assert target_of(given) == target
    told = json.loads(kiln("warmup", "--arch", given, "--dry-run", "--json")[1])
    assert {name.split()[-1] for name in told["names"]} == {target}
    settings.cache_clear()
    monkeypatch.setenv("KILN_KERNEL_ARCH", given)
    assert target_arch(torch.device("cuda")) == target


@pytest.mark.parametrize("given", ["sm_91", "sm_99a", "all", "h100", "sm_60"])
def test_a_forced_target_that_no_gpu_has_is_refused(kiln, monkeypatch, given):
    settings.cache_clear()
    monkeypatch.setenv("KILN_KERNEL_ARCH", given)
    with pytest.raises(KernelError, match=given):
        target_arch(torch.device("cuda"))


def test_targets_that_nvrtc_does_not_know_are_not_compiled(kiln, monkeypatch):
    monkeypatch.setattr(nvrtc, "known_capabilities", lambda: (75, 80, 90))
    code, out, err = kiln("warmup", "--arch", "sm_90,sm_100")
    assert (code, out) == (1, "")
    last = err.splitlines()[-1]
    assert "does not compile for sm_100a; it knows sm_75, sm_80, sm_90: leave it out" in last
    assert kiln("warmup", "--dry-run", KILN_KERNEL_ARCH="sm_120")[0] == 1
    code, out, err = kiln("warmup", "--arch", "all", "--dry-run")
    assert code == 0
    assert {line.split()[-1] for line in out.splitlines()} == {"sm_75", "sm_80", "sm_90a"}
    assert "does not compile for sm_86, sm_89, sm_100a, sm_120;" in err


def test_nvrtc_knows_every_target_of_all():
    assert {compute_capability(arch) for arch in ALL_ARCHS} <= set(nvrtc.known_capabilities())


def test_help_of_every_verb(kiln):
    for verb in commands_of(kernels):
        with pytest.raises(SystemExit) as caught:
            main(["kernels", verb, "--help"])
        assert caught.value.code == 0
