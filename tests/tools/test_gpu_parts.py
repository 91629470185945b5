"""gpu_check's sections share what the card has, and several calls run each of them once."""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from pathlib import Path

import gpu_check
import pytest
from depth import at_depth
from gpu import children, parts, room
from gpu.parts import Part, join, part_of, planned_seconds, split
from gpu.room import Room
from gpu.sections import SECTIONS, SEVERAL_GPUS, WHOLE, WHOLE_PART, Section

ASKED = argparse.Namespace(quick=False, bundle=None, kernels=[])


class Card:
    """Sections that claim memory and cores, and what they held at once while they ran."""

    def __init__(self, monkeypatch, sections, gib, cores):
        self.ran, self.most_gib, self.most_cores, self.most_names = [], 0.0, 0, set()
        self.beside_timed = []
        self._held, self._lock = {}, threading.Lock()
        self._sections, self._room = sections, Room(gib, cores)
        monkeypatch.setattr(children, "SECTIONS", sections)
        monkeypatch.setattr(parts, "ALL", sections)
        monkeypatch.setattr(children, "free_gib", lambda: gib)
        monkeypatch.setattr(children, "num_cores", lambda: cores)
        monkeypatch.setattr(children.torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(children, "_run_shares", self._run)

    def _run(self, name, args, shares, end, *more):
        section = self._sections[name]
        with self._lock:
            self.ran.append(name)
            self._held[name] = (shares * section.gib, max(section.cores, shares))
            self.most_gib = max(self.most_gib, sum(gib for gib, _ in self._held.values()))
            cores = sum(cores for _, cores in self._held.values())
            if len(self._held) > 1:
                self.most_cores = max(self.most_cores, cores)
                timed = [one for one in self._held if not self._sections[one].beside_others]
                self.beside_timed += timed
            self.most_names = max(self.most_names, {*self._held}, key=len)
        time.sleep(0.002)
        with self._lock:
            del self._held[name]
        return [{"status": "passed", "rows": [{"kernel": name}]}]


def some_sections(chance):
    return {
        f"s{index}": Section(
            "", "", 9, chance.randint(1, 200), chance.choice([1, 3, 6.5, 24, 40]),
            chance.random() < 0.7, chance.randint(1, 6), chance.choice([1, 1, 4]),
        )
        for index in range(chance.randint(1, 12))
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(at_depth(15, 300)))
def test_sections_at_once_never_claim_more_than_there_is_and_all_run_once(seed, monkeypatch):
    chance = random.Random(seed)
    sections, gib = some_sections(chance), chance.choice([5.0, 25.0, 79.0])
    card = Card(monkeypatch, sections, gib, cores=chance.choice([1, 4, 16]))
    found = dict(children.run_all([*sections], ASKED))
    assert found.keys() == sections.keys()
    larger = {name for name, section in sections.items() if section.gib > gib}
    assert sorted(card.ran) == sorted(sections.keys() - larger)
    assert card.most_gib <= gib
    assert card.most_cores <= card._room.cores
    assert not card.beside_timed, "what is timed runs alone"
    for name, section in found.items():
        assert section["status"] == ("not measured" if name in larger else "passed")
        if name in larger:
            wanted = f"{name} needs {sections[name].gib:g} GiB of GPU memory, and {gib:.1f} GiB"
            assert wanted in section["reason"]


def test_sections_that_fit_together_run_together(monkeypatch):
    begun = threading.Barrier(3, timeout=20)
    sections = {name: Section("", "", 9, 5, 10, True) for name in "abc"}
    Card(monkeypatch, sections, gib=30.0, cores=3)
    passed = [{"status": "passed", "rows": []}]
    monkeypatch.setattr(children, "_run_shares", lambda *a: begun.wait() >= 0 and passed)
    assert {one["status"] for _, one in children.run_all([*sections], ASKED)} == {"passed"}


def test_a_small_card_runs_fewer_processes_of_a_section_at_once():
    parity, ahead = SECTIONS["kernel_parity"], SECTIONS["against_compile"]
    for gib, shares in ((80.0, 4), (47.0, 3), (24.0, 1), (12.0, 0)):
        assert Room(gib, 16).processes(parity, parity.shares) == shares
    assert Room(24.0, 16).processes(ahead, ahead.ahead) == 3


def test_a_section_keeps_to_the_memory_that_it_states(monkeypatch):
    fractions = []
    monkeypatch.setattr(room.torch.cuda, "mem_get_info", lambda: (70 << 30, 80 << 30))
    monkeypatch.setattr(room.torch.cuda, "set_per_process_memory_fraction", fractions.append)
    room.hold_to(15)
    room.hold_to(200)
    assert fractions == [(15 - room.CONTEXT_GIB) / 80, 1.0]
    for name, section in SECTIONS.items():
        assert section.gib >= room.CONTEXT_GIB, name
        assert section.gib <= 79, f"{name}: an H100 of 80 GB has no more"


@pytest.mark.parametrize("own", [SECTIONS, SEVERAL_GPUS])
@pytest.mark.parametrize("of", range(1, 6))
def test_every_section_is_in_one_part_and_parts_are_balanced(own, of):
    divided = split([*own], of)
    assert divided == split([*own], of)
    assert sorted(name for part in divided for name in part) == sorted(own)
    seconds = [planned_seconds(part) for part in divided]
    assert max(seconds) - min(seconds) <= 0.1 * planned_seconds([*own]) or of > 3
    if of > 1:
        assert max(seconds) < 0.9 * WHOLE_PART < 0.9 * 600
    assert planned_seconds([*own]) < 0.8 * WHOLE
    chance = random.Random(of)
    some = chance.sample([*own], 4)
    assert sorted(name for part in split(some, of) for name in part) == sorted(some)


def test_what_a_section_has_started_ends_with_it(monkeypatch, tmp_path):
    script, said = tmp_path / "stand_in.py", tmp_path / "process"
    script.write_text(
        "import os, pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
        f"pathlib.Path({str(said)!r}).write_text(str(child.pid))\n"
        "time.sleep(100)\n"
    )
    monkeypatch.setattr(children, "_SCRIPT", script)
    until = time.perf_counter() + 60
    runner = threading.Thread(
        target=children._run_shares, args=("late_load", ASKED, 1, time.perf_counter() + 3)
    )
    runner.start()
    runner.join()
    process = int(said.read_text())
    while _runs(process) and time.perf_counter() < until:
        time.sleep(0.01)
    assert not _runs(process)


def _runs(process):
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run gpu_check with sections that end at once; return its exit code, and what it ran."""
    monkeypatch.setattr(children.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(children.torch.cuda, "get_device_name", lambda: "a GPU")
    ran = []

    def run_all(names, args):
        ran.extend(names)
        for name in names:
            row = {"kernel": name, "ok": name != "late_load"}
            status = "passed" if row["ok"] else "failed"
            yield name, {"status": status, "rows": [row], "seconds": 1.0}

    monkeypatch.setattr(gpu_check, "run_all", run_all)

    def run(*words):
        monkeypatch.setattr("sys.argv", ["tools/gpu_check.py", *words, "--output", str(tmp_path)])
        return gpu_check.main()

    run.ran, run.folder = ran, tmp_path
    return run


def test_the_last_part_joins_the_reports_of_all(run, capsys):
    codes = [run("--part", "2/3"), run("--part", "1/3")]
    assert "to run, before there is one report" in capsys.readouterr().out
    assert not (run.folder / "gpu_check.json").exists()
    codes.append(run("--part", "3/3"))
    assert sorted(codes) == [0, 0, 1], "one part has the section that fails"
    assert sorted(run.ran) == sorted(SECTIONS)
    whole = json.loads((run.folder / "gpu_check.json").read_text())
    assert [*whole["sections"]] == [*SECTIONS]
    assert [*whole["parts"]] == ["1/3", "2/3", "3/3"]
    assert whole["command"].count("--part") == 3
    page = (run.folder / "gpu_check.md").read_text()
    assert all(f"## {name}: " in page for name in SECTIONS)
    assert not [*run.folder.glob("*_part*")], "a later round must not be joined with these"


def test_parts_from_other_folders_are_joined_by_a_command(run, capsys):
    files = [run.folder / f"{number}.json" for number in (1, 2)]
    for number, file in enumerate(files, 1):
        run("--part", f"{number}/2", "--only", "late_load", "--only", "kernel_builds")
        (run.folder / f"gpu_check_part{number}of2.json").rename(file)
    assert run("--join", *map(str, files)) == 0
    whole = json.loads((run.folder / "gpu_check.json").read_text())
    assert [*whole["sections"]] == ["late_load", "kernel_builds"]
    with pytest.raises(SystemExit, match="2"):
        run("--join", str(files[0]))
    assert "the report of part 2/2 is missing" in capsys.readouterr().err


def test_parts_of_two_machines_or_of_two_divisions_are_not_joined(run, capsys):
    run("--part", "1/2", "--only", "late_load", "--only", "kernel_builds")
    first = run.folder / "gpu_check_part1of2.json"
    other = json.loads(first.read_text())
    other["hardware"]["gpu"] = "another"
    first.write_text(json.dumps(other))
    capsys.readouterr()
    assert run("--part", "2/2", "--only", "late_load", "--only", "kernel_builds") in (0, 1)
    assert "is of another hardware than gpu_check_part1of2.json" in capsys.readouterr().out
    assert not (run.folder / "gpu_check.json").exists()
    other["part"] = {"number": 2, "of": 3}
    first.write_text(json.dumps(other))
    with pytest.raises(ValueError, match="divided in one way"):
        join([run.folder / "gpu_check_part2of2.json", first])
    same = run.folder / "gpu_check_part2of2.json"
    again = run.folder / "again.json"
    again.write_text(json.dumps(json.loads(same.read_text()) | {"part": {"number": 1, "of": 2}}))
    with pytest.raises(ValueError, match="is in another part too"):
        join([same, again])


def test_a_part_is_a_number_of_a_number():
    assert (part_of("1/2"), str(part_of("2/2"))) == (Part(1, 2), "2/2")
    for wrong in ("2", "0/2", "3/2", "a/b", "-1/2", "1/2/3"):
        with pytest.raises(argparse.ArgumentTypeError, match="want K/N"):
            part_of(wrong)
    assert children._whole(argparse.Namespace(part=Part(1, 2), gpus=1)) == WHOLE_PART
    assert children._whole(argparse.Namespace(part=None, gpus=1)) == WHOLE


def test_a_process_says_how_much_memory_it_held():
    shares = [{"status": "passed", "rows": [], "peak_gib": peak} for peak in (3.5, 7.25)]
    assert children.together(shares)["peak_gib"] == 7.25
