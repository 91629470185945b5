"""``kiln chat`` with messages from a pipe: answers alone, and an error ends it."""

from __future__ import annotations

import json

import pytest
from chat_server import chat_server

from kiln.engine.cli.options import DEMO_FOLDER as DEMO


@pytest.fixture
def server():
    with chat_server() as made:
        yield made


def test_answers_go_to_stdout_and_what_commands_say_to_stderr(kiln, server, tmp_path):
    file = tmp_path / "x.json"
    lines = ["think", "/etc/hosts", '"""', "a", "/help", '"""', "/usr is full", "", " /reset"]
    lines += ["/retry", "/system be brief", "/model adapter", f"/save {file}", "/exit", "never"]
    done = kiln("chat", "--url", server.url, stdin="\n".join(lines))
    assert done.returncode == 0, done.stderr
    heard = ["think", "/etc/hosts", "a\n/help", "/usr is full", "/reset", "/reset"]
    assert done.stdout.split("base heard ")[1:] == [f"{one}\n" for one in heard]
    assert "adapter answers from now on" in done.stderr
    saved = json.loads(file.read_text())
    assert saved["model"] == "adapter"
    assert saved["messages"][0] == {"role": "system", "content": "be brief"}
    asked = [one["content"] for one in saved["messages"] if one["role"] == "user"]
    assert asked == heard[:-1], "what is asked again is asked once"
    assert "let me" not in file.read_text(), "reasoning is not part of the conversation"


@pytest.mark.parametrize(
    ("question", "says"),
    [
        ("break", "closed the stream before the end"),
        ("refuse", "the server answered 400: not that"),
        ("late", "out of luck"),
        ("odd", "does not answer as OpenAI's API does, but with '<html>'"),
    ],
)
def test_an_error_of_the_server_is_one_line_and_code_1(kiln, server, question, says):
    done = kiln("chat", "--url", server.url, stdin=f"{question}\nhi\n")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
    assert says in done.stderr
    assert "heard hi" not in done.stdout


def test_a_command_that_makes_no_sense_does_not_end_a_pipe(kiln, server, tmp_path):
    (tmp_path / "x.md").write_text("mine")
    lines = ["/retry", "/hepl", "/xyzzy", "/reset now", "/model other", "/save", "/save x.txt"]
    lines += [f"/save {tmp_path / 'x.md'}", "hi", f"/save! {tmp_path / 'x.md'}"]
    done = kiln("chat", "--url", server.url, stdin="\n".join(lines))
    assert (done.returncode, done.stdout) == (0, "base heard hi\n")
    told = done.stderr.splitlines()
    for line, says in zip(
        told,
        [
            "there is no question to ask again",
            "did you mean /help?",
            "/xyzzy is no command; /help lists them",
            "/reset takes no further word",
            "model 'other': is not here; there are base, adapter",
            "/save needs a file",
            "want a file that ends in .json or .md",
            "exists and stays as it is; /save! ",
            "2 messages are in",
        ],
        strict=True,
    ):
        assert says in line
    assert (
        (tmp_path / "x.md").read_text().endswith("## user\n\nhi\n\n## assistant\n\nbase heard hi\n")
    )


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--url", "{url}", "other"), "model 'other': is not here; there are base, adapter"),
        (("--url", "{url}", "--max-model-len", 3), "--max-model-len: the server at --url has its"),
        (("--url", "{url}", "--lora-modules", "a=b"), "--lora-modules: the server at --url has"),
        (("--url", "ftp://x"), "--url 'ftp://x': ftp is neither http nor https"),
        (("--api-key", "x"), "--api-key: is that of the server at --url"),
    ],
)
def test_flags_that_make_no_sense_together_are_refused(kiln, server, flags, says):
    done = kiln("chat", *(str(one).format(url=server.url) for one in flags), stdin="hi\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert says in done.stderr


def test_a_server_without_models_or_api(kiln):
    with chat_server([]) as server:
        done = kiln("chat", "--url", server.url, stdin="hi\n")
        assert (done.returncode, "lists no model" in done.stderr) == (1, True)
        server.models = 3
        done = kiln("chat", "--url", server.url, stdin="hi\n")
        assert done.returncode == 1


@pytest.mark.deep  # an engine of its own
def test_the_own_engine_has_its_adapters(kiln):
    lines = ["What is 17 + 25?", "/model", "/model own", "/reset", "What is 17 + 25?"]
    words = ("--lora-modules", f"own={DEMO / 'adapters' / 'sentence'}", "--kv-memory-gib", 0.1)
    done = kiln("chat", *words, stdin="\n".join(lines))
    assert done.returncode == 0, done.stderr
    alone, adapted = done.stdout.splitlines()
    assert (alone, "42" in adapted, adapted != alone) == ("42", True, True)
    assert "* demo\n  own" in done.stderr
