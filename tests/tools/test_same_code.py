"""same_code.py compares the machine code of two checkouts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import same_code
from depth import at_depth

ROOT = Path(__file__).resolve().parents[2]


def test_a_comment_or_a_renamed_module_changes_no_code_and_an_instruction_does(tmp_path):
    for folder in ("cache", "jit_kernels", "kernel_sources", "tools"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=ignored)
    (tmp_path / "cache/disk").rename(tmp_path / "cache/files")
    for folder in ("cache", "jit_kernels", "tools"):
        for path in (tmp_path / folder).rglob("*.py"):
            path.write_text(path.read_text().replace("kiln.cache.disk", "kiln.cache.files"))
    for name, old, new in (
        ("kv/copy_blocks.cu", "  uint8_t* blocks = pool", "  // here\n  uint8_t* blocks = pool"),
        ("activation/act_and_mul.cu", "  kiln::pdl_wait_then_trigger();", "  kiln::pdl_wait();"),
    ):
        path = tmp_path / "kernel_sources" / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
    archs = at_depth(["sm_90a"], ["sm_80", "sm_90a"])  # sm_80 lacks the instruction
    rows = same_code.compare(tmp_path, ROOT, ["copy_blocks", "silu_and_mul"], archs)
    differ = {name for name, instructions, *_ in rows if instructions}
    assert len(rows) == (1 + 3) * len(archs)
    assert differ == {f"silu_and_mul[{t},silu] sm_90a" for t in ("float", "fp16", "bf16")}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["HEAD", "--kernels", "silu_and_mull"], "no kernel or target is named silu_and_mull"),
        (["HEAD", "--archs", "sm_91"], "no kernel or target is named sm_91"),
        (["no-such-commit"], "git has no revision 'no-such-commit'"),
    ],
)
def test_what_is_not_there_is_refused_by_name(arguments, complaint, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["same_code.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        same_code.main()
    assert complaint in capsys.readouterr().err


@pytest.mark.deep
def test_what_only_one_checkout_has_is_named():
    assert same_code._difference(None, b"") == ("not there before", "", "")
    assert same_code._difference(b"", None) == ("not there now", "", "")
