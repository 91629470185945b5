"""Memory that the ranks of a group share on a CPU, and what is left of it after they end."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_memory import die_at, open_files, refused, write_to_all
from rank_processes import RankFailed, Ranks

from kiln.engine.distributed.shared_memory import SharedMemory
from kiln.engine.errors import ConfigError

SHM = Path("/dev/shm")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3) as processes:
        yield processes


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SHM, prefix="kiln-test-") as name:
        yield Path(name)


@pytest.mark.parametrize(("world", "num_bytes"), [(2, 128), (3, 128), (3, 1_000_001)])
def test_every_rank_reaches_every_buffer(ranks, world, num_bytes):
    for rank, told in enumerate(ranks.call(write_to_all, [(num_bytes,)] * world)):
        numbers = list(range(1, world + 1))
        assert told == {
            "zeros": True, "alignment": 0, "peers": (world,), "own_distance": 0,
            "first": numbers, "last": 101 + (rank - 1) % world,
            "afterwards": numbers,  # a tensor keeps its memory after close
        }  # fmt: skip


def test_close_gives_back_all_files_and_memory(ranks):
    for before, during, after in ranks.call(open_files, [()] * 3):
        assert during > before
        assert after == before


def test_too_little_memory_is_an_error_on_every_rank_that_says_how_much_is_needed(ranks):
    most = 1 << 50
    if os.statvfs(SHM).f_blocks == 0:
        pytest.skip("/dev/shm has no limit here")
    for text, left in ranks.call(refused, [(SHM, 4096), (SHM, most), (SHM, 4096)]):
        assert f"rank 1: {most + 16} bytes of shared memory in /dev/shm: No space left" in text
        assert "bytes are free" in text
        assert "--shm-size" in text
        assert left == 0


def test_a_folder_that_is_missing_is_named(ranks, folder):
    for text, left in ranks.call(refused, [(folder, 4096), (folder / "none", 4096)]):
        assert f"rank 1: 4112 bytes of shared memory in {folder}/none: No such file" in text
        assert left == 0


def test_ranks_that_ask_for_different_sizes_are_told_so(ranks):
    for text, left in ranks.call(refused, [(SHM, 4096), (SHM, 8192)]):
        assert "rank 0: a peer's buffer has 8192 bytes, its own has 4096" in text
        assert "rank 1: a peer's buffer has 4096 bytes, its own has 8192" in text
        assert left == 0


@pytest.mark.parametrize("step", range(4))
def test_a_rank_that_is_killed_at_any_step_leaves_nothing_behind(folder, step):
    with Ranks(2) as processes:
        lives, dead = processes.try_call(die_at, [(folder, step)] * 2)
    assert lives == ("a rank has ended" if step < 3 else "")
    assert isinstance(dead, RankFailed) == (step < 3)
    assert os.listdir(folder) == []


def test_a_process_that_is_not_the_peer_is_no_rank():
    def with_another_proof(data: bytes) -> list[bytes]:
        other = data.replace(b'"proof": "', b'"proof": "0')
        return [data, other.removesuffix(b" ")]

    with pytest.raises(ConfigError, match=r"/proc/\d+/fd/\d+ is not the peer's buffer: all ranks"):
        SharedMemory(64, 0, with_another_proof)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="num_bytes is 0"):
        SharedMemory(0, 0, lambda data: [data])
    with pytest.raises(ValueError, match="did not return rank 0's own bytes"):
        SharedMemory(64, 0, lambda data: [data.replace(b'"pid": ', b'"pid": 1')])
