"""The history of a chat is for this user alone, bounded, without keys, and never an obstacle."""

from __future__ import annotations

import json
import os

import pytest

from kiln.engine.cli.chat import history
from kiln.engine.cli.chat.commands import parse
from kiln.engine.cli.chat.history import History, history_file


@pytest.fixture
def file(tmp_path):
    yield tmp_path / "kiln" / "chat_history"
    history.readline.clear_history()


def _kept(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def _recalled():
    count = history.readline.get_current_history_length()
    return [history.readline.get_history_item(number + 1) for number in range(count)]


def test_messages_come_back_with_their_lines(file):
    first = History(file)
    for text in ("one", "two\nlines", "two\nlines", "", "/help"):
        first.add(text)
    assert _kept(file) == ["one", "two\nlines", "/help"]
    History(file)
    assert _recalled() == ["one", "two\nlines", "/help"]


@pytest.mark.parametrize(
    "text",
    [
        *(" with a space", "my key is sk-abcdefgh12345", "hf_abcdefghijkl", "ghp_abcdefghijk"),
        *("Authorization: Bearer abcdefgh123", "x" * 5000),
    ],
)
def test_what_should_not_be_kept_is_not(file, text):
    History(file).add(text)
    assert not file.exists()
    assert _recalled() == []


def test_the_file_is_for_this_user_and_does_not_grow_without_end(file):
    file.parent.mkdir()
    file.write_text("".join(f"{json.dumps(str(number))}\n" for number in range(5000)) + "cut o")
    file.chmod(0o644)
    kept = History(file)
    assert len(_recalled()) == 999
    assert len(file.read_text().splitlines()) == 1000
    kept.add("more")
    assert file.stat().st_mode & 0o777 == 0o600
    assert _recalled()[-2:] == ["4999", "more"]


def test_a_file_that_cannot_be_written_is_told_once(file, capsys):
    file.parent.write_text("")
    kept = History(file)
    kept.add("one")
    kept.add("two")
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert _recalled() == ["one", "two"]


def test_a_link_is_not_followed(file, tmp_path, capsys):
    file.parent.mkdir()
    (tmp_path / "other").write_text("")
    file.symlink_to(tmp_path / "other")
    History(file).add("one")
    assert (tmp_path / "other").read_text() == ""
    assert "the history is not kept" in capsys.readouterr().err


def test_the_folder_is_that_of_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert history_file() == tmp_path / "kiln" / "chat_history"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert history_file() == tmp_path / ".local/state/kiln/chat_history"
    monkeypatch.setenv("HOME", "")
    assert history_file() is None


def test_without_a_file_there_is_a_history_of_this_chat(file):
    kept = History(None)
    kept.add("one")
    assert _recalled() == ["one"]
    assert not file.exists()


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("/help", ("/help", "")),
        ("/HELP", ("/help", "")),
        ("/?", ("/help", "")),
        ("/bye", ("/quit", "")),
        ("/model  a b ", ("/model", "a b")),
        ("/system", ("/system", "")),
        ("/save! x.md", ("/save!", "x.md")),
        (" /help", None),
        ("/etc/hosts", None),
        ("/etc", None),
        ("/usr is full", None),
        ("/help\nand more", None),
        ("5/3", None),
        ("//", None),
    ],
)
def test_a_command_is_a_known_word_at_the_beginning(text, command):
    assert parse(text) == command
    assert os.path.exists("/etc")
