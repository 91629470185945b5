"""``kiln chat`` in a terminal: editing, history, Ctrl-C, reasoning, and errors in a line or two."""

from __future__ import annotations

import json

import pytest
from chat_server import chat_server
from terminal import terminal


@pytest.fixture
def server():
    with chat_server() as made:
        yield made


def _history(folder):
    return folder / "kiln" / "chat_history"


def test_a_chat_as_a_person_has_it(server, tmp_path):
    state = {"XDG_STATE_HOME": str(tmp_path)}
    with terminal(["chat", "--url", server.url], state) as chat:
        chat.until("/help lists the commands.\n\n> ")
        chat.type("helxo\x08\x08lo\r")  # edited before it is sent
        chat.until("base heard hello\n\n> ")
        chat.type("\x1b[A\x1b[D!\r")  # the message before, with a letter put in
        chat.until("base heard hell!o\n\n> ")
        chat.type("slow\r")
        chat.until("...")
        chat.press_until("\x03", " (stopped)\n\n> ")
        assert server.left.wait(30), "the server is told"
        chat.type("a draft")
        chat.until("> a draft")
        chat.press_until("\x03", "\n\n> ")
        chat.type("two \\\r")
        chat.until(". ")
        chat.type("lines\r")
        chat.until("base heard two \nlines\n\n> ")
        chat.type("/model adapter\r")
        chat.until("so far\n\n> ")
        chat.type(" secretive\r")
        chat.until("adapter heard secretive\n\n> ")
        assert chat.ended("\x04") == 0
        assert chat.shown.endswith("> \n")
    kept, stopped, drafted, *_ = [body["messages"][-2:] for body in server.asked[1:]]
    assert [one["content"] for one in kept] == ["base heard hello", "hell!o"]
    assert stopped[1]["content"] == "slow"
    assert drafted[0]["content"].startswith("base heard ."), "the part that came is kept"
    file = _history(tmp_path)
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    assert kept == ["hello", "hell!o", "slow", "two \nlines", "/model adapter"]
    assert file.stat().st_mode & 0o777 == 0o600
    with terminal(["chat", "--url", server.url, "adapter"], state) as chat:
        chat.until("adapter. A line is a message; /help lists the commands.\n\n> ")
        chat.type("\x1b[A\x1b[A\x1b[A\r")
        chat.until("...")
        assert "adapter heard ..." in chat.shown
        chat.press_until("\x03", " (stopped)\n\n> ")
        assert chat.ended("\x03") == 0, "twice at the prompt ends"


@pytest.mark.parametrize("plain", [False, True])
def test_reasoning_is_dim_and_errors_leave_the_chat_going(server, tmp_path, plain):
    extra = {"NO_COLOR": "1"} if plain else {}
    state = {"XDG_STATE_HOME": str(tmp_path / "state"), **extra}
    with terminal(["chat", "--url", server.url, "--no-history"], state) as chat:
        chat.until("> ")
        chat.type("think\r")
        marks = ("(reasoning)\n", "(answer)\n") if plain else ("", "")
        chat.until(f"> think\n{marks[0]}let me see\n\n{marks[1]}base heard think\n\n> ")
        assert ("\x1b[2mlet me" in chat.raw) is not plain
        chat.type("long\r")
        chat.until("base heard long (cut off: the limit of tokens)\n\n> ")
        for question, told in (
            ("break", "base heard error: the server closed the stream before the end"),
            ("late", "some error: out of luck"),
            ("refuse", "error: the server answered 400: not that"),
            ("odd", "does not answer as OpenAI's API does"),
            ("/modle x", "/modle is no command; did you mean /model?"),
            ("/model x", "model 'x': is not here; there are base, adapter"),
            ("/save /no/such/x.md", "cannot be written: No such file or directory"),
        ):
            before = len(chat.shown)
            chat.type(f"{question}\r")
            chat.until("\n\n> ")
            assert told in " ".join(chat.shown[before:].split())
            assert max(map(len, chat.shown[before:].splitlines())) <= 80
        chat.type("/quit\r")
        assert chat.ended() == 0
        if plain:
            assert "\x1b[2m" not in chat.raw
    assert not _history(tmp_path / "state").exists()


@pytest.mark.deep
def test_the_own_engine_stops_its_answer(tmp_path):
    words = ["chat", "--kv-memory-gib", "0.1", "--no-history", "--temperature", "5"]
    with terminal(words, {}) as chat:
        chat.until("/help lists the commands.\n\n> ")
        chat.type("Tell me a story\r")
        chat.until("Tell me a story\n")
        chat.press_until("\x03", "\n\n> ")
        chat.type("/reset\r")
        chat.until("empty again\n\n> ")
        assert chat.ended("\x04") == 0
