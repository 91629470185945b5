"""gpu_check runs without a GPU and reports what it could not measure."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import gpu_check
import pytest
import torch
from gpu import (
    agreement,
    beside_copy,
    builds,
    children,
    greedy,
    invariance,
    kernels,
    report,
    sampling_steps,
)
from gpu.pace import NotMeasured, Pace, chosen, share_of
from gpu.room import Room
from gpu.sealed import sealed_bundle

from kiln.engine.bench.report import Report
from kiln.jit_kernels.bench.ceilings import Ceilings
from kiln.jit_kernels.declare.parameters import declare, outputs
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.registry import all_specs, find_spec
from kiln.jit_kernels.toolchains import host

ROOT = Path(__file__).resolve().parents[2]
ARGS = argparse.Namespace(quick=True, bundle=None, kernels=[])


# A GPU machine lacks them: to import one raises ImportError.
WITHOUT_SERVER_PACKAGES = """
import runpy, sys
sys.modules |= dict.fromkeys(
    ["fastapi", "uvicorn", "pydantic", "httpx", "zmq", "msgspec", "rich"]
)
runpy.run_path("tools/gpu_check.py", run_name="__main__")
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine would run it all")
def test_without_a_gpu_and_server_packages_every_section_is_not_measured(tmp_path):
    command = [sys.executable, "-c", WITHOUT_SERVER_PACKAGES, "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr
    result = json.loads((tmp_path / "gpu_check.json").read_text())
    assert {s["status"] for s in result["sections"].values()} == {"not measured"}
    assert "not measured" in (tmp_path / "gpu_check.md").read_text()


@pytest.fixture
def run(monkeypatch):
    """Run gpu_check with some arguments in this process; return its exit code."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["tools/gpu_check.py", *map(str, arguments)])
        return gpu_check.main()

    return run


@pytest.fixture
def run_section(run, tmp_path):
    """Run a section as a child process of gpu_check does; return its result."""

    def run_section(name):
        written = tmp_path / "section.json"
        assert run("--section", name, "--result", written) == 0
        return json.loads(written.read_text())

    return run_section


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would make it work")
def test_a_section_that_breaks_has_a_result_with_its_traceback(run_section):
    section = run_section("kernel_loading")
    assert section["status"] == "failed"
    assert "Traceback" in section["reason"]


def test_a_section_without_what_it_needs_is_not_measured(run_section):
    section = run_section("sealed_bundle")
    assert section["status"] == "not measured"
    assert "--bundle" in section["reason"]
    with pytest.raises(NotMeasured):
        sealed_bundle(ARGS)


def test_programs_that_this_nvrtc_does_not_build_are_counted_and_one_is_named():
    norm = find_spec("rms_norm")
    broken = replace(norm, name="broken", entry="not_there")
    row = builds.build_all("sm_90a", [norm, broken])
    assert (row["programs"], row["failed"], row["ok"]) == (6, 3, False)
    assert "not_there" in row["first"]
    assert builds.build_all("sm_90a", [norm])["ok"]


def test_some_kernels_alone_are_checked_and_a_slip_in_a_name_is_told(run, capsys):
    every = all_specs().values()
    assert chosen(ARGS, every) == [*every]
    some = argparse.Namespace(kernels=["rms_norm", "quantize"])
    assert sorted(spec.name for spec in chosen(some, every)) == ["quantize", "rms_norm"]
    for more, told in [
        (["rms_nrm"], "no kernel is named rms_nrm"),
        (["--only", "greedy_parity"], "greedy_parity does not support --kernels"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            run("--kernels", "rms_norm", *more)
        assert told in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine would run them")
def test_some_kernels_ask_for_the_sections_that_go_kernel_by_kernel(run, tmp_path):
    assert run("--kernels", "rms_norm", "--output", tmp_path) == 3
    sections = json.loads((tmp_path / "gpu_check.json").read_text())["sections"]
    assert "kernel_parity" in sections
    others = {"greedy_parity", "sealed_bundle", "late_load", "decode_beside_copy", "sampling_steps"}
    others |= {"lora_steps", "all_reduce_rounds", "all_reduce_latency"}
    assert not others & {*sections}


def test_a_kernel_is_timed_beside_a_copy_of_as_many_bytes():
    spec, ceilings = find_spec("rms_norm"), Ceilings(1e9, 1e9, 1.0, 0)
    sizes = {"rows": 3, "d": 1024}

    def run(spec, arguments):
        host.run(spec, arguments, env=settings())

    named = {**sizes, "requests": 3, "context": 1024, "kv_heads": 1, "kv_bytes": 1, "group": 8}
    variant = next(spec.variants(spec.bench_needs))
    row = beside_copy.beside_copy(spec, variant, named, ceilings, "cpu", run, 2**30)
    cost = spec.cost(variant, sizes)
    assert row["sizes"] == "3 x 1024 of 1 KV head in fp8"
    assert beside_copy._name({**named, "kv_heads": 8}) == "3 x 1024, groups of 8 in fp8"
    assert beside_copy._name({**named, "kv_heads": 8, "group": 4}) == "3 x 1024 in fp8"
    assert row["kernel_us"] > row["copy_us"] > 0, "the host's norm takes milliseconds"
    assert row["of_such_a_copy"] == pytest.approx(row["copy_us"] / row["kernel_us"], abs=2e-3)
    assert row["such_a_copy_of_that_rate"] == pytest.approx(
        cost.bytes / 1e3 / row["copy_us"], rel=0.02
    )


def test_one_item_that_fails_does_not_stop_the_others(capsys):
    def work(item):
        if item == "bad":
            raise ValueError("boom\nsecond line")
        yield {"kernel": item, "ok": True}

    rows = Pace(ARGS, seconds=60).rows(["a", "bad", "b"], str, work)
    assert [row["kernel"] for row in rows] == ["a", "bad", "b"]
    assert [row["ok"] for row in rows] == [True, False, True]
    assert rows[1]["status"] == "ValueError: boom"
    assert "bad" in capsys.readouterr().out


def test_what_finds_no_time_left_says_so_and_is_no_failure():
    rows = Pace(ARGS, seconds=0).rows(["a"], str, lambda item: [{"ok": False}])
    assert rows == [
        {"kernel": "a", "status": "not measured: the section's 0 s were used up"},
    ]


def test_shares_of_a_section_have_every_item_once():
    every = list(range(11))
    seen = []
    for text in ("0/3", "1/3", "2/3"):
        args = argparse.Namespace(quick=False, share=share_of(text))
        rows = Pace(args, seconds=60).rows(every, str, lambda item: [{"kernel": item}])
        seen += [row["kernel"] for row in rows]
    assert sorted(seen) == every
    assert seen[:4] == [0, 3, 6, 9]


STAND_IN = """
import json, os, sys, time
told = [word for word in sys.argv[1:] if word != "--ahead"]
flags = dict(zip(told[::2], told[1::2]))
section, share = flags["--section"], flags.get("--share", "").split("/")[0]
print(section, share, *sys.argv[1:], file=open(os.environ["SAID"], "a"))
if section == "kernel_parity" and share == "3":
    os._exit(7)
if section == "late_load":
    time.sleep(60)
row = {"kernel": f"{section} {'dcba'[int(share)]}", "ok": section != "greedy_parity"}
status = "failed" if section == "greedy_parity" else "passed"
open(flags["--result"], "w").write(json.dumps({"status": status, "rows": [row]}))
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Fake section processes without a GPU; a file records their arguments."""
    script, said = tmp_path / "stand_in.py", tmp_path / "said"
    script.write_text(STAND_IN)
    monkeypatch.setattr(children, "_SCRIPT", script)
    monkeypatch.setattr(children.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(children, "free_gib", lambda: 80.0)
    monkeypatch.setattr(children, "num_cores", lambda: 16)
    monkeypatch.setenv("SAID", str(said))
    short = replace(children.SECTIONS["late_load"], seconds=1)
    monkeypatch.setitem(children.SECTIONS, "late_load", short)
    return said


ASKED = argparse.Namespace(quick=False, bundle=None, kernels=[])


def test_what_times_nothing_runs_at_once_and_nobody_stops_the_others(stand_in):
    names = ["kernel_loading", "late_load", "kernel_parity", "greedy_parity", "batch_invariance"]
    found = dict(children.run_all(names, ASKED))
    assert [*found][-1] == "kernel_loading", "what is timed comes when the others are done"
    assert found["kernel_loading"]["status"] == found["batch_invariance"]["status"] == "passed"
    assert found["greedy_parity"]["status"] == "failed"
    assert "not done after 1 s" in found["late_load"]["reason"]
    parity = found["kernel_parity"]
    assert parity["status"] == "failed"
    assert parity["reason"] == "its process ended with 7"
    assert [row["kernel"] for row in parity["rows"]] == [f"kernel_parity {c}" for c in "bcd"]
    assert found["late_load"]["seconds"] >= 1


def test_what_is_timed_beside_torch_compile_is_compiled_before(stand_in):
    (found,) = dict(children.run_all(["against_compile"], ASKED)).values()
    assert found["status"] == "passed"
    said = stand_in.read_text().splitlines()
    ahead = [line for line in said if "--ahead" in line]
    assert len(ahead) == len(said) - 1 == children.SECTIONS["against_compile"].ahead
    assert "--ahead" not in said[-1]


def test_a_section_for_which_no_time_is_left_is_not_measured(stand_in):
    found = children.run_section("kernel_loading", ASKED, 3.0, Room(80.0, 16))
    assert found["status"] == "not measured"
    assert "used up" in found["reason"]
    assert not stand_in.exists()


def test_times_of_many_batches_are_told_by_their_quantiles():
    row = sampling_steps.quantiles([30.0, *[20.0 + i / 10 for i in range(19)]])
    assert row == {
        "batches": 20, "median_us": 20.95, "nine_of_ten_us": 21.7, "slowest_us": 30.0,
        "over_25_us": 1,
    }  # fmt: skip


@pytest.mark.deep
def test_the_greedy_section_holds_on_a_cpu():
    greedy.exact_products()
    rows = [row for family in greedy.FAMILIES for row in greedy.rows_of(family, (1, 7), "cpu")]
    assert len(rows) == 2 * (len(greedy.FAMILIES) + 2)
    assert not [row for row in rows if not row["ok"]]


def test_two_runs_of_one_source_agree_to_the_bit():
    spec = find_spec("rms_norm")
    row = agreement.compare_sides(spec, next(spec.variants()), "cpu")
    assert row["ok"]
    assert row["bitwise"]
    assert row["difference"] == 0
    assert row["cases"] == len(spec.sizes)


def test_sides_that_list_in_another_order_agree(monkeypatch):
    spec, run = find_spec("token_edits"), host.run

    def turned(spec, a, **more):
        run(spec, a, **more)
        for first, end in a.spans.tolist() if "seed" in more else ():
            for part in (a.tokens, a.counts, a.biases):
                part[first:end] = part[first:end].flip(0)

    monkeypatch.setattr(host, "run", turned)
    row = agreement.compare_sides(spec, next(spec.variants()), "cpu")
    assert (row["ok"], row["bitwise"]) == (True, False)


def test_sides_that_disagree_are_told(monkeypatch):
    spec = find_spec("rms_norm")
    sides = []

    def run(spec, arguments, *, env, seed=0):
        sides.append(seed)
        arguments[0].fill_(1.0 + 0.1 * seed)

    monkeypatch.setattr(agreement.host, "run", run)
    row = agreement.compare_sides(spec, next(spec.variants()), "cpu")
    assert sides[:2] == [0, 1]
    assert not row["ok"]
    assert not row["bitwise"]
    assert row["difference"] == pytest.approx(0.1 / 1, abs=0.02)


def on_host(spec, arguments, seed=0):
    agreement.host.run(spec, arguments, env=settings(), seed=seed)


@pytest.mark.parametrize("name", ["rms_norm", "fused_add_rms_norm", "silu_and_mul", "route_tokens"])
def test_rows_alone_and_shuffled_have_the_bits_of_the_whole(name):
    row = invariance.by_row(find_spec(name), "cpu", on_host)
    assert row["trials"] > 10
    assert row["differ"] == 0
    assert row["ok"]


def test_a_row_that_depends_on_its_place_is_found():
    def by_place(spec, arguments):
        on_host(spec, arguments)
        arguments[0].add_(torch.arange(len(arguments[0])).unsqueeze(1))

    row = invariance.by_row(find_spec("rms_norm"), "cpu", by_place)
    assert row["differ"] > 5
    assert not row["ok"]


@pytest.fixture
def on_cpu(monkeypatch):
    """The kernel sections on the host toolchain and small sizes, to test their code."""
    names = ("rms_norm", "route_tokens", "align_tokens")
    small = {
        name: replace(find_spec(name), bench_sizes=find_spec(name).sizes[1:3]) for name in names
    }
    monkeypatch.setattr(kernels, "DEVICE", "cpu")
    monkeypatch.setattr(kernels, "load_kernels", lambda *a: None)
    monkeypatch.setattr(kernels, "operators", lambda: list(small.values()))
    return small


def test_the_parity_section_has_a_row_for_each_variant_and_choice(on_cpu):
    rows = kernels.parity(ARGS)
    assert not [row for row in rows if not row["ok"]]
    want = 2 * sum(len(list(spec.variants())) for spec in on_cpu.values())
    assert len(rows) == want
    assert {row["implementation"] for row in rows} == {"host", "torch"}
    norms = [row for row in rows if row["kernel"].startswith("rms_norm[")]
    assert {row["cases"] for row in norms} == {len(find_spec("rms_norm").sizes) + 1}
    assert [row["implementation"] for row in rows] == ["host"] * (want // 2) + ["torch"] * (
        want // 2
    ), "Kiln's own come first: they are what time is for"


def test_the_parity_section_names_the_size_that_fails(on_cpu, monkeypatch):
    def wrong(arguments):
        return lambda: arguments[0].zero_()

    monkeypatch.setattr(kernels, "implementations", lambda spec: {"jit": wrong})
    rows = kernels.parity(ARGS)
    assert not [row for row in rows if row["ok"]]
    assert all("sizes" in row for row in rows)


def test_the_timing_section_begins_with_the_ceilings_and_has_each_kernel(on_cpu):
    first, *rows = kernels.timing(ARGS)
    assert first["ceilings"]["copy_bytes_s"] > 0
    assert {row["kernel"] for row in rows} == set(on_cpu)
    own = [row for row in rows if row["implementation"] == "host"]
    assert all(row["ok"] for row in own)
    assert len(rows) == 2 * len(on_cpu)


def test_integers_must_be_equal_and_not_merely_close():
    spec = replace(find_spec("rms_norm"), parameters=declare(outputs("out")), tolerance=1e9)
    one, same, other = (spec.arguments([torch.tensor([1, 2, last])]) for last in (3, 3, 4))
    assert agreement._difference(spec, one, same) == 0
    assert agreement._difference(spec, one, other) == float("inf")


def test_timings_become_a_table_and_a_roofline(tmp_path):
    row = {
        "kernel": "rms_norm", "family": "norm", "variant": {}, "sizes": {"rows": 1},
        "implementation": "jit", "status": "measured", "median_us": 2.0, "spread_us": 0.1,
        "captured": True, "cold": True, "bytes": 1000, "flops": 2000, "bound": "memory",
        "gb_s": 0.5, "tflop_s": 0.001, "share_of_floor": 0.1, "times_ours": 1.0,
    }  # fmt: skip
    torch_row = row | {"implementation": "torch", "median_us": 4.0, "times_ours": 2.0}
    rows = [{"ceilings": asdict(Ceilings(4e12, 8e14, 1.3, 60 << 20))}, row, torch_row]
    sections = {"kernel_timing": {"status": "passed", "rows": rows, "seconds": 1}}
    report.write(Report("gpu_check", "c", details={"sections": sections}), tmp_path)
    assert "| rms_norm | rows=1 | 2.00 |" in (tmp_path / "gpu_check.md").read_text()
    assert (tmp_path / "roofline-norm.png").stat().st_size > 1000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_everything_holds_on_the_gpu(tmp_path):
    command = [sys.executable, "tools/gpu_check.py", "--quick", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:]
