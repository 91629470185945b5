"""``kiln warmup --tune``: flags, what it shows, and what engines to come make of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from some_gpu import GPU, measured

from kiln.engine.bench import products
from kiln.engine.cli import product_tuning
from kiln.engine.cli.commands.kernels.choices import group_choices
from kiln.engine.cli.product_tuning import summary, times_table
from kiln.engine.layers import row_limits
from kiln.engine.layers.row_limits import Product
from kiln.engine.models.registry import read_model
from kiln.engine.runner.kernels import with_limits
from kiln.engine.runner.memory import products_used
from kiln.engine.runner.tune_products import Times, TunedProduct
from kiln.jit_kernels.bench.timing import CpuWork
from kiln.jit_kernels.implementations import Decision
from kiln.jit_kernels.ops.linear.spec import SKINNY_GEMM
from kiln.jit_kernels.ops.norm.spec import SPECS as NORMS

DEMO = Path(__file__).resolve().parents[3] / "engine" / "demo"


def found(limit):
    times = tuple(Times(rows, 5.04 if rows <= limit else 9.0, 7.0) for rows in (1, 8, 16))
    product = Product("DenseWeight", "bfloat16", 4096, 1024, "bfloat16")
    return TunedProduct(("qkv_proj", "o_proj"), product, 1024, 8_388_608, times)


def test_the_times_and_what_engines_will_use():
    console = Console(width=100)
    with console.capture() as captured:
        console.print(times_table([found(8)]))
    lines = [line.split() for line in captured.get().splitlines()]
    assert ["product", "MB", "rows", "skinny_gemm", "without"] in lines
    name = ["qkv_proj,", "o_proj", "4096", "x", "1024", "DenseWeight", "bfloat16"]
    assert [*name, "8.4", "1", "*", "5.0", "7.0"] in lines
    assert ["8", "*", "5.0", "7.0"] in lines
    assert ["16", "9.0", "*", "7.0"] in lines


def test_who_multiplies_which_products():
    said = [summary(found(limit)).rpartition(": ")[2] for limit in (0, 8, 16)]
    assert said == [
        "never skinny_gemm",
        "skinny_gemm up to 8 rows",
        "skinny_gemm up to 16 rows",
    ]


def test_codes_are_named():
    one = found(8)
    product = one.product._replace(form="TokenWeight", stored="int8")
    said = summary(replace(one, product=product))
    assert said.startswith("qkv_proj, o_proj 4096 x 1024 TokenWeight of int8 bfloat16: ")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--tune"], "--tune needs --model"),
        (["--tune", "--tune-comm", "--tp", "2"], "--tune-comm measures instead of compiling: "
         "leave out --tune"),
        (["--tune", "--model", DEMO, "--dry-run"], "leave out --dry-run"),
        (["--tune", "--model", DEMO, "--export", "b"], "leave out --export"),
        (["--tune", "--model", DEMO, "--arch", "sm_80", "--jobs", "2"], "leave out --arch, --jobs"),
        (["--tune", "--model", DEMO, "--kv-cache-dtype", "fp8"], "leave out --kv-cache-dtype"),
        (["--tune-comm", "--tp", "2", "--model", DEMO], "leave out --model"),
        (["--tune-comm", "--tp", "2", "--arch", "sm_80"], "leave out --arch"),
        (["--tune-comm", "--tp", "2", "--dtype", "half"], "leave out --dtype"),
    ],
)  # fmt: skip
def test_flags_that_exclude_each_other_are_refused(kiln, flags, says):
    done = kiln("warmup", *flags)
    assert done.returncode == 1
    assert says in done.stderr
    assert done.stdout == ""


def test_without_a_gpu_there_is_nothing_to_measure(kiln):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = kiln("warmup", "--tune", "--model", DEMO)
    assert done.returncode == 1
    assert "--tune measures on a GPU" in done.stderr
    assert "run it on the machine that will serve" in done.stderr


@pytest.fixture
def on_the_cpu(monkeypatch, use_gpu):
    """The kernel runs by the host toolchain, is said to be slow above 4 rows, and this is a GPU."""
    use_gpu("NVIDIA A100", (8, 0), 108)

    def seconds(self, times):
        rows = {call.args[2].shape[0] for call in self._calls}
        kernel = self._calls[0].args[0] > 0
        return 1e-6 * times * (5 if kernel and max(rows) <= 4 else 9 if kernel else 7)

    monkeypatch.setattr(CpuWork, "seconds", seconds)
    monkeypatch.setattr(products, "GpuWork", CpuWork)
    monkeypatch.setattr(product_tuning, "gpu_to_measure", lambda: torch.device("cpu"))
    key_of = row_limits.key_of
    monkeypatch.setattr(row_limits, "key_of", lambda device: key_of(GPU))


def test_a_model_is_measured_and_engines_use_what_was_found(kiln, on_the_cpu):
    command = ("warmup", "--tune", "--model", DEMO, "--dtype", "bfloat16")
    done = kiln(*command, "--json", KILN_CPU_KERNELS="host")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert done.stderr == ""
    limits = row_limits.limits_on(GPU)
    assert told["file"] in limits.source
    config = read_model(DEMO)[1]
    assert {one["roles"][-1] for one in told["products"]} >= {"down_proj", "lm_head"}
    for one in told["products"]:
        assert one["most_rows"] == 4
        assert [time["rows"] for time in one["times"]][-1] == 16
        product = Product(*(one[name] for name in Product._fields))
        assert limits.most_rows(product, 1) == 4
    assert config.vocab_size in [one["outputs"] for one in told["products"]]
    done = kiln(*command, KILN_CPU_KERNELS="host")
    assert "products" in done.stderr, "its progress"
    last = done.stdout.splitlines()[-1]
    assert last == f"{told['file']}: used by engines on this hardware from now on"
    assert "skinny_gemm up to 4 rows" in done.stdout


def choices(device):
    made = [
        Decision(SKINNY_GEMM, next(iter(SKINNY_GEMM.variants())), "jit", "loaded", None),
        Decision(NORMS[0], next(iter(NORMS[0].variants())), "jit", "loaded", None),
    ]
    return {
        family: one.reason
        for one in group_choices(with_limits(made, device))
        for family in one.families
    }


def test_choices_and_kernels_say_where_the_limits_come_from(environment, use_gpu):
    use_gpu("NVIDIA H200")
    environment()
    built_in = "loaded; limits of rows: the built-in table of H100 and H200"
    assert choices(GPU) == {"linear": built_in, "norm": "loaded"}
    assert products_used(None, torch.bfloat16, GPU, "jit: loaded") == {"linear": f"jit: {built_in}"}
    path = row_limits.store(GPU, [measured()])
    assert "limits of rows: as kiln warmup --tune measured on 2" in choices(GPU)["linear"]
    assert str(path) in choices(GPU)["linear"]
    use_gpu("NVIDIA L4")
    none = row_limits._NONE
    assert choices(GPU)["linear"] == f"loaded; limits of rows: {none}"
    assert products_used(None, torch.bfloat16, GPU, "") == {"linear": f"torch: {none}"}
    environment(KILN_LINEAR="jit")
    assert choices(GPU)["linear"] == "loaded; limits of rows: KILN_LINEAR=jit"
    cpu = torch.device("cpu")
    assert products_used(None, torch.bfloat16, cpu, "") == {}
    told = products_used(None, torch.bfloat16, cpu, "torch: KILN_LINEAR=torch")
    assert told == {"linear": "torch: KILN_LINEAR=torch"}
