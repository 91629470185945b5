"""Whether a change leaves machine code as it was is told from two checkouts."""

from __future__ import annotations

import shutil
from pathlib import Path

import same_code

ROOT = Path(__file__).resolve().parents[2]


def test_a_comment_changes_no_code_and_an_instruction_does(tmp_path):
    for folder in ("cache", "jit_kernels", "kernel_sources", "tools"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=ignored)
    for name, old, new in (
        ("kv/copy_blocks.cu", "  kiln::take_turn();", "  kiln::take_turn();  // first of all"),
        ("activation/act_and_mul.cu", "  kiln::take_turn();", "  kiln::pdl_wait();"),
    ):
        path = tmp_path / "kernel_sources" / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
    rows = same_code.compare(tmp_path, ROOT, ["copy_blocks", "silu_and_mul"], ["sm_80", "sm_90a"])
    differ = {name for name, instructions, *_ in rows if instructions}
    assert len(rows) == 2 + 3 * 2
    assert differ == {f"silu_and_mul[{t},silu] sm_90a" for t in ("float", "fp16", "bf16")}


def test_what_only_one_checkout_has_is_named():
    assert same_code._difference(None, b"") == ("not there before", "", "")
    assert same_code._difference(b"", None) == ("not there now", "", "")
