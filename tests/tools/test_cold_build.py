"""The other build methods of the cold-build comparison compile the same kernels."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from cold_build import report, sources

from kiln.engine.bench.report import Report

STYLES = [sources.plain_c, sources.tvm_ffi, sources.torch_extension]


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.__name__)
@pytest.mark.parametrize("program", sources.programs_of(sources.KERNELS), ids=lambda one: one.label)
def test_a_launcher_passes_every_argument_of_the_kernel_in_order(program, style):
    spec, text = program.spec, style(program)
    assert program.text in text
    (passed,) = re.findall(rf"{spec.entry}<<<.*>>>\((.*)\);", text)
    numbers = [int(number) for number in re.findall(r"\ba(\d+)", passed)]
    assert numbers == list(range(len(spec.c_types)))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_nvcc_reads_the_headers_and_finds_the_same_entry(tmp_path):
    programs = sources.programs_of(["rms_norm"])
    sources.write_headers(tmp_path, programs)
    (tmp_path / "x.cu").write_text(sources.plain_c(programs[0]))
    command = ["nvcc", "-std=c++17", "-I.", "-arch=sm_90a", "-cubin", "x.cu", "-o", "x.cubin"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
    assert b"rms_norm" in (tmp_path / "x.cubin").read_bytes()


def test_the_table_names_machine_command_and_ratio(tmp_path):
    row = {
        "way": "nvrtc", "what": "Kiln", "wall_seconds": 0.1, "cpu_seconds": 0.1,
        "times_nvrtc_wall": 1.0, "times_nvrtc_cpu": 1.0, "artefact_bytes": 10,
        "empty_kernel_cpu_seconds": None, "rounds": [[0.1, 0.1]],
    }  # fmt: skip
    other = {**row, "what": "nvcc -cubin", "times_nvrtc_wall": 5.5}
    details = {
        "load_average_at_end": 0.1, "not_measured": {"tvm-ffi-so": "not installed"},
        "programs": [{"program": "rms_norm[bf16]", "nvrtc_cpu_seconds": 0.1,
                      "nvcc_cubin_cpu_seconds": 0.4, "times_nvrtc_cpu": 4.0}],
    }  # fmt: skip
    result = Report(
        "cold_build", "the command", [row, other],
        {"arch": "sm_90a", "kernels": ["rms_norm"], "rounds": 3}, details,
        hardware={"cpu": "P", "cores": 2, "gpu": "none"},
    )  # fmt: skip
    report.write(result, tmp_path)
    text = (tmp_path / "cold_build.md").read_text()
    parts = ("the command", "P, 2 cores", "| nvcc -cubin |", "5.5", "not installed")
    assert all(part in text for part in (*parts, "| rms_norm[bf16] |")), text
    assert (tmp_path / "cold_build.png").stat().st_size > 1000
