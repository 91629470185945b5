"""The harness of the documents finds blocks, and fails where a page is wrong."""

from __future__ import annotations

import pytest
from document_blocks import Block, blocks, commands, kiln_commands
from document_runs import Place, check_output, run

PAGE = """\
Text.

```bash
kiln serve --task embed   # a server
```

<!-- not run: it has a reason -->
```bash
KILN_COMPILE=off kiln warmup --model 'a b' \\
  --dry-run && kiln env | head
docker build -t kiln .
torchrun --nnodes 2 --no-python kiln serve x
```

```python
print("http://127.0.0.1:8000")
```

<!-- output -->
```text
http…8000
```
"""


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return blocks(path)


def _block(text, output, language="text"):
    return Block("page.md", 1, "bash", text, "", output=output, output_language=language)


def test_blocks_know_their_comment_their_server_and_their_output(page):
    served, left, client = page
    assert (served.line, served.starts_server, served.runs, served.server) == (3, True, True, "")
    assert not left.runs
    assert left.note == "not run: it has a reason"
    assert client.is_client
    assert client.server == commands(served.text)[0]
    assert client.output == "http…8000\n"


def test_commands_of_kiln_are_found_behind_variables_pipes_and_torchrun(page):
    assert kiln_commands(page[0]) == [["serve", "--task", "embed"]]
    assert kiln_commands(page[1]) == [
        ["warmup", "--model", "a b", "--dry-run"],
        ["env"],
        ["serve", "x"],
    ]


@pytest.mark.parametrize(
    ("printed", "shown", "language"),
    [
        ("one\ntwo  three 4 s\n", "two three … s\n", "text"),
        ('{"a": [{"b": 1, "c": 2}], "d": 3}', '{"a": [{"b": 1, "c": "…"}]}', "json"),
    ],
)
def test_what_a_page_shows_of_an_output_is_enough(printed, shown, language):
    check_output(_block("true", shown, language), printed)


@pytest.mark.parametrize(
    ("printed", "shown", "language"),
    [
        ("two\none\n", "one\ntwo\n", "text"),
        ("three\n", "two\n", "text"),
        ('{"a": [1]}', '{"a": [1, 2]}', "json"),
        ('{"a": 1}', '{"b": "…"}', "json"),
    ],
)
def test_another_output_fails(printed, shown, language):
    with pytest.raises(AssertionError, match="printed"):
        check_output(_block("true", shown, language), printed)


@pytest.mark.parametrize("text", ["false\ntrue\n", "echo $UNSET\n", "false | cat\n"])
def test_a_command_that_fails_fails(text, tmp_path):
    with pytest.raises(AssertionError, match="ended with"):
        run(_block(text, None), "", Place(tmp_path, tmp_path))
