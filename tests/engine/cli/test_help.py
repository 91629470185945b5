"""The help is short, names every flag, and explains what is asked for; it fits the terminal."""

from __future__ import annotations

import pytest

from kiln.engine.cli.commands.serve import OFTEN
from kiln.engine.cli.engine_flags import ENGINE, LORA
from kiln.engine.cli.main import build_parser, main
from kiln.engine.cli.serve_flags import CHATS, SERVER

OWN = {"chat": "--url", "bench latency": "--batch-sizes", "bench serving": "--num-prompts"}


def _every_command(parser):
    verbs = parser._verbs()
    yield from ([name, *rest] for name, one in verbs.items() for rest in _every_command(one))
    yield []


COMMANDS = [words for words in _every_command(build_parser())]


def _page(capsys, monkeypatch, *words, columns=80):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_no_page_has_a_line_longer_than_the_terminal(capsys, monkeypatch, words):
    for topic in ("--help", "--help=all"):
        page = _page(capsys, monkeypatch, *words, topic)
        assert page.startswith(f"usage: {' '.join(['kiln', *words])}")
        assert max(map(len, page.splitlines())) < 80
    narrow = _page(capsys, monkeypatch, *words, "--help=all", columns=60)
    assert max(map(len, narrow.splitlines())) <= 66  # as long as three choices or names


@pytest.mark.parametrize("command", OWN)
def test_engine_flags_are_named_and_those_of_the_command_explained(capsys, monkeypatch, command):
    short = _page(capsys, monkeypatch, *command.split(), "--help")
    own, _, named = short.partition("more flags, by group")
    assert f"  {OWN[command]} " in own
    assert "--block-size" not in own
    for _, flags in ENGINE:
        assert all(flag.name in named.split() for flag in flags)
    if command != "bench serving":  # whose load has flags of its own
        assert len(short.splitlines()) < 75, "two screens"


def test_the_help_of_serve_explains_what_is_often_used_and_names_every_flag(capsys, monkeypatch):
    short = _page(capsys, monkeypatch, "serve", "--help")
    for _, flags in (*ENGINE, LORA, CHATS, SERVER):
        assert all(flag.name in short.split() for flag in flags)
    explained = short.partition("often used:")[2].partition("\nflags:")[0]
    assert all(f"  {name}" in explained for name in OFTEN)
    assert explained.index("--host") < explained.index("--lora-modules"), "in that order"


@pytest.mark.parametrize(
    ("topic", "has", "lacks"),
    [
        ("KV_pool", "--kv-offload-gib", "--max-num-seqs"),
        ("kv", "--kv-offload-gib", "--max-num-seqs"),
        ("engine", "--max-num-seqs", "--port"),
        ("max_num_seqs", "at once; default 256", "--port"),
        ("--max-num-seqs", "at once; default 256", "--port"),
        ("keep-alive", "--timeout-keep-alive", "--host"),
        ("get 503", "--max-waiting", "--host"),
        ("all", "these are accepted because", "xyzzy"),
        ("page", "these are accepted because", "xyzzy"),  # not a terminal here
        ("ListGroup", "kv-pool, scheduler", "--host"),
    ],
)
def test_a_topic_is_a_group_a_flag_or_a_word(capsys, monkeypatch, topic, has, lacks):
    page = " ".join(_page(capsys, monkeypatch, "serve", f"--help={topic}").split())
    assert has in page
    assert lacks not in page


def test_other_ways_to_ask(capsys, monkeypatch):
    short = _page(capsys, monkeypatch, "chat", "--help")
    assert _page(capsys, monkeypatch, "chat", "-h", "model") == short, "no word is its topic"
    assert _page(capsys, monkeypatch, "help", "chat") == short
    everything = _page(capsys, monkeypatch, "chat", "--help=all")
    assert _page(capsys, monkeypatch, "chat", "--help-all") == everything


def test_a_topic_that_does_not_exist(capsys):
    with pytest.raises(SystemExit) as end:
        main(["serve", "--help=xyzzy"])
    assert end.value.code == 2
    assert "--help=xyzzy: no group, flag or word of the help; groups are" in capsys.readouterr().err
